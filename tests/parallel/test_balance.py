"""What ring ranks attend to, against counting every pair."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ithaca.parallel.balance import RingWork, describe_work, ring_work
from ithaca.parallel.layout import Layout

layouts = st.builds(
    Layout,
    tokens=st.integers(1, 90),
    chunk=st.integers(1, 100),
    ulysses=st.integers(1, 3),
    ring=st.integers(1, 5),
)


def of_one_chunk(layout: Layout) -> Layout:
    return Layout(layout.tokens, layout.tokens, layout.ulysses, layout.ring)


def owners(layout: Layout) -> torch.Tensor:
    """The ring rank of each token."""
    held = torch.empty(layout.padded, dtype=torch.int64)
    for rank in range(layout.ring):
        for tile in range(layout.tiles.count):
            for span in layout.spans(rank, tile):
                held[span.start : span.stop] = rank
    return held


@given(layouts, st.sets(st.integers(1, 89)))
def test_every_pair_is_counted(layout: Layout, ends: set[int]) -> None:
    layout_of = {True: layout, False: of_one_chunk(layout)}
    for keys_stay, layout in layout_of.items():
        bounds = (0, *sorted(end for end in ends if end < layout.tokens), layout.padded)
        document = torch.bucketize(torch.arange(layout.padded), torch.tensor(bounds[1:]), right=True)
        seen = torch.tril(document[:, None] == document)
        owner, ranks = owners(layout), range(layout.ring)
        if keys_stay:
            wanted = [[int(seen[rows][:, owner == rank].sum()) for rank in ranks] for rows in layout.chunks.slices()]
        else:
            wanted = [
                [int(seen[owner == rank][:, owner == (rank - step) % layout.ring].sum()) for rank in ranks]
                for step in ranks
            ]
        assert ring_work(layout, bounds, keys_stay).periods == wanted


@given(layouts, st.booleans())
def test_one_document_is_balanced(layout: Layout, keys_stay: bool) -> None:
    """In every turn, not only in all: nobody waits."""
    layout = layout if keys_stay else of_one_chunk(layout)
    work = ring_work(layout, (0, layout.padded), keys_stay)
    assert all(len(set(period)) == 1 for period in work.periods)
    assert work.imbalance == work.waiting == 0


def test_a_long_sequence_of_many_documents_is_quick() -> None:
    layout = Layout(5 * 2**20, 2**16, 8, 8)
    work = ring_work(layout, (*range(0, 5 * 2**20, 1000), 5 * 2**20), keys_stay=True)
    assert sum(work.pairs) == 5242 * 1000 * 1001 // 2 + 880 * 881 // 2


def test_what_is_said() -> None:
    work = RingWork([[4, 2], [0, 2]])
    assert (work.pairs, work.imbalance, work.waiting) == ([4, 4], 0, pytest.approx(0.5))
    assert describe_work(work + RingWork([[8, 0]])) == (
        "ring ranks attend to 12, 4 pairs of tokens: the busiest has 50.0 % more than the mean, and waiting for "
        "it makes attention 75.0 % slower"
    )
