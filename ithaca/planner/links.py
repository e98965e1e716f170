"""Bytes that ranks with a common sequence send inside a node and across nodes, and how long that takes.

Ranks are numbered along a node, Ulysses ranks first (parallel/mesh.py). C Ulysses ranks lie on one node if C divides
its GPUs, and then the ring goes across nodes. The schedule lists the messages. This file splits them by where they go,
for the rank whose links are busy longest. Gathered weights are left out: they are the same on every mesh.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.layout import Layout
from ithaca.planner.hardware import Machine
from ithaca.schedule.job import Job
from ithaca.schedule.messages import Message, Peers, traffic


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
    seats = {seat.key(job.split): seat for seat in _seats(machine, job.layout)}.values()
    found = [tuple(_sent(job, messages[ring], seat, ring) for ring in (False, True)) for seat in seats]
    ulysses, ring = max(found, key=lambda sent: sum(part.seconds(machine) for part in sent))
    return ulysses, ring


def _step_messages(job: Job) -> dict[bool, list[tuple[int, Message]]]:
    """Messages over Ulysses ranks and over ring ranks, each with the number of layers that send it."""
    layers = job.spec.layers
    found: dict[bool, list[tuple[int, Message]]] = {False: [], True: []}
    # Only the last layer may differ from the others
    for times, layer in ((layers - 1, 0), (1, layers - 1)):
        for message in (message for way in job.costs.messages(job, layer) for message in way):
            found[message.ring].append((times, message))
    return found


@dataclass(frozen=True)
class _Seat:
    """One rank of a sequence, and which others are on its node."""

    ulysses: int
    ring: int
    ulysses_here: range
    rings_here: range
    next_here: bool  # the next in the ring

    def key(self, split: HeadSplit) -> tuple[int, ...]:
        """All that its traffic depends on."""
        q, kv = (
            sum(len(part) for part in parts[self.ulysses_here.start : self.ulysses_here.stop])
            for parts in (split.q, split.kv)
        )
        mine = len(split.q[self.ulysses]), len(split.kv[self.ulysses])
        return (*mine, q, kv, len(self.ulysses_here), len(self.rings_here), self.next_here)


def _seats(machine: Machine, layout: Layout) -> Iterator[_Seat]:
    """One rank for each way of lying on the nodes: where a sequence can begin on a node, ranks until all repeats."""
    return iter(_placed_seats(machine.ranks, machine.gpus, layout.ulysses, layout.ring))


@lru_cache(maxsize=1024)  # the planner's search asks for the same ones many times
def _placed_seats(ranks: int, gpus: int, ulysses_ranks: int, ring_ranks: int) -> tuple[_Seat, ...]:
    sharing, found = ulysses_ranks * ring_ranks, []
    for start in range(0, min(ranks, lcm(gpus, sharing)), sharing):
        for rank in range(start, start + min(sharing, lcm(gpus, ulysses_ranks))):
            ring, ulysses = divmod(rank - start, ulysses_ranks)
            begin = rank // gpus * gpus - start  # of the node, counted as the sequence's ranks are
            first, last = begin - ulysses, begin + gpus - 1 - ulysses  # where its ring ranks can lie
            rings = range(max(-(-first // ulysses_ranks), 0), min(last // ulysses_ranks, ring_ranks - 1) + 1)
            here = range(max(begin - ring * ulysses_ranks, 0), min(begin + gpus - ring * ulysses_ranks, ulysses_ranks))
            found.append(_Seat(ulysses, ring, here, rings, (ring + 1) % ring_ranks in rings))
    return tuple(found)


def _sent(job: Job, messages: list[tuple[int, Message]], seat: _Seat, in_ring: bool) -> Sent:
    """Bytes of some messages, in all layers, that a rank sends inside its node and across nodes."""
    others = [rank for rank in range(job.axes.ulysses) if rank != seat.ulysses]
    rings_here = len(seat.rings_here) - 1  # without its own

    def sent(on_node: bool) -> int:
        ulysses = [] if in_ring else [rank for rank in others if (rank in seat.ulysses_here) == on_node]
        rings = (rings_here if on_node else job.axes.ring - 1 - rings_here) if in_ring else 0
        next_counts = in_ring and job.axes.ring > 1 and seat.next_here == on_node
        peers = Peers(seat.ulysses, ulysses, rings, next_counts)
        return sum(times * traffic([message], job, peers).bytes for times, message in messages)

    return Sent(sent(True), sent(False))
