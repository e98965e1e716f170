"""Which parts of which key/value tiles a query tile attends to (its visits), as arithmetic on offsets.

Tokens see earlier tokens of their own document. So a query tile sees
    its own tile         causally, one triangle for each document in it
    an earlier tile      only through the document that reaches across the border between the two: a full rectangle of
                         that document's rows in the query tile and its keys in the earlier tile
Tiles that no common document reaches are not visited and cost nothing.

A whole tile, or documents of equal lengths, make one visit whose shape repeats. Other triangles and rectangles can have
any shape, and the fastest kernels build something for each new shape. So these are cut into triangles and rectangles
with sides of `bucket` · 2^i, the largest first. There are few such shapes. A rest thinner than a bucket remains:

    a triangle of 7 buckets  ◣ 4 buckets, ■ 2 × 4 and ◣ 2 below it, ■ 1 × 4, ■ 1 × 2 and ◣ 1 below those
    its last rows            a rectangle with all keys above, and a small triangle, both `ragged`
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ithaca.attention.documents import Pieces
from ithaca.base.tiles import Tiles


@dataclass(frozen=True)
class Visit:
    """Rows of a query tile that attend to keys of a key tile, as the pieces say. Offsets are within the tiles."""

    rows: slice
    keys: slice
    pieces: Pieces


@dataclass(frozen=True)
class TileVisits:
    """All visits to one key tile."""

    tile: int
    visits: list[Visit]


@dataclass(frozen=True)
class Segment:
    """A run of consecutive keys in a tile: its offset in the tile, and its positions in the sequence."""

    at: int
    span: range


Segments = Callable[[int], list[Segment]]  # the segments of a tile


def plan_visits(
    tiles: Tiles, bounds: tuple[int, ...], index: int, bucket: int | None, runs: Segments | None = None
) -> list[TileVisits]:
    """The visits of query tile `index`: to its own tile, then to earlier ones, the nearest first.

    `runs` gives the keys that a key tile holds; None: those of the query tile with the same number.
    """
    rows = tiles.rows(index)
    visits = []
    for tile in range(index, tiles.holding(bounds[bisect_right(bounds, rows.start) - 1]) - 1, -1):
        keys = runs(tile) if runs else [Segment(0, range(tiles.rows(tile).start, tiles.rows(tile).stop))]
        found = [visit for run in keys for visit in _visit_run(rows, run, bounds, bucket)]
        if found or tile == index:
            visits.append(TileVisits(tile, found))
    return visits


def visit_runs(queries: list[Segment], keys: list[Segment], bounds: tuple[int, ...], bucket: int | None) -> list[Visit]:
    """The visits of segments of queries to segments of keys. Two segments are the same or do not overlap."""
    return [
        _moved(visit, rows.at, 0)
        for rows in queries
        for run in keys
        if run.span.start < rows.span.stop
        for visit in _visit_run(slice(rows.span.start, rows.span.stop), run, bounds, bucket)
    ]


def _visit_run(rows: slice, run: Segment, bounds: tuple[int, ...], bucket: int | None) -> list[Visit]:
    """The visits of rows of a query tile to one segment of keys, which lies within the tile or before it."""
    start, stop = run.span.start, run.span.stop
    visits, behind = [], rows.start  # `behind`: the first row after all of the keys
    if start >= rows.start:
        first, last = bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1) - 1
        inner = tuple(bound - start for bound in bounds[first + 1 : last + 1])
        own = _triangles((0, *inner, stop - start), bucket)
        visits += [_moved(visit, start - rows.start, run.at) for visit in own]
        behind = stop
    if behind == rows.stop:
        return visits
    document = bisect_right(bounds, behind) - 1  # the only one that can reach across
    begin, end = bounds[document], min(bounds[document + 1], rows.stop)
    if begin < stop:
        keys = slice(max(begin - start, 0), stop - start)
        seen = _rectangles(slice(0, end - behind), keys, end == rows.stop, keys.start == 0, bucket)
        visits += [_moved(visit, behind - rows.start, run.at) for visit in seen]
    return visits


def _moved(visit: Visit, rows: int, keys: int) -> Visit:
    return Visit(
        slice(visit.rows.start + rows, visit.rows.stop + rows),
        slice(visit.keys.start + keys, visit.keys.stop + keys),
        visit.pieces,
    )


def _triangles(bounds: tuple[int, ...], bucket: int | None) -> list[Visit]:
    """Causal attention within each document of a tile."""
    pieces = Pieces.documents(bounds)
    if not pieces.ragged or bucket is None:
        everything = slice(0, bounds[-1])
        return [Visit(everything, everything, pieces)]
    visits: list[Visit] = []
    thin: list[tuple[int, int]] = []  # triangles thinner than a bucket
    for start, stop in pairwise(bounds):
        edges = _edges(start, stop, bucket)
        for top, bottom in pairwise(edges):
            block = slice(top, bottom)
            visits.append(_square(block))
            visits += [
                _rectangle(block, slice(*above), ragged=False) for above in pairwise(edges[: edges.index(top) + 1])
            ]
        if edges[-1] < stop:
            thin.append((edges[-1], stop))
            if edges[-1] > start:
                visits.append(_rectangle(slice(edges[-1], stop), slice(start, edges[-1]), ragged=True))
    return [*visits, *_runs(thin)]


def _rectangles(rows: slice, keys: slice, whole_rows: bool, whole_keys: bool, bucket: int | None) -> list[Visit]:
    """Rows that all see all keys."""
    if (whole_rows and whole_keys) or bucket is None:
        return [_rectangle(rows, keys, ragged=not (whole_rows and whole_keys))]
    # Rows begin at the border between the tiles and keys end there, so the rest is at the far end
    row_edges = [0, rows.stop] if whole_rows else _edges(0, rows.stop, bucket)
    key_edges = (
        [0, keys.stop] if whole_keys else [keys.stop - edge for edge in _edges(0, keys.stop - keys.start, bucket)]
    )
    key_parts = [slice(min(edges), max(edges)) for edges in pairwise(key_edges)]
    visits = [_rectangle(slice(*edges), part, ragged=False) for edges in pairwise(row_edges) for part in key_parts]
    row_end, key_begin = row_edges[-1], min(key_edges)
    if row_end < rows.stop:
        visits.append(_rectangle(slice(row_end, rows.stop), keys, ragged=True))
    if key_begin > keys.start and row_end > 0:
        visits.append(_rectangle(slice(0, row_end), slice(keys.start, key_begin), ragged=True))
    return visits


def _edges(start: int, stop: int, bucket: int) -> list[int]:
    """start, then the ends of consecutive blocks of bucket · 2^i up to stop, the largest first."""
    buckets = (stop - start) // bucket
    sizes = [bucket << power for power in reversed(range(buckets.bit_length())) if buckets >> power & 1]
    return list(accumulate(sizes, initial=start))


def _runs(triangles: list[tuple[int, int]]) -> list[Visit]:
    """Visits to small triangles, adjacent ones in one visit."""
    runs: list[list[int]] = []
    for start, stop in triangles:
        if runs and runs[-1][-1] == start:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    visits = []
    for run in runs:
        inside, bounds = slice(run[0], run[-1]), tuple(edge - run[0] for edge in run)
        visits.append(Visit(inside, inside, Pieces(bounds, bounds, causal=True, ragged=True)))
    return visits


def _square(block: slice) -> Visit:
    return Visit(block, block, Pieces.documents((0, block.stop - block.start)))


def _rectangle(rows: slice, keys: slice, ragged: bool) -> Visit:
    return Visit(rows, keys, Pieces.rectangle(rows.stop - rows.start, keys.stop - keys.start, ragged))
