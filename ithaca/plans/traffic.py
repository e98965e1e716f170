"""What a block's exchange sends over the Ulysses ranks, as arithmetic: all-to-alls, and bytes that leave a rank.

With C ranks that have the same number of heads, n tokens on each and b bytes a number, let

    q = n · Hq · D · b · (C − 1) / C                  a query-like tensor (q, o and their gradients)
    kv = 2 · n · max(Hkv, C) · D · b · (C − 1) / C    K and V, or their gradients; with C > Hkv a head goes to several

| recipe | forward | backward |
|---|---|---|
| `ulysses`, `alst`, checkpoint none | 2: (q, kv) there, o back | 2: do there, (dq, dkv) back |
| checkpoint selective | the same | 2: (q, kv, o, do) there, (dq, dkv) back |
| checkpoint full | the same | 4: those of forward again, do there, (dq, dkv) back |
| `untied`, R rounds, G groups | 2 R + G | 4 R + 3 G: forward again; (q, o, do) there, dq back; kv, dkv once a group |
| `sweep`, N > 1 chunks, o kept | 2 N | 3 N − 2: (q, o, do) there, (dq, dkv) back; kv with the queries or before |
| o recomputed | 2 N | 5 N − 1: as above, with o back and do there by themselves |

One chunk alone sends 2 and 2, or 4 where o is recomputed. A group is the rounds that read the same K and V; where each
has one round, kv goes with q: 2 R and 4 R. In bytes forward sends 2 q + kv; backward 2 q + kv, 4 q + 2 kv, 4 q + 2 kv,
6 q + 3 kv, and the sweep 4 q + 2 kv. The last layer of a sweep still has K and V: it sends none of them by themselves,
and one kv less. What the numbers below add to this is heads that do not divide. K and V that documents keep a chunk
from asking for travel with its queries instead: fewer messages, the same bytes.

Ring ranks, R of them, add to this, with L = C · n tokens and h query, k key/value heads of a rank, f bytes a sum:

| recipe | forward | backward |
|---|---|---|
| `ring`, `hybrid`, K and V around | R − 1 messages, (R − 1) · L · 2 k D b | those again, and R of L · 2 k D f each |
| gathered | 1, the same bytes | 1 again, and 1 of (R − 1) · L · 2 k D f |
| `sweep`, N chunks | 3 N: q, o, lse; (R − 1) · L · h (2 D b + f) | 3 N: do q o, lse, dq; (R − 1) · L · h (4 D b + f) |

With checkpoint full, and where the sweep recomputes o, backward sends what forward does once more. The sweep's bytes
depend on the tokens alone, not on how many chunks there are; its Ulysses ranks exchange kv before in one chunk less,
3 N − 3 messages. (`ring` alone, without Ulysses ranks, has no other line.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ithaca.parallel.head_split import HeadSplit, Rounds
from ithaca.parallel.layout import hops
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """All-to-alls, and the bytes that they take from this rank to others."""

    messages: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def everyone(ring: int, ulysses: int) -> bool:  # noqa: ARG001
    return True


@dataclass(frozen=True)
class Sender:
    """One of the ranks that share a sequence, which is one document."""

    rank: int  # among the Ulysses ranks
    tokens: int  # local ones
    chunks: int
    head_size: int
    itemsize: int  # of the computation
    high: int  # of sums, and of the log-sum-exp
    ring: int = 1  # ring ranks
    ring_rank: int = 0
    counts: Callable[[int, int], bool] = everyone  # whether what goes to that (ring, ulysses) rank does

    @property
    def row(self) -> int:
        """Bytes of one head of one token."""
        return self.head_size * self.itemsize

    def ring_block(self, split: HeadSplit, queries: int, lses: int, keys: int, high: bool = False) -> int:
        """Bytes of so many tensors of this rank's heads and its Ulysses ranks' tokens."""
        q, kv = len(split.q[self.rank]), len(split.kv[self.rank])
        numbers = self.head_size * (self.high if high else self.itemsize)
        return self.tokens * len(split.q) * ((queries * q + keys * kv) * numbers + lses * q * self.high)

    @property
    def ring_peers(self) -> int:
        """To how many other ring ranks something goes that goes to all."""
        return sum(self.counts(ring, self.rank) for ring in range(self.ring) if ring != self.ring_rank)

    @property
    def next_in_ring(self) -> int:
        """The same for what goes to the next alone."""
        return int(self.ring > 1 and self.counts((self.ring_rank + 1) % self.ring, self.rank))

    def ulysses_peers(self, split: HeadSplit) -> list[int]:
        ranks = range(len(split.q))
        return [rank for rank in ranks if rank != self.rank and self.counts(self.ring_rank, rank)]

    def there(self, split: HeadSplit, queries: int, keys: int) -> Traffic:
        """So many query-like and key-like tensors of all local tokens, to the ranks that attend with their heads."""
        peers = self.ulysses_peers(split)
        width = sum(queries * len(split.q[rank]) + keys * len(split.kv[rank]) for rank in peers)
        return Traffic(1, self.tokens * self.row * width)

    def back(self, split: HeadSplit, queries: int, keys: int) -> Traffic:
        """The same of this rank's heads, to the ranks that hold the tokens."""
        width = queries * len(split.q[self.rank]) + keys * len(split.kv[self.rank])
        return Traffic(1, self.tokens * self.row * width * len(self.ulysses_peers(split)))


