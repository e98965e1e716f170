"""The time of a step, by part: the work that the schedule states, divided by the rates of kernels and links.

    attention    forward, 2.5 times as much backward, forward again if it is recomputed; merging the outputs of tiles.
                 By the kernel that runs and the lengths of documents (attention_rates.py)
    linear       matrix products, the bytes that norms, gates, rotary and residuals read and write, and a least time for
                 every GPU operation
    launching    the host, which launches one operation after the other; hidden behind all but small models
    exchange     messages between ranks that share a sequence, by link; the schedule says how much of it is hidden
    copies       tapes in host memory and on disk, the slower of the two; hidden behind the rest of the same pass. The
                 link to the host has a lane for each direction, at the rate of a GPU while all GPUs of its node copy;
                 reading and writing share a disk, as GPUs of a node do. K and V are hidden behind attention alone,
                 which visits a tile while the next one comes: with chunks below the balance chunk (balance.py) it waits
    weights      gathered for each pass, gradients reduced in fp32, over all ranks; hidden behind all but short blocks.
                 On one rank they are only copied, which nothing hides; under ZeRO-1 and 2, without FSDP2, once a step
    optimizer    clips, reads and writes 33 bytes per parameter of the shard, or copies moments from the host and back

Measured on the H200: small operations between a block's products add to their time, an operation takes some
microseconds of the GPU even if it has nothing to do, and of the host to be launched. Products of narrow models (hidden
576) run at the rate of wide ones as long as they have many tokens. Padding is left out.

Links: ranks are numbered along a node, Ulysses ranks first (parallel/mesh.py). C Ulysses ranks lie on one node if C
divides its GPUs, and the ring then goes across nodes. The schedule lists the messages; here they are split by where
they go, for the rank whose links are busy longest. Gathered parameters are the same under every mesh, so they are
left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from ithaca.model.spec import Spec
from ithaca.parallel.axes import runs_alone
from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.layout import Layout
from ithaca.planner.attention_rates import attention_seconds
from ithaca.planner.hardware import Gpu, Machine
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Copies, Message, Peers, Work, forward_flops, loss_flops, traffic
from ithaca.schedule.job import BF16, FP32, Job

SHARDED = 10  # FSDP2's hooks in a layer take the host as long as this many operations, beside those that they launch
GRAPHED = 100  # the host for a step of a CUDA graph: the batch, two replays, gradients, clipping, the optimizer
# GPU seconds of an operation that has nothing to do: 13,825 operations keep it busy for 0.33 s, 5,891 for 0.297 s
LEAST = (0.33 - 0.297) / (13825 - 5891)
# Bytes per parameter, Llama3.2-1B on an H200: the kernels' time by the bandwidth of a copy
UPDATE = 33  # the norm (1.1 ms) and AdamW (8.6 ms), which reads and writes 28
SHARDING = 48  # FSDP2 on one rank: casts, copies to and from its buffers, both ways
CAST = 6  # one rank without it reads each weight in fp32 and writes it in bf16, once a step
BETWEEN = 1.06  # the time of a block's products with everything between them, over the products and bytes alone


@dataclass(frozen=True)
class PassSeconds:
    """One pass over all layers, forward or backward: its time without copies, and the time of its copies."""

    computing: float
    host: float  # over the link to the host
    disk: float
    attending: float = 0.0  # of `computing`: attention
    fetching: float = 0.0  # of the copies: K and V, which only attention hides

    @property
    def copies(self) -> float:
        return max(self.host, self.disk)

    @property
    def waits(self) -> float:
        """Seconds that computing waits for copies."""
        return max(self.copies - self.computing, self.fetching - self.attending, 0.0)


@dataclass(frozen=True)
class Seconds:
    """The seconds of one step of one rank, by part. Parts overlap, so `step` is less than their sum."""

    attention_forward: float
    attention_backward: float
    linear: float
    launching: float
    exchange: float
    copies: float
    weights: float
    optimizer: float
    step: float
    passes: tuple[PassSeconds, PassSeconds]  # forward, backward; the loss lies between them

    @property
    def computing(self) -> float:
        """Attention and matrix products."""
        return self.attention_forward + self.attention_backward + self.linear

    @property
    def disk(self) -> float:
        """The part of `copies` that goes over the disk."""
        return sum(each.disk for each in self.passes)

    @property
    def waits(self) -> float:
        """The part of `copies` that the step waits for."""
        return sum(each.waits for each in self.passes)

    def repeated(self, times: int) -> "Seconds":
        """The seconds of a step with `times` such passes and one update (micro-batches)."""
        parts = {name: times * value for name, value in vars(self).items() if name not in ("optimizer", "passes")}
        parts["step"] -= (times - 1) * self.optimizer
        forward, backward = (PassSeconds(*(times * value for value in vars(each).values())) for each in self.passes)
        return Seconds(**parts, optimizer=self.optimizer, passes=(forward, backward))


def predict_seconds(job: Job, gpu: Gpu, machine: Machine, disks: int = 1) -> Seconds:
    """The time of a step of a job on some GPUs, with tapes striped over this many disks of each node."""
    work = job.costs.work(job)
    forward, backward = attention_seconds(job, work, gpu)
    merging = work.merged / gpu.bandwidth
    once = forward + merging
    forward, backward = work.attention_runs * once, backward + merging
    linear = BETWEEN * (work.linear / gpu.matmul + work.moved / gpu.bandwidth) + LEAST * work.launches
    launching = host_operations(job, work) / gpu.launches
    ulysses, ring = exchange_seconds(job, machine)
    weights = _weights(job, machine)
    optimizer = _optimizer(job.spec, job.plan, gpu, machine)
    computing = forward + backward + linear + _sharding(job, gpu, machine)
    exposed = job.costs.exposed(job, max(computing, launching), ulysses, ring)
    without_copies = max(exposed, ulysses + ring, weights)
    # What is not computing is spread evenly over it
    first = without_copies * (once + linear * forward_flops(job) / work.linear) / computing
    loss = without_copies * linear * loss_flops(job) / work.linear / computing
    disk = [_disk(copied, gpu, machine, disks) for copied in (work.disk.forward, work.disk.backward)]
    kv = [copy_seconds(copied, job.plan.kv, gpu, machine, disks) for copied in (work.kv.forward, work.kv.backward)]
    passes = (
        PassSeconds(first, work.host.forward.most / gpu.host, disk[0], once, kv[0]),
        PassSeconds(
            without_copies - first - loss,
            work.host.backward.most / gpu.host,
            disk[1],
            forward - once + backward,
            kv[1],
        ),
    )
    copies = sum(each.copies for each in passes)
    step = optimizer + without_copies + sum(each.waits for each in passes)
    return Seconds(forward, backward, linear, launching, ulysses + ring, copies, weights, optimizer, step, passes)


def _disk(copied: Copies, gpu: Gpu, machine: Machine, disks: int) -> float:
    """Seconds in which all GPUs of a node read and write its disks, one after the other."""
    return machine.gpus * (copied.into / gpu.disk_read + copied.out / gpu.disk_write) / disks


def copy_seconds(copied: Copies, place: str | None, gpu: Gpu, machine: Machine, disks: int = 1) -> float:
    """Seconds of copies between the device and a place, while all GPUs of the node copy as much."""
    over_host = copied.most / gpu.host
    return max(over_host, _disk(copied, gpu, machine, disks)) if place == "disk" else over_host


def bare_seconds(job: Job, gpu: Gpu) -> float:
    """Seconds of the attention kernels and matrix products of a pass alone: no schedule that runs them is faster.

    As `ithaca rehearse --bare` counts: what the schedule runs again is among them; merges, norms, gates, launches,
    messages, copies and the optimizer are not.
    """
    work = job.costs.work(job)
    forward, backward = attention_seconds(job, work, gpu)
    return work.attention_runs * forward + backward + work.linear / gpu.matmul


def host_operations(job: Job, work: Work) -> float:
    """What the host does in a step, counted in GPU operations that it could launch meanwhile."""
    if job.plan.cuda_graph:
        return GRAPHED
    hooks = 0 if runs_alone(job.axes, job.plan.zero) else SHARDED * job.spec.layers
    return work.launches + work.python + hooks


def _weights(job: Job, machine: Machine) -> float:
    """Seconds to gather weights in bf16, for both passes or once, and to reduce gradients, over the slower link."""
    ranks = machine.ranks // job.axes.tensor  # that have the same weights
    if ranks == 1:
        return 0.0  # not hidden: `_sharding`
    gathered = BF16 * (2 if job.plan.zero == 3 else 1)
    sent = job.rank_spec.parameters() * (ranks - 1) / ranks * (gathered + FP32)
    return sent / (machine.across if machine.nodes > 1 else machine.inside)


def _optimizer(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine) -> float:
    """Seconds to clip gradients, to read weights, gradients and moments and to write them, all in fp32."""
    shard = spec.parameters() / machine.ranks
    if plan.optimizer == "host":
        return 8 * shard / gpu.host
    return UPDATE * shard / gpu.bandwidth


def _sharding(job: Job, gpu: Gpu, machine: Machine) -> float:
    """Seconds of FSDP2's own copies on one rank, where nothing is sent. Over several ranks, `_weights` is larger."""
    if machine.ranks > job.axes.tensor:
        return 0.0
    copied = CAST if runs_alone(job.axes, job.plan.zero) else SHARDING
    return copied * job.rank_spec.parameters() / gpu.bandwidth


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in a step, to others of its node and to other nodes."""

    inside: int
    across: int

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.inside + other.inside, self.across + other.across)

    def seconds(self, machine: Machine) -> float:
        return self.inside / machine.inside + self.across / machine.across


def exchange_seconds(job: Job, machine: Machine) -> tuple[float, float]:
    """Seconds of a step's messages between Ulysses ranks, and of those between ring ranks."""
    ulysses, ring = busiest(job, machine)
    return ulysses.seconds(machine), ring.seconds(machine)


