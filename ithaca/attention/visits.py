"""Which parts of which tiles see each other: a query tile's visits to key/value tiles, as arithmetic on offsets.

Tokens see earlier tokens of their own document, so a query tile sees
    its own tile         causally, one triangle for each document in it
    an earlier tile      through the one document that reaches across the border, if it began early enough: a full
                         rectangle of the document's rows in the query tile and of its keys in the other
What no document reaches is not visited and costs nothing.

A whole tile, or documents of equal lengths, make one visit of a shape that comes again. Other triangles and rectangles
have any shape, and the fastest kernels build something for each new shape. So they are cut into squares and rectangles
whose sides are `grain` · 2^i, the largest first, of which there are few, and what is left, thinner than a grain:

    a triangle of 7 grains   ◣ 4 grains, ■ 2 × 4 and ◣ 2 below it, ■ 1 × 4, ■ 1 × 2 and ◣ 1 below those
    its last rows            a rectangle that sees all of the above, and a small triangle, both `ragged`
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ithaca.attention.documents import Pieces
from ithaca.base.tiles import Tiles


@dataclass(frozen=True)
class Visit:
    """Some rows of a query tile see some keys of a key tile, as the pieces say; offsets are within the tiles."""

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
    """Keys of a tile that follow each other: where they begin in the tile, and where they lie in the sequence."""

    at: int
    span: range


Segments = Callable[[int], list[Segment]]  # those of a tile


def plan_visits(
    tiles: Tiles, bounds: tuple[int, ...], index: int, bucket: int | None, runs: Segments | None = None
) -> list[TileVisits]:
    """What query tile `index` visits: its own tile, then earlier ones, the nearest first.

    `runs` says which keys a key tile holds; None: those of the query tile with the same number.
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
    """What runs of queries see of runs of keys, each of which is one of them or lies apart from them."""
    return [
        _moved(visit, rows.at, 0)
        for rows in queries
        for run in keys
        if run.span.start < rows.span.stop
        for visit in _visit_run(slice(rows.span.start, rows.span.stop), run, bounds, bucket)
    ]


def _visit_run(rows: slice, run: Segment, bounds: tuple[int, ...], bucket: int | None) -> list[Visit]:
    """What rows of a query tile see of keys that lie within it, or before it."""
    start, stop = run.span.start, run.span.stop
    visits, behind = [], rows.start  # `behind`: the first row that comes after all of the keys
    if start >= rows.start:
        first, last = bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1) - 1
        inner = tuple(bound - start for bound in bounds[first + 1 : last + 1])
        own = _triangles((0, *inner, stop - start), bucket)
        visits += [_moved(visit, start - rows.start, run.at) for visit in own]
        behind = stop
    if behind == rows.stop:
        return visits
    document = bisect_right(bounds, behind) - 1  # which alone can reach across
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
    thin: list[tuple[int, int]] = []  # triangles thinner than a grain
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
    """Every row sees every key."""
    if (whole_rows and whole_keys) or bucket is None:
        return [_rectangle(rows, keys, ragged=not (whole_rows and whole_keys))]
    # Rows begin at the border between the tiles and keys end there: what is left over is far from it
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
    """start, then the ends of the largest blocks of grain · 2^i that follow each other before stop."""
    grains = (stop - start) // bucket
    sizes = [bucket << power for power in reversed(range(grains.bit_length())) if grains >> power & 1]
    return list(accumulate(sizes, initial=start))


def _runs(triangles: list[tuple[int, int]]) -> list[Visit]:
    """Triangles that touch go in one visit."""
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
