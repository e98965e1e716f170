"""Which ring × Ulysses ranks can share a sequence, what each link then carries, and which are expected to be best.

Ranks are counted along a node, Ulysses ranks first (parallel/mesh.py): C of them lie on one node where C divides its
GPUs, and the ring then goes across. What is sent is what plans/traffic.py says, split by where it goes, for the rank
that its links keep longest; parameters are gathered over all ranks under every mesh, and are left out.

    computing    FLOPs of a rank, attention with the heads of the fullest; blocks that are run again count twice
    exchange     bytes inside the node and across nodes, each by the speed of its link, one after the other
    step         under `sweep` the exchange hides behind the computing, but for the part of one chunk; where K and V
                 travel around, they hide; all else is waited for

Of meshes within 1 % of the fastest the one with the least K and V on a GPU is best, then the one that sends least
across nodes. Padding, copies, the optimizer, latency are not counted: the seconds are for comparing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.head_split import HeadSplit, head_rounds, imbalance, split_heads
from ithaca.parallel.layout import Layout
from ithaca.planner.machine import Machine
from ithaca.plans.plan import Plan
from ithaca.plans.traffic import Sender, block_traffic

BF16, FP32 = 2, 4  # bytes
SAME = 1.01  # expected times within that are no difference


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step, to others of its node and to other nodes."""

    inside: int
    across: int

    def seconds(self, machine: Machine) -> float:
        return self.inside / machine.inside + self.across / machine.across


@dataclass(frozen=True)
class Choice:
    """A mesh that works, for one step over a sequence for each of its data ranks."""

    ulysses: int
    ring: int
    data: int  # sequences at a time
    split: HeadSplit
    between_ulysses: Sent
    between_rings: Sent
    kv_bytes: int  # of a block's K and V on a GPU, with their gradients
    exchanges: tuple[float, float]  # seconds that links take, between Ulysses ranks and between ring ranks
    chunks: int
    computing: float  # seconds
    seconds: float = 0.0  # of a step

    @property
    def exchange(self) -> float:
        return sum(self.exchanges)

    def with_exchange(self, plan: Plan, computing: float) -> float:
        """Seconds of so much computing with what is not hidden of the exchange."""
        ulysses, ring = self.exchanges
        if plan.sweeps:
            return max(computing, self.exchange) + min(computing, self.exchange) / self.chunks
        if plan.travel == "around":
            return ulysses + max(computing, ring)
        return self.exchange + computing

    @property
    def inside(self) -> int:
        return self.between_ulysses.inside + self.between_rings.inside

    @property
    def across(self) -> int:
        return self.between_ulysses.across + self.between_rings.across


