"""What the ranks that share a sequence send each other in a block: collectives, and bytes that leave a rank.

A schedule's `cost.py` lists its messages. A message names tensors, not bytes, because heads may not divide evenly over
ranks; `Peers` says from whose view, and to whom, bytes are counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ithaca.parallel.head_split import HeadSplit

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

TO_HEADS, TO_TOKENS = "to_heads", "to_tokens"  # all-to-all over Ulysses ranks, there and back
TO_EACH, TO_NEXT = "to_each", "to_next"  # the same bytes to every other ring rank, or to the next one alone


@dataclass(frozen=True)
class Message:
    """Tensors of all local tokens that a block sends, in `count` collectives."""

    pattern: str
    split: HeadSplit  # the heads that are sent
    queries: int = 0  # tensors with query heads: q, o, and their gradients
    keys: int = 0  # tensors with key/value heads: K, V, and their gradients
    lses: int = 0  # log-sum-exps
    high: bool = False  # numbers are sums in at least fp32
    count: int = 1
    steps: int = 1  # times that the tensors are sent: a block of K and V goes around a ring in several

    @property
    def ring(self) -> bool:
        """Whether the message goes over ring ranks, not over Ulysses ranks."""
        return self.pattern in (TO_EACH, TO_NEXT)


@dataclass(frozen=True)
class Peers:
    """The receivers that are counted, seen from one rank."""

    rank: int  # the sender, among its Ulysses ranks
    ulysses: Sequence[int]  # other Ulysses ranks
    ring: int  # number of other ring ranks
    next_in_ring: bool

    @staticmethod
    def all(ulysses: int, ring: int, rank: int) -> "Peers":
        """Everyone that shares the sequence with a rank."""
        return Peers(rank, [other for other in range(ulysses) if other != rank], ring - 1, ring > 1)


@dataclass(frozen=True)
class Traffic:
    """Collectives, and the bytes that they take from a rank to others."""

    messages: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def traffic(messages: Iterable[Message], job: "Job", peers: Peers) -> Traffic:
    """The sum of some messages."""
    return sum((Traffic(message.count, _bytes(message, job, peers)) for message in messages), Traffic(0, 0))


def _bytes(message: Message, job: "Job", peers: Peers) -> int:
    q, kv = message.split.q, message.split.kv
    number = job.spec.head_size * (job.high if message.high else job.itemsize)  # of one head of one token
    mine = message.queries * len(q[peers.rank]) + message.keys * len(kv[peers.rank])
    tokens = job.layout.local
    if message.pattern == TO_HEADS:
        return tokens * number * sum(message.queries * len(q[r]) + message.keys * len(kv[r]) for r in peers.ulysses)
    if message.pattern == TO_TOKENS:
        return tokens * number * mine * len(peers.ulysses)
    block = tokens * len(q) * (mine * number + message.lses * len(q[peers.rank]) * job.high)
    return block * message.steps * (peers.ring if message.pattern == TO_EACH else int(peers.next_in_ring))
