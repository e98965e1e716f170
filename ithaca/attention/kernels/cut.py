"""Attention cut into triangles and rectangles of a few shapes, as arithmetic on offsets.

cuDNN builds a plan for each new shape (0.1–0.3 s), and its causal calls slow down with their length. So triangles are
cut into triangles of at most `longest` tokens and the rectangles beside them, and shapes that documents make are cut to
sides of `bucket` · 2^i, the largest first. There are few such shapes. A remainder thinner than a bucket is left:

    a triangle of 7 buckets  ◣ 4 buckets, ■ 2 × 4 and ◣ 2 below it, ■ 1 × 4, ■ 1 × 2 and ◣ 1 below those
    its last rows            a rectangle with all keys above, and a small triangle, both `ragged`

Small triangles that are neighbours, as those of short documents, go in one call of at most `longest` rows. So no call
takes more workspace than `KernelFacts.workspace` says, however many documents there are.
"""

from functools import lru_cache
from itertools import accumulate, pairwise

from ithaca.attention.documents import MOST_PIECES, Pieces
from ithaca.attention.visits import Visit


@lru_cache(maxsize=256)  # every layer asks for the same pieces
def cut_pieces(pieces: Pieces, bucket: int, longest: int) -> tuple[Visit, ...]:
    """Visits that together cover these pieces; only remainders are `ragged`. `longest` is a multiple of `bucket`."""
    assert pieces.q_bounds[0] == pieces.k_bounds[0] == 0, "rows or keys before all pieces"
    if pieces.causal:
        return tuple(_triangles(pieces, bucket, longest))
    if pieces.ragged and len(pieces.q_bounds) == 2:
        return tuple(_rectangles(pieces.q_bounds[1], pieces.k_bounds[1], bucket))
    return (Visit(slice(0, pieces.q_bounds[-1]), slice(0, pieces.k_bounds[-1]), pieces),)


def _triangles(pieces: Pieces, bucket: int, longest: int) -> list[Visit]:
    """Causal attention within each document."""
    bounds = pieces.q_bounds
    if not pieces.ragged and bounds[1] - bounds[0] <= longest and len(bounds) <= MOST_PIECES + 1:
        everything = slice(0, bounds[-1])
        return [Visit(everything, everything, pieces)]
    visits: list[Visit] = []
    thin: list[tuple[int, int]] = []  # triangles thinner than a bucket
    for start, stop in pairwise(bounds):
        edges = _edges(start, stop, bucket, longest)
        for top, bottom in pairwise(edges):
            block = slice(top, bottom)
            visits.append(Visit(block, block, Pieces.documents((0, bottom - top))))
            visits += [_rectangle(block, slice(*above), False) for above in pairwise(_edges(start, top, bucket))]
        if edges[-1] < stop:
            thin.append((edges[-1], stop))
            if edges[-1] > start:
                visits.append(_rectangle(slice(edges[-1], stop), slice(start, edges[-1]), True))
    return [*visits, *_runs(thin, longest)]


def _rectangles(rows: int, keys: int, bucket: int) -> list[Visit]:
    """Rows that all see all keys."""
    row_edges, key_edges = _edges(0, rows, bucket), _edges(0, keys, bucket)
    visits = [
        _rectangle(slice(*row_part), slice(*key_part), False)
        for row_part in pairwise(row_edges)
        for key_part in pairwise(key_edges)
    ]
    if row_edges[-1] < rows:
        visits.append(_rectangle(slice(row_edges[-1], rows), slice(0, keys), True))
    if key_edges[-1] < keys and row_edges[-1]:
        visits.append(_rectangle(slice(0, row_edges[-1]), slice(key_edges[-1], keys), True))
    return visits


def _edges(start: int, stop: int, bucket: int, longest: int | None = None) -> list[int]:
    """start, then the ends of consecutive blocks of bucket · 2^i up to stop, the largest first; none over `longest`."""
    full, left = divmod((stop - start) // bucket, longest // bucket) if longest else (0, (stop - start) // bucket)
    sizes = [bucket << power for power in reversed(range(left.bit_length())) if left >> power & 1]
    return list(accumulate([*([longest] * full if longest else []), *sizes], initial=start))


def _runs(triangles: list[tuple[int, int]], longest: int) -> list[Visit]:
    """Visits to small triangles, adjacent ones in one visit of at most `longest` rows."""
    runs: list[list[int]] = []
    for start, stop in triangles:
        if runs and runs[-1][-1] == start and stop - runs[-1][0] <= longest and len(runs[-1]) <= MOST_PIECES:
            runs[-1].append(stop)
        else:
            runs.append([start, stop])
    visits = []
    for run in runs:
        inside, bounds = slice(run[0], run[-1]), tuple(edge - run[0] for edge in run)
        visits.append(Visit(inside, inside, Pieces(bounds, bounds, causal=True, ragged=True)))
    return visits


def _rectangle(rows: slice, keys: slice, ragged: bool) -> Visit:
    return Visit(rows, keys, Pieces.rectangle(rows.stop - rows.start, keys.stop - keys.start, ragged))
