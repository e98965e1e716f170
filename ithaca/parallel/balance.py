"""How much attention each ring rank computes, counted in pairs of a query and a key that it may see.

The Ulysses ranks of one ring rank see the same pairs, each with its own heads (head_split.py says how even those are).
Ring ranks see different pairs and wait for each other. Under `sweep` they wait after every chunk, when each has
attended with the chunk's queries to its own keys. Where K and V travel they wait after every step, when each has
attended with its own queries to one rank's keys.

The layout gives each ring rank two segments of a chunk, so that all have the same number of pairs when the sequence is
one document. With several documents the numbers differ.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from ithaca.parallel.layout import Layout

Bounds = tuple[int, ...]  # offsets of the documents, both ends included


@dataclass(frozen=True)
class RingWork:
    """Pairs that each ring rank attends to in each period; ranks wait for each other after a period."""

    periods: list[list[int]]  # by period, by rank

    @property
    def pairs(self) -> list[int]:
        """All pairs of each rank."""
        return [sum(column) for column in zip(*self.periods, strict=True)]

    @property
    def imbalance(self) -> float:
        """The share by which the busiest rank has more pairs than the mean."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) - 1

    @property
    def waiting(self) -> float:
        """The share by which attention takes longer than if all ranks had the same number of pairs in each period."""
        return sum(map(max, self.periods)) * len(self.pairs) / sum(self.pairs) - 1

    def __add__(self, other: "RingWork") -> "RingWork":
        return RingWork(self.periods + other.periods)


def ring_work(layout: Layout, bounds: Bounds, keys_stay: bool) -> RingWork:
    """The pairs of each ring rank. `keys_stay`: queries are gathered, as under `sweep`; otherwise K and V travel."""
    ranks = range(layout.ring)
    if keys_stay:
        chunks = range(layout.tiles.count)
        return RingWork([[_pairs_of_chunk(layout, bounds, chunk, rank) for rank in ranks] for chunk in chunks])
    spans = [layout.spans(rank, 0) for rank in ranks]
    return RingWork([[_pairs_of_spans(bounds, spans[rank], spans[rank - step]) for rank in ranks] for step in ranks])


def describe_work(work: RingWork) -> str:
    """How even the ring ranks' attention is, in a sentence."""
    counts = ", ".join(f"{pairs:.4g}" for pairs in work.pairs)
    more, longer = (f"{100 * share:.1f} %" for share in (work.imbalance, work.waiting))
    return (
        f"ring ranks attend to {counts} pairs of tokens: the busiest has {more} more than the mean, and waiting for "
        f"it makes attention {longer} slower"
    )


def _pairs_of_chunk(layout: Layout, bounds: Bounds, chunk: int, rank: int) -> int:
    """Pairs of a chunk's queries with the keys of one ring rank, from this chunk and earlier ones."""
    rows = layout.chunks.rows(chunk)
    own = layout.spans(rank, chunk)
    pairs = sum(_pairs_within(bounds, span) + _pairs_across(bounds, range(span.stop, rows.stop), span) for span in own)
    # Only the document that the chunk begins in sees earlier keys
    document = bisect_right(bounds, rows.start) - 1
    begin, queries = bounds[document], min(bounds[document + 1], rows.stop) - rows.start
    if begin >= rows.start:
        return pairs
    first = layout.chunks.holding(begin)
    whole = (chunk - first - 1) * layout.tiles.size * layout.ulysses  # keys of the chunks after the first one
    partial = sum(len(range(max(span.start, begin), span.stop)) for span in layout.spans(rank, first))
    return pairs + queries * (whole + partial)


def _pairs_of_spans(bounds: Bounds, queries: list[range], keys: list[range]) -> int:
    """Pairs of some spans of queries with some spans of keys; two spans are the same or do not overlap."""
    return sum(
        _pairs_within(bounds, span) if span == seen else _pairs_across(bounds, span, seen)
        for span in queries
        for seen in keys
        if seen.start <= span.start
    )


def _pairs_within(bounds: Bounds, span: range) -> int:
    """Pairs of a span with itself: a triangle for each document."""
    edges = [span.start, *bounds[bisect_right(bounds, span.start) : bisect_left(bounds, span.stop)], span.stop]
    lengths = [after - before for before, after in pairwise(edges)]
    return sum(length * (length + 1) // 2 for length in lengths)


def _pairs_across(bounds: Bounds, queries: range, keys: range) -> int:
    """Pairs of a span of queries with keys before it: only one document can reach from one into the other."""
    if not queries:
        return 0
    document = bisect_right(bounds, queries.start) - 1
    begin, end = bounds[document], bounds[document + 1]
    return len(range(max(keys.start, begin), keys.stop)) * (min(end, queries.stop) - queries.start)
