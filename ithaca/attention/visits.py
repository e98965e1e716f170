"""Which parts of which key/value tiles a query tile attends to (its visits), as arithmetic on offsets.

Tokens see earlier tokens of their own document. So a query tile sees
    its own tile         causally, one triangle for each document in it
    an earlier tile      only through the document that reaches across the border between the two: a full rectangle of
                         that document's rows in the query tile and its keys in the earlier tile
Tiles that no common document reaches are not visited and cost nothing.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

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


def plan_visits(tiles: Tiles, bounds: tuple[int, ...], index: int, runs: Segments | None = None) -> list[TileVisits]:
    """The visits of query tile `index`: to its own tile, then to earlier ones, the nearest first.

    `runs` gives the keys that a key tile holds; None: those of the query tile with the same number.
    """
    rows = tiles.rows(index)
    visits = []
    for tile in range(index, tiles.holding(bounds[bisect_right(bounds, rows.start) - 1]) - 1, -1):
        keys = runs(tile) if runs else [Segment(0, range(tiles.rows(tile).start, tiles.rows(tile).stop))]
        found = [visit for run in keys for visit in _visit_run(rows, run, bounds)]
        if found or tile == index:
            visits.append(TileVisits(tile, found))
    return visits


def visit_runs(queries: list[Segment], keys: list[Segment], bounds: tuple[int, ...]) -> list[Visit]:
    """The visits of segments of queries to segments of keys. Two segments are the same or do not overlap."""
    return [
        _moved(visit, rows.at, 0)
        for rows in queries
        for run in keys
        if run.span.start < rows.span.stop
        for visit in _visit_run(slice(rows.span.start, rows.span.stop), run, bounds)
    ]


def _visit_run(rows: slice, run: Segment, bounds: tuple[int, ...]) -> list[Visit]:
    """The visits of rows of a query tile to one segment of keys, which lies within the tile or before it."""
    start, stop = run.span.start, run.span.stop
    visits, behind = [], rows.start  # `behind`: the first row after all of the keys
    if start >= rows.start:
        first, last = bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1) - 1
        inner = tuple(bound - start for bound in bounds[first + 1 : last + 1])
        everything = slice(0, stop - start)
        own = Visit(everything, everything, Pieces.documents((0, *inner, stop - start)))
        visits.append(_moved(own, start - rows.start, run.at))
        behind = stop
    if behind == rows.stop:
        return visits
    document = bisect_right(bounds, behind) - 1  # the only one that can reach across
    begin, end = bounds[document], min(bounds[document + 1], rows.stop)
    if begin < stop:
        keys = slice(max(begin - start, 0), stop - start)
        whole = end == rows.stop and keys.start == 0  # a shape that repeats
        pieces = Pieces.rectangle(end - behind, keys.stop - keys.start, ragged=not whole)
        visits.append(_moved(Visit(slice(0, end - behind), keys, pieces), behind - rows.start, run.at))
    return visits


def _moved(visit: Visit, rows: int, keys: int) -> Visit:
    return Visit(
        slice(visit.rows.start + rows, visit.rows.stop + rows),
        slice(visit.keys.start + keys, visit.keys.stop + keys),
        visit.pieces,
    )
