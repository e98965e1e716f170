"""Packing whole documents: every piece once, no row too full, as exact best fit; little padding; every epoch anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.base.errors import DataError
from ithaca.data.best_fit import EpochPlan, count_rows, cut_documents, pieces_of, plan_epoch, with_padding

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def log_normal(count: int, median: float, sigma: float, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return np.maximum(lengths, 1).astype(np.int64)


def bounds_of(lengths: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def naive_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Piece by piece, the longest first, into the row with the least room that holds it."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= capacity]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        max(fitting, key=sum).append(length)
    return rows


def rows_of(plan: EpochPlan) -> list[list[int]]:
    return [plan.row(row).tolist() for row in range(len(plan.offsets) - 1)]


def together(plan: EpochPlan) -> set[frozenset[int]]:
    """The pieces that share a row, where there are several."""
    return {frozenset(row) for row in rows_of(plan) if len(row) > 1}


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(30, 90), st.integers(0, 3))
def test_every_piece_once_and_no_row_too_full(lengths: list[int], capacity: int, epoch: int) -> None:
    given, rows = np.array(lengths), len(naive_best_fit(lengths, capacity))
    assert count_rows(given, capacity) == rows
    plan = plan_epoch(given, capacity, rows, 5, epoch)
    found = rows_of(plan)
    assert sorted(piece for row in found for piece in row) == list(range(len(lengths)))
    assert len(found) == rows
    fills = [sum(lengths[piece] for piece in row) for row in found]
    assert 0 < min(fills) <= max(fills) <= capacity
    assert plan.filled.tolist() == [0, *np.cumsum(fills).tolist()]


def test_rows_are_divided_where_chance_needs_fewer() -> None:
    """An epoch has the rows that it is asked for, also if it could do with fewer."""
    lengths = log_normal(60, 100, 1.0)
    rows = count_rows(lengths, 2000)
    for more in (1, 3, len(lengths) - rows):
        plan = plan_epoch(lengths, 2000, rows + more, 0, 0)
        found = rows_of(plan)
        assert len(found) == rows + more
        assert min(map(len, found)) >= 1
        assert sorted(piece for row in found for piece in row) == list(range(60))


@pytest.mark.parametrize(
    ("count", "length", "median", "sigma"),
    [(300, 8192, 1500, 1.2), (3000, 8192, 1500, 1.2), (3000, 65536, 3000, 1.6), (20000, 32768, 1000, 1.8)],
)
def test_padding_of_log_normal_lengths(count: int, length: int, median: float, sigma: float) -> None:
    """Below 2 %, as of files; longer ones are cut."""
    pieces = cut_documents(bounds_of(log_normal(count, median, sigma)), length)
    rows = count_rows(pieces.lengths, length)
    assert 1 - pieces.tokens / (rows * length) < 0.02
    for epoch in range(2):
        assert plan_epoch(pieces.lengths, length, rows, 0, epoch).filled[-1] == pieces.tokens


def test_epochs_differ_in_order_and_in_what_lies_together() -> None:
    lengths = log_normal(2000, 1000, 1.2).clip(max=8192)
    rows = count_rows(lengths, 8192)
    first, second, again = (plan_epoch(lengths, 8192, rows, 0, epoch) for epoch in (0, 1, 0))
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.offsets, again.offsets)
    assert len(together(first) & together(second)) < 0.4 * len(together(first))
    # Rows come in no order of their lengths, and neither do the pieces of a row
    sizes = [len(row) for row in rows_of(first)]
    assert abs(np.corrcoef(sizes, range(len(sizes)))[0, 1]) < 0.15
    falling = [np.all(np.diff(lengths[row]) <= 0) for row in rows_of(first) if len(row) > 4]
    assert np.mean(falling) < 0.2
    other = plan_epoch(lengths, 8192, rows, 1, 0)
    assert together(other) != together(first)


def test_the_same_in_every_release() -> None:
    # Fixed numbers: a run that is resumed after an upgrade must go on with the same rows
    lengths = np.array([5, 9, 3, 3, 7, 2, 8, 1, 6, 4])
    plan = plan_epoch(lengths, 12, count_rows(lengths, 12), 7, 3)
    assert rows_of(plan) == [[9, 8, 5], [1, 2], [4, 0], [6, 3, 7]]


def test_what_becomes_of_long_documents() -> None:
    bounds = bounds_of([4, 23, 10, 1])
    cut = pieces_of(bounds, 10, "cut", "x")
    assert cut.starts.tolist() == [0, 4, 14, 24, 27, 37]
    assert cut.lengths.tolist() == [4, 10, 10, 3, 10, 1]
    assert (cut.too_long, cut.left_out, cut.tokens) == (1, 0, 38)
    dropped = pieces_of(bounds, 10, "drop", "x")
    assert dropped.starts.tolist() == [0, 27, 37]
    assert dropped.lengths.tolist() == [4, 10, 1]
    assert (dropped.too_long, dropped.left_out) == (1, 23)
    truncated = pieces_of(bounds, 10, "truncate", "x")
    assert truncated.starts.tolist() == [0, 4, 27, 37]
    assert truncated.lengths.tolist() == [4, 10, 10, 1]
    assert (truncated.too_long, truncated.left_out) == (1, 13)
    with pytest.raises(DataError, match=r"each of the 2 documents of 'a' is longer than train\.tokens 3, and"):
        pieces_of(bounds_of([4, 5]), 3, "drop", "'a'")


def test_padding_is_cut_into_short_documents() -> None:
    assert with_padding([3, 4], 10) == (3, 4, 3)
    assert with_padding([10], 10) == (10,)
    assert with_padding([1000], 4000) == (1000, 1024, 1024, 952)
    assert with_padding([1952], 4000) == (1952, 1024, 1024)