def busiest(job: Job, machine: Machine) -> tuple[Sent, Sent]:
    """What the busiest rank sends to Ulysses ranks and to ring ranks: the rank whose links take longest."""
    if job.axes.context == 1:
        return Sent(0, 0), Sent(0, 0)
    messages = _step_messages(job)
    positions = {position.key(job.split): position for position in _positions(machine, job.layout)}.values()
    found = [tuple(_sent(job, messages[ring], position, ring) for ring in (False, True)) for position in positions]
    ulysses, ring = max(found, key=lambda sent: sum(part.seconds(machine) for part in sent))
    return ulysses, ring


def _step_messages(job: Job) -> dict[bool, list[tuple[int, Message]]]:
    """Messages over Ulysses ranks and over ring ranks, each with the number of layers that send it."""
    layers = job.spec.layers
    found: dict[bool, list[tuple[int, Message]]] = {False: [], True: []}
    # Layers that recompute attention send more than those that save its output, and the last layer may differ
    again = [place == RECOMPUTE for place in job.plan.placement(layers).o[:-1]]
    alike = [(times, again.index(kind)) for kind, times in Counter(again).items()]
    for times, layer in (*alike, (1, layers - 1)):
        for message in (message for way in job.costs.messages(job, layer) for message in way):
            found[message.ring].append((times, message))
    return found


