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
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ithaca.attention.documents import Pieces
from ithaca.tape.tiles import Tiles


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


def plan_visits(tiles: Tiles, bounds: tuple[int, ...], index: int, grain: int | None) -> list[TileVisits]:
    """What query tile `index` visits: its own tile, then earlier ones, the nearest first."""
    rows = tiles.rows(index)
    first = bisect_right(bounds, rows.start) - 1  # the document of the tile's first token
    last = bisect_right(bounds, rows.stop - 1) - 1
    inner = tuple(bound - rows.start for bound in bounds[first + 1 : last + 1])
    length = rows.stop - rows.start
    visits = [TileVisits(index, _triangles((0, *inner, length), grain))]
    start, stop = bounds[first], min(bounds[first + 1], rows.stop)
    reach = slice(0, stop - rows.start)
    for tile in range(index - 1, tiles.holding(start) - 1, -1):
        other = tiles.rows(tile)
        keys = slice(max(start - other.start, 0), other.stop - other.start)
        whole_rows, whole_keys = reach.stop == length, keys.start == 0
        visits.append(TileVisits(tile, _rectangles(reach, keys, whole_rows, whole_keys, grain)))
    return visits


def _triangles(bounds: tuple[int, ...], grain: int | None) -> list[Visit]:
    """Causal attention within each document of a tile."""
    pieces = Pieces.documents(bounds)
    if not pieces.ragged or grain is None:
        everything = slice(0, bounds[-1])
        return [Visit(everything, everything, pieces)]
    visits: list[Visit] = []
    thin: list[tuple[int, int]] = []  # triangles thinner than a grain
    for start, stop in pairwise(bounds):
        edges = _edges(start, stop, grain)
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


def _rectangles(rows: slice, keys: slice, whole_rows: bool, whole_keys: bool, grain: int | None) -> list[Visit]:
    """Every row sees every key."""
    if (whole_rows and whole_keys) or grain is None:
        return [_rectangle(rows, keys, ragged=not (whole_rows and whole_keys))]
    # Rows begin at the border between the tiles and keys end there: what is left over is far from it
    row_edges = [0, rows.stop] if whole_rows else _edges(0, rows.stop, grain)
    key_edges = (
        [0, keys.stop] if whole_keys else [keys.stop - edge for edge in _edges(0, keys.stop - keys.start, grain)]
    )
    key_parts = [slice(min(edges), max(edges)) for edges in pairwise(key_edges)]
    visits = [_rectangle(slice(*edges), part, ragged=False) for edges in pairwise(row_edges) for part in key_parts]
    row_end, key_begin = row_edges[-1], min(key_edges)
    if row_end < rows.stop:
        visits.append(_rectangle(slice(row_end, rows.stop), keys, ragged=True))
    if key_begin > keys.start and row_end > 0:
        visits.append(_rectangle(slice(0, row_end), slice(keys.start, key_begin), ragged=True))
    return visits


def _edges(start: int, stop: int, grain: int) -> list[int]:
    """start, then the ends of the largest blocks of grain · 2^i that follow each other before stop."""
    grains = (stop - start) // grain
    sizes = [grain << power for power in reversed(range(grains.bit_length())) if grains >> power & 1]
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
