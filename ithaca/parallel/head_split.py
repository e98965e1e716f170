"""Which heads each rank attends with, as arithmetic.

Query heads go with the key/value head that they read, and are never split so that a rank would hold several key/value
heads with different numbers of queries. So ranks divide key/value heads among them as evenly as can be; where there are
fewer of those than ranks, several ranks hold the same one, and divide its queries:

    8 query, 8 kv heads on 3 ranks      3, 3, 2 of both
    14 query, 2 kv heads on 4 ranks     4, 3 queries of kv head 0; 4, 3 of kv head 1
    8 query, 2 kv heads on 3 ranks      2, 2 queries of kv head 0; 4 of kv head 1

Rounds (`untied`) take a few query heads of every rank at a time. Those that read the same K and V follow each other, so
that K and V are exchanged once for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ithaca.base.errors import PlanError


@dataclass(frozen=True)
class HeadSplit:
    """Heads that are attended with at a time, by rank."""

    q: tuple[range, ...]
    kv: tuple[range, ...]

    @cached_property
    def q_heads(self) -> Sequence[int]:
        """All of the query heads, in order."""
        return _union(self.q)

    @cached_property
    def kv_heads(self) -> Sequence[int]:
        """All of the key/value heads, each once."""
        return _union(self.kv)

    @cached_property
    def q_parts(self) -> list[slice]:
        """Where each rank's stand among them."""
        return [_part(part, self.q_heads) for part in self.q]

    @cached_property
    def kv_parts(self) -> list[slice]:
        return [_part(part, self.kv_heads) for part in self.kv]

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold one key/value head."""
        return sum(map(len, self.kv)) > len(self.kv_heads)


Rounds = tuple[tuple[HeadSplit, ...], ...]  # groups of rounds; those of a group read the same K and V


def split_heads(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Every head, split over the ranks."""
    if ranks > heads:
        even = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise PlanError(
            f"ulysses={ranks} is more than the model's {heads} query heads: 1 to {heads} work, evenly {', '.join(even)}"
        )
    group = heads // kv_heads
    if ranks <= kv_heads:
        kv = _evenly(range(kv_heads), ranks)
        return HeadSplit(tuple(range(part.start * group, part.stop * group) for part in kv), tuple(kv))
    q, kv = [], []
    for head, holders in enumerate(_evenly(range(ranks), kv_heads)):
        q += _evenly(range(head * group, (head + 1) * group), len(holders))
        kv += [range(head, head + 1)] * len(holders)
    return HeadSplit(tuple(q), tuple(kv))


def imbalance(split: HeadSplit) -> float:
    """By how much the fullest rank has more to do than the mean of all: 0 when every rank has the same."""
    return max(map(len, split.q)) * len(split.q) / len(split.q_heads) - 1


def describe_share(split: HeadSplit, ring: int = 1) -> str:
    """Who attends with how many heads, in a sentence."""
    ranks, counts = len(split.q), [len(part) for part in split.q]
    text = f"{ranks} ranks" if ring == 1 else f"{ring} × {ranks} ranks (ring × ulysses)"
    text += " share each sequence, with "
    if len(set(counts)) == 1:
        text += f"{counts[0]} query head{'s' * (counts[0] > 1)} each"
    else:
        text += f"{', '.join(map(str, counts))} query heads: the fullest has {100 * imbalance(split):.0f} % more to do "
        text += "than the mean, and the others wait for it"
    holders = ranks / len(split.kv_heads)
    return f"{text}; {holders:.3g} ranks hold each key/value head" if split.replicated else text


def head_rounds(split: HeadSplit, at_once: int | None) -> Rounds:
    """A share in rounds of `at_once` query heads over all ranks; None: all in one."""
    everything: Rounds = ((split,),)
    if at_once is None or at_once == len(split.q_heads):
        return everything
    usable = usable_rounds(split)
    if at_once not in usable:
        raise PlanError(
            f"heads={at_once} is not usable with {len(split.q_heads)} query heads on {len(split.q)} Ulysses ranks: "
            f"{', '.join(map(str, usable))} {'is' if len(usable) == 1 else 'are'}"
        )
    each, per_kv = at_once // len(split.q), _queries_per_kv(split)
    kv_each = max(each // per_kv, 1)
    groups = []
    for start in range(0, max(map(len, split.kv)), kv_each):
        kv = tuple(part[start : start + kv_each] for part in split.kv)
        # Ranks with fewer heads have none left at some time
        q = tuple(_readers(split, rank, part) for rank, part in enumerate(kv))
        longest = max(map(len, q))
        rounds = [tuple(part[begin : begin + each] for part in q) for begin in range(0, longest, each)]
        groups.append(tuple(HeadSplit(part, kv) for part in rounds))
    return tuple(groups)


def usable_rounds(split: HeadSplit) -> list[int]:
    """Query heads that a round can have: the same number on every rank, a part of a key/value head's or whole ones."""
    ranks, most, per_kv = len(split.q), max(map(len, split.q)), _queries_per_kv(split)
    parts = [each * ranks for each in range(1, most) if each <= per_kv or each % per_kv == 0]
    total = len(split.q_heads)
    return [*(part for part in parts if part < total), total]


def _queries_per_kv(split: HeadSplit) -> int:
    return max(len(q) // len(kv) for q, kv in zip(split.q, split.kv, strict=True))


def _readers(split: HeadSplit, rank: int, kv: range) -> range:
    """The query heads of a rank that read some of its key/value heads."""
    mine, held = split.q[rank], split.kv[rank]
    each = len(mine) // len(held)
    start = mine.start + (kv.start - held.start) * each
    return range(start, start + len(kv) * each)


def _evenly(items: range, parts: int) -> list[range]:
    """Contiguous parts whose sizes differ by one at most, the larger ones first."""
    size, more = divmod(len(items), parts)
    starts = [items.start + part * size + min(part, more) for part in range(parts + 1)]
    return [range(*edges) for edges in pairwise(starts)]


def _union(parts: Sequence[range]) -> Sequence[int]:
    heads = sorted({head for part in parts for head in part})
    whole = range(heads[0], heads[-1] + 1) if heads else range(0)
    return whole if len(whole) == len(heads) else tuple(heads)


def _part(part: range, heads: Sequence[int]) -> slice:
    start = heads.index(part.start) if part else 0
    return slice(start, start + len(part))
