"""How much each ring rank attends to: pairs of a query and a key that it may see.

Ulysses ranks of one ring rank see the same pairs, each with its own heads (heads.py says how even those are). Ring
ranks see different ones, and wait for each other: under `sweep` after every chunk, when each has had the chunk's
queries on its own keys, and where K and V travel after every step, when each has had its queries on another's keys.

Two runs a chunk (layout.py) make all of them equal when the sequence is one document. Documents end where they like.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ithaca.parallel.layout import Layout

Bounds = tuple[int, ...]  # offsets of the documents, both ends included


@dataclass(frozen=True)
class Work:
    """Pairs: what each ring rank attends to between two times that they wait for each other."""

    turns: list[list[int]]

    @property
    def pairs(self) -> list[int]:
        """Of each rank, in all."""
        return [sum(column) for column in zip(*self.turns, strict=True)]

    @property
    def imbalance(self) -> float:
        """By how much the fullest rank has more than the mean."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) - 1

    @property
    def waiting(self) -> float:
        """By how much attention takes longer than if every turn were even: the fullest of each keeps the others."""
        return sum(map(max, self.turns)) * len(self.pairs) / sum(self.pairs) - 1

    def __add__(self, other: "Work") -> "Work":
        return Work(self.turns + other.turns)


def ring_work(layout: Layout, bounds: Bounds, keys_stay: bool) -> Work:
    """`keys_stay`: and queries are gathered, as under `sweep`; otherwise K and V travel."""
    ranks = range(layout.ring)
    if keys_stay:
        return Work([[_of_chunk(layout, bounds, chunk, rank) for rank in ranks] for chunk in range(layout.tiles.count)])
    runs = [layout.spans(rank, 0) for rank in ranks]
    return Work([[_of_runs(bounds, runs[rank], runs[rank - step]) for rank in ranks] for step in ranks])


def describe_work(work: Work) -> str:
    counts = ", ".join(f"{pairs:.4g}" for pairs in work.pairs)
    more, longer = (f"{100 * share:.1f} %" for share in (work.imbalance, work.waiting))
    return (
        f"ring ranks attend to {counts} pairs of tokens: the fullest to {more} more than the mean; as they wait for "
        f"each other, attention takes {longer} longer than if all were even"
    )


def _of_chunk(layout: Layout, bounds: Bounds, chunk: int, rank: int) -> int:
    """A chunk's queries on the keys of a rank, its own chunk's and earlier ones."""
    rows = layout.chunks.rows(chunk)
    own = layout.spans(rank, chunk)
    pairs = sum(_within(bounds, run) + _across(bounds, range(run.stop, rows.stop), run) for run in own)
    # Earlier keys are seen by the document that the chunk begins in, as far as that goes
    document = bisect_right(bounds, rows.start) - 1
    begin, seers = bounds[document], min(bounds[document + 1], rows.stop) - rows.start
    if begin >= rows.start:
        return pairs
    first = layout.chunks.holding(begin)
    whole = (chunk - first - 1) * layout.tiles.size * layout.ulysses  # chunks between them are seen from end to end
    partial = sum(len(range(max(run.start, begin), run.stop)) for run in layout.spans(rank, first))
    return pairs + seers * (whole + partial)


def _of_runs(bounds: Bounds, queries: list[range], keys: list[range]) -> int:
    return sum(
        _within(bounds, run) if run == seen else _across(bounds, run, seen) if seen.start < run.start else 0
        for run in queries
        for seen in keys
    )


def _within(bounds: Bounds, run: range) -> int:
    """Pairs of a run with itself: a triangle for each document."""
    edges = [run.start, *bounds[bisect_right(bounds, run.start) : bisect_left(bounds, run.stop)], run.stop]
    lengths = [after - before for before, after in pairwise(edges)]
    return sum(length * (length + 1) // 2 for length in lengths)


def _across(bounds: Bounds, queries: range, keys: range) -> int:
    """Pairs of a run with one that lies before it: those of the document that reaches from one into the other."""
    if not queries:
        return 0
    document = bisect_right(bounds, queries.start) - 1
    begin, end = bounds[document], bounds[document + 1]
    return len(range(max(keys.start, begin), keys.stop)) * (min(end, queries.stop) - queries.start)