@dataclass(frozen=True)
class _RankPosition:
    """One rank of a sequence, and which other ranks are on its node."""

    ulysses: int
    ring: int
    ulysses_here: range
    rings_here: range
    next_here: bool  # whether the next rank in the ring is on its node

    def key(self, split: HeadSplit) -> tuple[int, ...]:
        """Everything that the rank's traffic depends on."""
        q, kv = (
            sum(len(part) for part in parts[self.ulysses_here.start : self.ulysses_here.stop])
            for parts in (split.q, split.kv)
        )
        mine = len(split.q[self.ulysses]), len(split.kv[self.ulysses])
        return (*mine, q, kv, len(self.ulysses_here), len(self.rings_here), self.next_here)


def _positions(machine: Machine, layout: Layout) -> Iterator[_RankPosition]:
    """A rank for each position relative to the nodes, of sequences that begin anywhere on a node, until all repeats."""
    return iter(_rank_positions(machine.ranks, machine.gpus, layout.ulysses, layout.ring))


@lru_cache(maxsize=1024)  # the planner's search asks for the same values many times
def _rank_positions(ranks: int, gpus: int, ulysses_ranks: int, ring_ranks: int) -> tuple[_RankPosition, ...]:
    sharing, found = ulysses_ranks * ring_ranks, []
    for start in range(0, min(ranks, lcm(gpus, sharing)), sharing):
        for rank in range(start, start + min(sharing, lcm(gpus, ulysses_ranks))):
            ring, ulysses = divmod(rank - start, ulysses_ranks)
            begin = rank // gpus * gpus - start  # of the node, counted as the sequence's ranks are
            first, last = begin - ulysses, begin + gpus - 1 - ulysses  # where its ring ranks can lie
            rings = range(max(-(-first // ulysses_ranks), 0), min(last // ulysses_ranks, ring_ranks - 1) + 1)
            here = range(max(begin - ring * ulysses_ranks, 0), min(begin + gpus - ring * ulysses_ranks, ulysses_ranks))
            found.append(_RankPosition(ulysses, ring, here, rings, (ring + 1) % ring_ranks in rings))
    return tuple(found)


def _sent(job: Job, messages: list[tuple[int, Message]], position: _RankPosition, in_ring: bool) -> Sent:
    """Bytes of some messages, in all layers, that a rank sends inside its node and across nodes."""
    others = [rank for rank in range(job.axes.by_heads) if rank != position.ulysses]
    rings_here = len(position.rings_here) - 1  # without its own

    def sent(on_node: bool) -> int:
        ulysses = [] if in_ring else [rank for rank in others if (rank in position.ulysses_here) == on_node]
        rings = (rings_here if on_node else job.axes.ring - 1 - rings_here) if in_ring else 0
        next_counts = in_ring and job.axes.ring > 1 and position.next_here == on_node
        if not (ulysses or rings or next_counts):
            return 0
        peers = Peers(position.ulysses, ulysses, rings, next_counts)
        return sum(times * traffic([message], job, peers).bytes for times, message in messages)

    return Sent(sent(True), sent(False))