def block_traffic(plan: Plan, layer: int, layers: int, rounds: Rounds, sender: Sender) -> tuple[Traffic, Traffic]:
    """What a block sends in its forward and in its backward pass."""
    plan = plan.settled()
    if plan.sweeps:
        recomputed = plan.placement(layers).o[layer] == RECOMPUTE
        return _sweep(rounds[0][0], sender, recomputed, keys_there=layer == layers - 1)
    if sender.ring > 1:
        return _with_travel(plan, rounds[0][0], sender)
    return _whole(plan, rounds, sender)


def _whole(plan: Plan, rounds: Rounds, sender: Sender) -> tuple[Traffic, Traffic]:
    forward = _sum(_group_forward(group, sender) for group in rounds)
    again = Traffic(0, 0) if plan.checkpoint in ("none", "selective") else forward
    if len(rounds) == len(rounds[0]) == 1 and plan.checkpoint != "selective":
        split = rounds[0][0]  # whose q, K, V and o are still where they are needed
        return forward, again + sender.there(split, 1, 0) + sender.back(split, 1, 2)
    return forward, again + _sum(_group_backward(group, sender) for group in rounds)


def _with_travel(plan: Plan, split: HeadSplit, sender: Sender) -> tuple[Traffic, Traffic]:
    """`ring` and `hybrid`: what Ulysses ranks exchange, if there are any, and K and V with their gradients."""
    nothing = Traffic(0, 0), Traffic(0, 0)
    forward, backward = _whole(plan, ((split,),), sender) if len(split.q) > 1 else nothing
    block, sums = (sender.ring_block(split, 0, 0, 2, high) for high in (False, True))
    if plan.travel == "around":
        steps, onward = sender.ring - 1, sender.next_in_ring
        kv, dkv = Traffic(steps, steps * onward * block), Traffic(sender.ring, sender.ring * onward * sums)
    else:
        kv, dkv = Traffic(1, sender.ring_peers * block), Traffic(1, sender.ring_peers * sums)
    again = kv if plan.checkpoint == "full" else Traffic(0, 0)
    return forward + kv, backward + again + kv + dkv


def _group_forward(group: tuple[HeadSplit, ...], sender: Sender) -> Traffic:
    if len(group) == 1:
        return sender.there(group[0], 1, 2) + sender.back(group[0], 1, 0)
    return sender.there(group[0], 0, 2) + _sum(sender.there(split, 1, 0) + sender.back(split, 1, 0) for split in group)


def _group_backward(group: tuple[HeadSplit, ...], sender: Sender) -> Traffic:
    if len(group) == 1:
        return sender.there(group[0], 3, 2) + sender.back(group[0], 1, 2)
    keys = sender.there(group[0], 0, 2) + sender.back(group[0], 0, 2)
    return keys + _sum(sender.there(split, 3, 0) + sender.back(split, 1, 0) for split in group)


def _sweep(split: HeadSplit, sender: Sender, recomputed: bool, keys_there: bool) -> tuple[Traffic, Traffic]:
    forward = sender.there(split, 1, 2) + sender.back(split, 1, 0)
    kv = 0 if keys_there else 2
    backward = sender.there(split, 3, kv) + sender.back(split, 1, 2)
    if recomputed:
        backward = (
            sender.there(split, 1, kv) + sender.back(split, 1, 0) + sender.there(split, 1, 0) + sender.back(split, 1, 2)
        )
    # The first chunk to go backward sends its K and V with its queries; so do those that begin before it attends, one
    # for each hop, unless it attends again before anything else
    begun = 1 if recomputed else 1 + hops(len(split.q), sender.ring)
    alone = 0 if keys_there else max(sender.chunks - begun, 0)
    exchanged = (
        Traffic(forward.messages * sender.chunks, forward.bytes),
        Traffic(backward.messages * sender.chunks + alone, backward.bytes),
    )
    if len(split.q) == 1:
        exchanged = Traffic(0, 0), Traffic(0, 0)
    if sender.ring == 1:
        return exchanged
    peers = sender.ring_peers
    attended = Traffic(3 * sender.chunks, peers * sender.ring_block(split, 2, 1, 0))  # q; o and lse
    gradients = Traffic(3 * sender.chunks, peers * sender.ring_block(split, 4, 1, 0))  # do, q, o; lse; dq
    return exchanged[0] + attended, exchanged[1] + gradients + (attended if recomputed else Traffic(0, 0))


def _sum(parts: Iterable[Traffic]) -> Traffic:
    return sum(parts, Traffic(0, 0))
