"""Which heads each Ulysses or tensor rank attends with, as arithmetic.

A query head stays with the key/value head that it reads, and all key/value heads of a rank have the same number of
query heads. So the ranks divide the key/value heads as evenly as possible. If there are fewer key/value heads than
ranks, several ranks hold the same one and divide its query heads:

    8 query, 8 kv heads on 3 ranks      3, 3, 2 of both
    14 query, 2 kv heads on 4 ranks     4, 3 queries of kv head 0; 4, 3 of kv head 1
    8 query, 2 kv heads on 3 ranks      2, 2 queries of kv head 0; 4 of kv head 1

Attention may run in rounds, with a few query heads of every rank at a time. Under the recipe `untied` several rounds
may read the same K and V; they follow each other, so that K and V are exchanged once for all of them. Under `sweep` a
round takes whole groups: some key/value heads of every rank with all their query heads. So each K and V has one round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one round, or all heads, split over the ranks."""

    q: tuple[range, ...]  # query heads of each rank
    kv: tuple[range, ...]  # key/value heads of each rank

    @staticmethod
    def alone(spec: Spec) -> "HeadSplit":
        """All heads of a model on one rank."""
        return HeadSplit((range(spec.heads),), (range(spec.kv_heads),))

    @cached_property
    def q_heads(self) -> Sequence[int]:
        """The query heads of all ranks, in order."""
        return _union(self.q)

    @cached_property
    def kv_heads(self) -> Sequence[int]:
        """The key/value heads of all ranks, in order, each once."""
        return _union(self.kv)

    @cached_property
    def q_parts(self) -> list[slice]:
        """Where each rank's query heads stand in `q_heads`."""
        return [_part(part, self.q_heads) for part in self.q]

    @cached_property
    def kv_parts(self) -> list[slice]:
        """Where each rank's key/value heads stand in `kv_heads`."""
        return [_part(part, self.kv_heads) for part in self.kv]

    @property
    def replicated(self) -> bool:
        """Whether several ranks hold one key/value head."""
        return sum(map(len, self.kv)) > len(self.kv_heads)


Rounds = tuple[tuple[HeadSplit, ...], ...]  # groups of rounds; those of a group read the same K and V


def split_heads(heads: int, kv_heads: int, ranks: int, axis: str = "ulysses") -> HeadSplit:
    """All heads of a model, split over the ranks of an axis."""
    if ranks > heads:
        even = [str(count) for count in range(1, heads + 1) if heads % count == 0]
        raise PlanError(
            f"{axis}={ranks} is more than the model's {heads} query heads: 1 to {heads} work, evenly {', '.join(even)}"
        )
    group = heads // kv_heads
    if ranks <= kv_heads:
        kv = evenly(range(kv_heads), ranks)
        return HeadSplit(tuple(range(part.start * group, part.stop * group) for part in kv), tuple(kv))
    q, kv = [], []
    for head, holders in enumerate(evenly(range(ranks), kv_heads)):
        q += evenly(range(head * group, (head + 1) * group), len(holders))
        kv += [range(head, head + 1)] * len(holders)
    return HeadSplit(tuple(q), tuple(kv))


def imbalance(split: HeadSplit) -> float:
    """The share by which the busiest rank has more query heads than the mean; 0 if all have the same number."""
    return max(map(len, split.q)) * len(split.q) / len(split.q_heads) - 1


def describe_share(split: HeadSplit, ring: int = 1, axis: str = "ulysses") -> str:
    """How many ranks share a sequence, and with how many heads each, in a sentence."""
    ranks, counts = len(split.q), [len(part) for part in split.q]
    text = f"{ranks} ranks" if ring == 1 else f"{ring} × {ranks} ranks (ring × {axis})"
    text += " share each sequence, with "
    if len(set(counts)) == 1:
        text += f"{counts[0]} query head{'s' * (counts[0] > 1)} each"
    else:
        text += f"{', '.join(map(str, counts))} query heads: the busiest has {100 * imbalance(split):.0f} % more to do "
        text += "than the mean, and the others wait for it"
    holders = ranks / len(split.kv_heads)
    return f"{text}; {holders:.3g} ranks hold each key/value head" if split.replicated else text


def head_rounds(split: HeadSplit, at_once: int | None, whole_groups: bool = False) -> Rounds:
    """The heads in rounds of `at_once` query heads over all ranks together; None: all heads in one round.

    `whole_groups`: a round has all query heads of its key/value heads. The first round is the largest on every rank.
    """
    everything: Rounds = ((split,),)
    if at_once is None or at_once == len(split.q_heads):
        return everything
    usable = usable_rounds(split, whole_groups)
    if at_once not in usable:
        raise PlanError(
            f"heads={at_once} is not usable with {len(split.q_heads)} query heads on {len(split.q)} Ulysses ranks"
            f"{', in rounds of whole key/value heads' if whole_groups else ''}: "
            f"{', '.join(map(str, usable))} {'is' if len(usable) == 1 else 'are'}"
        )
    each, per_kv = at_once // len(split.q), _queries_per_kv(split)
    kv_each = max(each // per_kv, 1)
    groups = []
    for start in range(0, max(map(len, split.kv)), kv_each):
        kv = tuple(part[start : start + kv_each] for part in split.kv)
        # A rank with fewer heads than others may have none in the last rounds
        q = tuple(_readers(split, rank, part) for rank, part in enumerate(kv))
        longest = max(map(len, q))
        rounds = [tuple(part[begin : begin + each] for part in q) for begin in range(0, longest, each)]
        groups.append(tuple(HeadSplit(part, kv) for part in rounds))
    return tuple(groups)


def usable_rounds(split: HeadSplit, whole_groups: bool = False) -> list[int]:
    """The numbers of query heads that a round can have, over all ranks together.

    Every rank has the same number in a round: some of one key/value head's query heads (unless `whole_groups`), or
    those of several.
    """
    ranks, most, per_kv = len(split.q), max(map(len, split.q)), _queries_per_kv(split)
    parts = [each * ranks for each in range(1, most) if each % per_kv == 0 or (each < per_kv and not whole_groups)]
    total = len(split.q_heads)
    return [*(part for part in parts if part < total), total]


def _queries_per_kv(split: HeadSplit) -> int:
    return max(len(q) // len(kv) for q, kv in zip(split.q, split.kv, strict=True))


def _readers(split: HeadSplit, rank: int, kv: range) -> range:
    """The query heads of a rank that read these of its key/value heads."""
    mine, held = split.q[rank], split.kv[rank]
    each = len(mine) // len(held)
    start = mine.start + (kv.start - held.start) * each
    return range(start, start + len(kv) * each)


def evenly(items: range, parts: int) -> list[range]:
    """Consecutive parts whose sizes differ by one at most, the larger ones first."""
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
