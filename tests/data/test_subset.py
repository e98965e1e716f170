"""Some documents of a file as data of their own: the same tokens, labels and bounds as if they were all of it."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.data import subset
from ithaca.data.reader import Window, in_memory
from ithaca.data.subset import Subset, count_labels, split_by_length


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12), st.booleans(), st.randoms())
def test_as_if_there_were_no_others(documents: list[tuple[int, bool]], masked: bool, chance) -> None:
    chosen = np.array([kept for _, kept in documents])
    chosen[chance.randrange(len(chosen))] = True
    bounds = np.cumsum([0, *(length for length, _ in documents)])
    learned = np.array([chance.random() < 0.6 for _ in range(bounds[-1])]) if masked else None
    tokens = np.arange(bounds[-1])
    inside = np.repeat(chosen, np.diff(bounds))
    alone = in_memory(
        tokens[inside],
        np.cumsum([0, *np.diff(bounds)[chosen]]),
        None if learned is None else learned[inside],
        vocab=int(bounds[-1]),
    )
    with mock.patch.object(subset, "READ", chance.randint(1, 9)):
        found = Subset(in_memory(tokens, bounds, learned), chosen, bounds)
    assert (found.tokens, found.documents, found.header.labels) == (alone.tokens, alone.documents, alone.header.labels)
    assert found.bounds().tolist() == alone.bounds().tolist()
    start = chance.randrange(alone.tokens)
    stop = chance.randint(start + 1, alone.tokens)
    mine, theirs = found.read(start, stop), alone.read(start, stop)
    assert mine.tokens.tolist() == theirs.tokens.tolist()
    assert mine.documents.tolist() == theirs.documents.tolist()
    assert (mine.learned is None) == (theirs.learned is None)
    if mine.learned is not None and theirs.learned is not None:
        assert mine.learned.tolist() == theirs.learned.tolist()
    assert count_labels(found, alone.tokens) == alone.header.labels


def test_labels_of_scattered_documents_are_counted_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block was read and checked once for every document in it: minutes for millions of conversations."""
    bounds = np.arange(0, 1001, 5)
    data = in_memory(np.arange(1000), bounds, np.arange(1000) % 3 == 0)
    chosen = np.arange(200) % 2 == 0
    chosen[100:180] = False  # nothing of 500 tokens: not read
    reads, read = [], data.read

    def noted(start: int, stop: int) -> Window:
        reads.append((start, stop))
        return read(start, stop)

    monkeypatch.setattr(data, "read", noted)
    monkeypatch.setattr(subset, "READ", 50)
    labels = Subset(data, chosen, bounds).header.labels
    assert reads == [(at, at + 50) for at in (*range(0, 500, 50), *range(900, 1000, 50))]
    monkeypatch.undo()
    assert labels == count_labels(Subset(data, chosen, bounds, 0), int(chosen.sum()) * 5) > 0


def test_a_view_of_a_view_has_its_own_identity() -> None:
    bounds = np.arange(0, 41, 4)
    data = in_memory(np.arange(40), bounds)
    odd = Subset(data, np.arange(10) % 2 == 1, bounds)
    even = Subset(data, np.arange(10) % 2 == 0, bounds)
    views = [Subset(view, np.arange(5) < 2, view.bounds()) for view in (odd, even)]
    assert views[0].read(0, 8).tokens.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert len({view.identity()["sha256"] for view in (data, odd, even, *views)}) == 5


def test_split_by_length() -> None:
    lengths = [3, 9, 4, 1, 12, 4]
    bounds = np.cumsum([0, *lengths])
    data = in_memory(np.arange(33), bounds, np.arange(33) % 2 == 0)
    long, short = split_by_length(data, 4)
    assert long is not None
    assert short is not None
    assert np.diff(long.bounds()).tolist() == [9, 4, 12, 4]
    assert np.diff(short.bounds()).tolist() == [3, 1]
    assert long.header.labels + short.header.labels == data.header.labels
    assert split_by_length(data, 13) == (None, data)
    assert split_by_length(data, 1) == (data, None)
