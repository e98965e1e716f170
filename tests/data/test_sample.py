"""Sequences: each window once an epoch, decided by their number alone, with documents and prompts marked."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.sample import permuted, sequences


def _file(lengths: list[int], learned: list[bool] | None = None) -> TokenFile:
    """Documents of these lengths; a token is its own place in the stream."""
    bounds = np.cumsum([0, *lengths])
    mask = None if learned is None else np.array(learned)
    return in_memory(np.arange(bounds[-1], dtype=np.uint32), bounds, mask)


def _from(lengths: list[int], first: list[int]) -> list[bool]:
    """For each token whether it is learned, if each document is learned from its token `first` on."""
    return [place >= begin for size, begin in zip(lengths, first, strict=True) for place in range(size)]


def _naive(
    lengths: list[int], mask: list[bool] | None, start: int, length: int
) -> tuple[list[int], list[int], list[bool]]:
    """Token by token: what stands there, its label, and whether a document begins."""
    size, bounds = sum(lengths), {0, *np.cumsum(lengths).tolist()}
    places = [place % size for place in range(start, start + length)]
    labels = [place if mask is None or mask[place] else -100 for place in places]
    return places, labels, [place in bounds for place in places]


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 40), st.integers(0, 5), st.integers(0, 9), st.none() | st.randoms())
def test_equal_to_token_by_token(lengths: list[int], length: int, seed: int, step: int, chance: Random | None) -> None:
    mask = [chance.random() < 0.5 for _ in range(sum(lengths))] if chance else None
    data = _file(lengths, mask)
    tokens, labels, documents = sequences(data, 2, length, seed, step)
    for row in range(2):
        wanted = _naive(lengths, mask, int(tokens[row, 0]), length)
        assert tokens[row].tolist() == wanted[0]
        assert labels[row].tolist() == wanted[1]
        # A document's id changes where one begins, and nowhere else; no id comes back
        assert [a != b for a, b in pairwise(documents[row].tolist())] == wanted[2][1:]
        assert (documents[row].diff() >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permutation_is_one_to_one(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permutation_depends_on_the_key_and_mixes() -> None:
    orders = {tuple(permuted(index, 6, key) for index in range(6)) for key in range(8000)}
    assert len(orders) == 720  # all orders of six
    order = [permuted(index, 1000, 7) for index in range(1000)]
    steps = np.abs(np.diff(order))
    assert abs(steps.mean() - 1000 / 3) < 40  # as for independent places
    assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1


def test_permutation_of_many_is_quick_and_within() -> None:
    for size in (1, 2, 2**40, 2**40 + 1, 3**30):
        found = {permuted(index, size, 11) for index in range(min(size, 200))}
        assert len(found) == min(size, 200)
        assert all(0 <= index < size for index in found)


@pytest.mark.parametrize(("size", "length"), [(40, 4), (41, 4), (43, 4), (7, 7), (13, 7)])
def test_an_epoch_visits_each_window_once(size: int, length: int) -> None:
    data = _file([size])
    windows = size // length
    shifts, orders = set(), set()
    for epoch in range(40):
        rows = [sequences(data, 1, length, 3, epoch * windows + index)[0][0].tolist() for index in range(windows)]
        seen = [token for row in rows for token in row]
        assert len(set(seen)) == len(seen) == windows * length
        # The windows tile the circle: one gap, of what is left over, between the last and the first
        starts = sorted(row[0] for row in rows)
        gaps = sorted((b - a) % size or size for a, b in zip(starts, [*starts[1:], starts[0]], strict=True))
        assert gaps == [length] * (windows - 1) + [length + size % length]
        shifts.add(starts[0])
        orders.add(tuple(np.argsort([row[0] for row in rows])))
    assert len(shifts) > 3
    assert len(orders) > 3 or windows < 3


def test_all_tokens_come_up_in_time() -> None:
    data = _file([13])
    seen = torch.cat([sequences(data, 1, 7, 0, epoch)[0].flatten() for epoch in range(40)])
    assert set(seen.tolist()) == set(range(13))


def test_grouping_into_steps_changes_nothing() -> None:
    data = _file([5, 9, 20, 3], _from([5, 9, 20, 3], [1, 0, 20, 2]))
    alone = [sequences(data, 1, 6, 5, number) for number in range(24)]
    for rows in (2, 3, 4, 12):
        together = [sequences(data, rows, 6, 5, step) for step in range(24 // rows)]
        for kind in range(3):
            a = torch.cat([item[kind] for item in alone])
            b = torch.cat([item[kind] for item in together])
            assert torch.equal(a, b)


def test_seed_and_epoch_decide() -> None:
    data = _file([1000])
    first = [sequences(data, 10, 100, seed, step)[0] for seed in (0, 1) for step in (0, 1)]
    assert not any(torch.equal(a, b) for number, a in enumerate(first) for b in first[number + 1 :])
    assert torch.equal(first[0], sequences(data, 10, 100, 0, 0)[0])


def test_the_same_in_every_release() -> None:
    # Fixed numbers: a run that is resumed after an upgrade must go on with the same sequences
    data = _file([1000])
    assert sequences(data, 4, 10, 7, 123)[0][:, 0].tolist() == [578, 98, 318, 808]


def test_short_stream_goes_around() -> None:
    data = _file([2, 1], [False, True, True])
    tokens, labels, documents = sequences(data, 1, 10, 0, 0)
    assert tokens.shape == (1, 10)
    start = int(tokens[0, 0])
    assert tokens[0].tolist() == [place % 3 for place in range(start, start + 10)]
    assert labels[0].tolist() == [-100 if token == 0 else token for token in tokens[0].tolist()]
    assert len(set(documents[0].tolist())) == sum(token in (0, 2) for token in tokens[0, 1:].tolist()) + 1


def test_rows_are_int64_and_may_be_changed() -> None:
    data = _file([20, 30])
    for tensor in sequences(data, 2, 8, 0, 0):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (2, 8)
        tensor += 1


def test_some_rows_of_a_step_are_those_of_all() -> None:
    data = _file([3, 5, 2, 9, 1, 7])
    whole = sequences(data, 6, 8, 4, 11)
    for only in (range(2), range(2, 5), range(5, 6), range(0)):
        for some, all_rows in zip(sequences(data, 6, 8, 4, 11, only), whole, strict=True):
            assert torch.equal(some, all_rows[only.start : only.stop])
