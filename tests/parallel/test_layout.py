"""Who holds what: pure arithmetic, every case covered once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ithaca.parallel.layout import Layout, batch_range, row_range


def test_rows_are_cut_as_torch_chunks_them() -> None:
    for rows in range(1, 40):
        for ranks in range(1, 9):
            chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(ranks)]
            chunks += [[]] * (ranks - len(chunks))
            assert [list(row_range(rows, rank, ranks)) for rank in range(ranks)] == chunks


def test_sequences_are_dealt_evenly_and_once() -> None:
    for rows in range(1, 40):
        for ranks in range(1, min(rows, 8) + 1):
            parts = [batch_range(rows, rank, ranks) for rank in range(ranks)]
            assert [row for part in parts for row in part] == list(range(rows))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


sizes = {"tokens": st.integers(1, 300), "chunk": st.integers(1, 400), "ulysses": st.integers(1, 12)}
layouts, rings = st.builds(Layout, **sizes), st.builds(Layout, **sizes, ring=st.integers(2, 6))


@given(layouts | rings)
def test_every_token_is_held_once(layout: Layout) -> None:
    held = [token for rank in range(layout.ranks) for place in layout.places(rank) for token in place]
    assert sorted(held) == list(range(layout.padded))
    assert layout.tokens <= layout.padded < layout.tokens + layout.ranks * layout.runs
    assert {sum(map(len, layout.places(rank))) for rank in range(layout.ranks)} == {layout.local}


@given(rings)
def test_ring_ranks_hold_runs_that_their_ulysses_ranks_share(layout: Layout) -> None:
    places = [layout.places(rank) for rank in range(layout.ranks)]
    for ring in range(layout.ring):
        mine = places[ring * layout.ulysses : (ring + 1) * layout.ulysses]
        spans = [span for tile in range(layout.tiles.count) for span in layout.spans(ring, tile)]
        assert len(spans) == 2 * layout.tiles.count
        for run, span in enumerate(spans):
            assert [token for part in mine for token in part[run]] == list(span)


@given(layouts)
def test_tiles_of_all_ranks_end_to_end_are_chunks(layout: Layout) -> None:
    places = [layout.places(rank) for rank in range(layout.ranks)]
    assert layout.chunks.length == layout.padded
    for index, chunk in enumerate(layout.chunks.slices()):
        tiles = [of_rank[index] for of_rank in places]
        assert [token for tile in tiles for token in tile] == list(range(chunk.start, chunk.stop))
        assert {len(tile) for tile in tiles} == {layout.tiles.rows_in(index)}
    assert {len(of_rank) for of_rank in places} == {layout.tiles.count} == {layout.chunks.count}


@given(layouts)
def test_a_chunk_is_as_long_as_was_said(layout: Layout) -> None:
    """Rounded up to the ranks, and no longer than what there is."""
    said = min(layout.chunk, layout.tokens)
    assert said <= layout.chunks.size < said + layout.ranks


def test_the_example_of_the_docstring() -> None:
    layout = Layout(13, 8, 2)
    assert [[list(place) for place in layout.places(rank)] for rank in (0, 1)] == [
        [[0, 1, 2, 3], [8, 9, 10]],
        [[4, 5, 6, 7], [11, 12, 13]],
    ]


def test_the_docstring_s_example_of_a_ring() -> None:
    layout = Layout(16, 16, 2, 2)
    assert [[list(place) for place in layout.places(rank)] for rank in range(4)] == [
        [[0, 1], [12, 13]],
        [[2, 3], [14, 15]],
        [[4, 5], [8, 9]],
        [[6, 7], [10, 11]],
    ]


def test_one_chunk_is_one_piece_for_each_rank() -> None:
    assert [Layout(13, 13, 3).places(rank) for rank in range(3)] == [[range(5)], [range(5, 10)], [range(10, 15)]]


def test_fewer_tokens_than_ranks() -> None:
    layout = Layout(5, 5, 8)
    assert [layout.places(rank) for rank in range(8)] == [[range(rank, rank + 1)] for rank in range(8)]
