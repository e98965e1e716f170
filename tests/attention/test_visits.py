"""What a query tile visits, when ring ranks hold runs of the keys: every pair that may be seen, once."""

from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ithaca.attention.visits import Segment, Visit, plan_visits, visit_runs
from ithaca.parallel.layout import Layout
from ithaca.parallel.ring import ring_runs

layouts = st.builds(
    Layout,
    tokens=st.integers(1, 70),
    chunk=st.integers(1, 80),
    ulysses=st.integers(1, 3),
    ring=st.integers(1, 5),
)


def document_of(bounds: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.tensor([end - start for start, end in pairwise(bounds)]))


def bounds_of(layout: Layout, ends: set[int], at_runs: bool) -> tuple[int, ...]:
    """Documents that end anywhere, or just where runs begin."""
    if at_runs:
        tiles = [(ring, tile) for ring in range(layout.ring) for tile in range(layout.tiles.count)]
        starts = [span.start for tile in tiles for span in layout.spans(*tile)]
        ends = {start for start in starts if start % 7 in ends}
    return (0, *sorted(end for end in ends if 0 < end < layout.tokens), layout.padded)


def tokens_of(runs: list[Segment]) -> Tensor:
    """The tokens of runs, in the order that they lie in."""
    assert [run.at for run in runs] == [0, *accumulate(len(run.span) for run in runs)][:-1]
    return torch.cat([torch.arange(run.span.start, run.span.stop) for run in runs])


def count(seen: Tensor, visits: list[Visit], queries: Tensor, keys: Tensor) -> None:
    for visit in visits:
        q, k = queries[visit.rows], keys[visit.keys]
        assert (visit.pieces.q_bounds[-1], visit.pieces.k_bounds[-1]) == (len(q), len(k))
        for rows, columns in visit.pieces.spans():
            mask = torch.ones(len(q[rows]), len(k[columns]), dtype=torch.int64)
            assert mask.numel()
            seen[q[rows][:, None], k[columns]] += mask.tril() if visit.pieces.causal else mask


@given(layouts, st.sets(st.integers(0, 69)), st.booleans())
def test_keys_stay(layout: Layout, ends: set[int], at_runs: bool) -> None:
    bounds = bounds_of(layout, ends, at_runs)
    document = document_of(bounds)
    seen = torch.zeros(layout.padded, layout.padded, dtype=torch.int64)
    for chunk, rows in enumerate(layout.chunks.slices()):
        for rank in range(layout.ring):
            runs = ring_runs(layout, rank)
            for tile in plan_visits(layout.chunks, bounds, chunk, runs):
                assert tile.visits  # a tile that is read is seen
                count(seen, tile.visits, torch.arange(rows.start, rows.stop), tokens_of(runs(tile.tile)))
    assert torch.equal(seen, (document[:, None] == document).tril().long())


@given(layouts, st.sets(st.integers(0, 69)), st.booleans())
def test_keys_travel(layout: Layout, ends: set[int], at_runs: bool) -> None:
    layout = Layout(layout.tokens, layout.tokens, layout.ulysses, layout.ring)
    bounds = bounds_of(layout, ends, at_runs)
    document = document_of(bounds)
    seen = torch.zeros(layout.padded, layout.padded, dtype=torch.int64)
    runs = [ring_runs(layout, rank)(0) for rank in range(layout.ring)]
    for queries in runs:
        for keys in runs:
            count(seen, visit_runs(queries, keys, bounds), tokens_of(queries), tokens_of(keys))
    assert torch.equal(seen, (document[:, None] == document).tril().long())