def choose(spec: Spec, plan: Plan, machine: Machine, tokens: int, sharing: int | None = None) -> list[Choice]:
    """Every mesh that works when `sharing` GPUs share a sequence, all of them when it is not given; the best first."""
    plan, sharing = plan.settled(), machine.ranks if sharing is None else sharing
    _check(plan, machine, sharing)
    shapes = [
        (ulysses, sharing // ulysses)
        for ulysses in range(1, min(sharing, spec.heads) + 1)
        if sharing % ulysses == 0 and _allows(plan, ulysses, sharing // ulysses)
    ]
    if not shapes:
        most = max(count for count in range(1, spec.heads + 1) if machine.ranks % count == 0)
        raise PlanError(
            f"recipe '{plan.recipe}' cannot share a sequence among {sharing} GPUs, as the model has {spec.heads} query "
            f"heads: {most} can share one (share={most}), or use recipe 'sweep'"
        )
    found = [weigh(spec, plan, machine, tokens, *shape) for shape in shapes]
    fastest = min(choice.seconds for choice in found)
    return sorted(
        found,
        key=lambda choice: (
            (0.0, choice.kv_bytes, choice.across, choice.seconds)
            if choice.seconds <= SAME * fastest
            else (choice.seconds, choice.kv_bytes, choice.across, choice.seconds)
        ),
    )


def _check(plan: Plan, machine: Machine, sharing: int) -> None:
    if not plan.shares:
        raise PlanError(f"recipe '{plan.recipe}' shares no sequence among GPUs: 'sweep' does")
    if type(sharing) is not int or sharing < 1 or machine.ranks % sharing:
        fitting = [str(count) for count in range(1, machine.ranks + 1) if machine.ranks % count == 0]
        raise PlanError(f"share={sharing} does not divide {machine.ranks} GPUs: {', '.join(fitting[-8:])} do")


def _allows(plan: Plan, ulysses: int, ring: int) -> bool:
    return (ring == 1 or plan.rings) and (ulysses == 1 or plan.shares_heads)


def weigh(spec: Spec, plan: Plan, machine: Machine, tokens: int, ulysses: int, ring: int) -> Choice:
    split = split_heads(spec.heads, spec.kv_heads, ulysses)
    chunk = plan.chunk_of(tokens, shorten=True) if plan.sweeps else tokens
    layout = Layout(tokens, chunk, ulysses, ring)
    between_ulysses, between_rings = _busiest(spec, plan, machine, layout, split)
    widest = max(map(len, split.kv))
    unhidden = Choice(
        ulysses=ulysses,
        ring=ring,
        data=machine.ranks // (ulysses * ring),
        split=split,
        between_ulysses=between_ulysses,
        between_rings=between_rings,
        kv_bytes=2 * layout.local * ulysses * widest * spec.head_size * (BF16 + (FP32 if plan.sweeps else BF16)),
        exchanges=(between_ulysses.seconds(machine), between_rings.seconds(machine)),
        chunks=layout.chunks.count,
        computing=_computing(spec, plan, machine, layout, split),
    )
    return replace(unhidden, seconds=unhidden.with_exchange(plan, unhidden.computing))


def _computing(spec: Spec, plan: Plan, machine: Machine, layout: Layout, split: HeadSplit) -> float:
    attention = 6 * spec.layers * spec.heads * spec.head_size * layout.tokens
    linear = spec.flops_per_token(layout.tokens) - attention
    again = 4 / 3 if plan.checkpoint == "full" or plan.recipe == "untied" else 1  # forward is a third of a step
    return again * (attention * (1 + imbalance(split)) + linear) * layout.local / machine.flops


def _busiest(spec: Spec, plan: Plan, machine: Machine, layout: Layout, split: HeadSplit) -> tuple[Sent, Sent]:
    """What the rank sends whose links take longest: to Ulysses ranks, and to ring ranks."""
    seats = {seat.key(split): seat for seat in _seats(machine, layout)}.values()
    found = [tuple(_sent(spec, plan, layout, split, seat, in_ring) for in_ring in (False, True)) for seat in seats]
    to_ulysses, to_rings = max(found, key=lambda sent: sum(part.seconds(machine) for part in sent))
    return to_ulysses, to_rings


@dataclass(frozen=True)
class _Seat:
    """One rank of a sequence, and which others are on its node."""

    ulysses: int
    ring: int
    ulysses_here: range
    rings_here: range
    next_here: bool  # in the ring

    def key(self, split: HeadSplit) -> tuple[int, ...]:
        """What its traffic depends on."""
        q, kv = (
            sum(len(part) for part in parts[self.ulysses_here.start : self.ulysses_here.stop])
            for parts in (split.q, split.kv)
        )
        mine = len(split.q[self.ulysses]), len(split.kv[self.ulysses])
        return (*mine, q, kv, len(self.ulysses_here), len(self.rings_here), self.next_here)


def _seats(machine: Machine, layout: Layout) -> Iterator[_Seat]:
    """Those that differ in where they lie: of sequences that begin elsewhere on a node, ranks until all repeats."""
    size, gpus = layout.ulysses, machine.gpus
    for start in range(0, min(machine.ranks, lcm(gpus, layout.ranks)), layout.ranks):
        for rank in range(start, start + min(layout.ranks, lcm(gpus, size))):
            ring, ulysses = divmod(rank - start, size)
            begin = machine.node(rank) * gpus - start  # of the node, counted as the sequence's ranks are
            first, last = begin - ulysses, begin + gpus - 1 - ulysses  # where its ring ranks can lie
            rings = range(max(-(-first // size), 0), min(last // size, layout.ring - 1) + 1)
            here = range(max(begin - ring * size, 0), min(begin + gpus - ring * size, size))
            yield _Seat(ulysses, ring, here, rings, (ring + 1) % layout.ring in rings)


@dataclass(frozen=True)
class _Seated(Sender):
    """One that knows how many of its ring ranks count, and need not ask for each of thousands."""

    rings: int = 0

    @property
    def ring_peers(self) -> int:
        return self.rings


def _sent(spec: Spec, plan: Plan, layout: Layout, split: HeadSplit, seat: _Seat, in_ring: bool) -> Sent:
    """To its Ulysses ranks or to its ring ranks, in all blocks."""
    rings_here = len(seat.rings_here) - 1  # but its own

    def sent(on_node: bool) -> int:
        rings = rings_here if on_node else layout.ring - 1 - rings_here

        def counts(ring: int, ulysses: int) -> bool:
            here = ring in seat.rings_here if ring != seat.ring else ulysses in seat.ulysses_here
            return (ring != seat.ring) == in_ring and here == on_node

        sender = _Seated(
            seat.ulysses,
            layout.local,
            layout.chunks.count,
            spec.head_size,
            BF16,
            FP32,
            layout.ring,
            seat.ring,
            counts,
            rings if in_ring else 0,
        )
        rounds = head_rounds(split, plan.heads_at_once(layout.ulysses))
        blocks = (block_traffic(plan, layer, spec.layers, rounds, sender) for layer in (0, spec.layers - 1))
        first, last = (forward.bytes + backward.bytes for forward, backward in blocks)
        return (spec.layers - 1) * first + last  # the last alone differs: under `sweep` its K and V are still there

    return Sent(sent(True), sent(False))


def impossible(spec: Spec, plan: Plan, machine: Machine, sharing: int | None = None) -> Iterator[str]:
    """Why other divisions of the GPUs do not work, each in a few words."""
    sharing = machine.ranks if sharing is None else sharing
    for ulysses in (count for count in range(1, sharing + 1) if sharing % count == 0):
        ring = sharing // ulysses
        if ulysses > spec.heads:
            yield f"{ulysses} × {ring}: more Ulysses ranks than the {spec.heads} query heads"
        elif not _allows(plan, ulysses, ring):
            kind = "ring" if plan.shares_heads else "Ulysses"
            yield f"{ulysses} × {ring}: recipe '{plan.recipe}' has no {kind} ranks"
