"""Rows for a loss in which every label counts once, against documents looked at one by one."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ithaca.base.errors import DataError
from ithaca.data import windows
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.windows import IGNORED, Windows


def made(lengths: list[int], learned: list[bool] | None = None) -> TokenFile:
    """Token t of the file is t."""
    total = sum(lengths)
    return in_memory(np.arange(total), np.append(0, np.cumsum(lengths)), None if learned is None else np.array(learned))


@hypothesis.given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=12),
    length=st.integers(2, 14),
    limit=st.none() | st.integers(2, 60),
    more=st.integers(0, 3),
)
def test_every_label_counts_once(lengths: list[int], length: int, limit: int | None, more: int) -> None:
    lengths[0] += 1  # one label at least, also under any limit
    learned = [number % 5 != 3 for number in range(sum(lengths))]
    laid = Windows(made(lengths, learned), length, limit)
    tokens, labels, documents = (found.numpy() for found in laid.rows(range(len(laid) + more)))
    # A label counts if a token of its document precedes it in the row
    counts = (labels[:, 1:] != IGNORED) & (documents[:, 1:] == documents[:, :-1])
    found = sorted(tokens[:, 1:][counts].tolist())
    bounds = np.append(0, np.cumsum(lengths)).tolist()
    stop = min(limit or bounds[-1], bounds[-1])
    wanted = [token for token in range(stop) if token not in bounds and learned[token]]
    assert found == wanted
    assert laid.labels == len(wanted)
    assert (laid.tokens, laid.left_out) == (stop, bounds[-1] - stop)
    assert np.array_equal(labels[counts.nonzero()[0], counts.nonzero()[1] + 1], tokens[:, 1:][counts])


@hypothesis.given(lengths=st.lists(st.integers(1, 23), min_size=1, max_size=12), length=st.integers(2, 14))
def test_a_document_that_fits_is_whole(lengths: list[int], length: int) -> None:
    lengths[0] += 1
    laid = Windows(made(lengths), length)
    bounds = np.append(0, np.cumsum(lengths))
    _, labels, documents = (found.numpy() for found in laid.rows(range(len(laid))))
    for number, size in enumerate(lengths):
        rows = {int(row) for row in np.nonzero((documents == number) & (labels != IGNORED))[0]}
        pieces = 1 if size <= length else -(-(size - 1) // (length - 1))
        assert len(rows) == pieces, (number, bounds)


def test_padding_is_cut_into_short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "PADDING", 4)
    tokens, labels, documents = Windows(made([3]), 9).rows(range(2))
    assert tokens.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0, 0], 9 * [0]]
    assert labels[:, 3:].unique().tolist() == [IGNORED]
    assert documents.tolist() == [[0, 0, 0, -1, -2, -2, -2, -2, -3], [-1, -1, -1, -1, -2, -2, -2, -2, -3]]


@pytest.mark.parametrize(
    ("lengths", "learned", "limit"), [([1, 1], None, None), ([4], [False] * 4, 3), ([1, 3], None, 1)]
)
def test_no_label_is_an_error(lengths: list[int], learned: list[bool] | None, limit: int | None) -> None:
    with pytest.raises(DataError, match="has 0 labels in its first"):
        Windows(made(lengths, learned), 4, limit)
