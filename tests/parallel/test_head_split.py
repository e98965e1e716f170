"""Which rank attends with which heads, and when: pure arithmetic."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ithaca.base.errors import PlanError
from ithaca.parallel.head_split import HeadSplit, head_rounds, imbalance, split_heads, usable_rounds

Counts = tuple[int, int, int]  # query heads, key/value heads, ranks


@st.composite
def head_counts(draw: st.DrawFn) -> Counts:
    kv_heads = draw(st.integers(1, 9))
    heads = kv_heads * draw(st.integers(1, 9))
    return heads, kv_heads, draw(st.integers(1, min(heads, 16)))


def assert_reads_its_own(split: HeadSplit, group: int) -> None:
    """On each rank a kernel pairs query head i with key/value head i // (queries / keys) of what is there."""
    for q, kv in zip(split.q, split.kv, strict=True):
        if q:
            each, rest = divmod(len(q), len(kv))
            assert rest == 0
            assert [kv[place // each] for place in range(len(q))] == [head // group for head in q]


@given(head_counts())
def test_every_head_has_a_rank_and_its_keys_with_it(counts: Counts) -> None:
    heads, kv_heads, ranks = counts
    split, group = split_heads(*counts), heads // kv_heads
    assert len(split.q) == len(split.kv) == ranks
    assert [head for part in split.q for head in part] == list(range(heads))
    for q, kv in zip(split.q, split.kv, strict=True):
        queries = Counter(head // group for head in q)
        assert sorted(queries) == list(kv)
        assert len(set(queries.values())) == 1
    assert_reads_its_own(split, group)
    assert list(split.q_heads) == list(range(heads))
    assert list(split.kv_heads) == list(range(kv_heads))
    assert split.replicated == (ranks > kv_heads)


@given(head_counts())
def test_heads_are_split_evenly(counts: Counts) -> None:
    heads, kv_heads, ranks = counts
    split = split_heads(*counts)
    if ranks <= kv_heads:
        sizes = [len(kv) for kv in split.kv]
        assert max(sizes) - min(sizes) <= 1
    else:
        holders = Counter(kv.start for kv in split.kv)
        assert max(holders.values()) - min(holders.values()) <= 1
        for head in range(kv_heads):
            sizes = [len(q) for q, kv in zip(split.q, split.kv, strict=True) if kv.start == head]
            assert max(sizes) - min(sizes) <= 1
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        assert imbalance(split) == 0


@pytest.mark.parametrize(
    ("counts", "queries", "keys"),
    [
        ((8, 8, 3), [3, 3, 2], [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ((14, 2, 4), [4, 3, 4, 3], [[0], [0], [1], [1]]),
        ((8, 2, 3), [2, 2, 4], [[0], [0], [1]]),
        ((8, 1, 8), [1] * 8, [[0]] * 8),
        ((6, 3, 2), [4, 2], [[0, 1], [2]]),
        ((6, 3, 4), [1, 1, 2, 2], [[0], [0], [1], [2]]),
    ],
    ids=str,
)
def test_examples(counts: Counts, queries: list[int], keys: list[list[int]]) -> None:
    split = split_heads(*counts)
    assert [len(part) for part in split.q] == queries
    assert [list(part) for part in split.kv] == keys


def test_by_how_much_the_fullest_rank_has_more() -> None:
    assert imbalance(split_heads(8, 8, 3)) == pytest.approx(3 / (8 / 3) - 1)
    assert imbalance(split_heads(8, 2, 3)) == pytest.approx(4 / (8 / 3) - 1)
    assert imbalance(split_heads(8, 2, 4)) == 0


def test_more_ranks_than_heads() -> None:
    with pytest.raises(PlanError) as caught:
        split_heads(6, 3, 8)
    assert str(caught.value) == ("ulysses=8 is more than the model's 6 query heads: 1 to 6 work, evenly 1, 2, 3, 6")


@given(head_counts())
def test_every_usable_number_makes_rounds_of_all_heads(counts: Counts) -> None:
    heads, kv_heads, ranks = counts
    split = split_heads(*counts)
    for at_once in usable_rounds(split):
        groups = head_rounds(split, at_once)
        rounds = [part for group in groups for part in group]
        for rank in range(ranks):
            # In order, so that every head comes once, and K and V of a group once
            assert [head for part in rounds for head in part.q[rank]] == list(split.q[rank])
            assert [head for group in groups for head in group[0].kv[rank]] == list(split.kv[rank])
        for group in groups:
            assert len({part.kv for part in group}) == 1
            assert all(list(part.q_heads) for part in group), "a round for nobody"
        for part in rounds:
            assert len(part.q_heads) <= at_once
            assert max(map(len, part.q)) <= -(-at_once // ranks) or at_once == heads
            assert_reads_its_own(part, heads // kv_heads)


@given(head_counts())
def test_all_other_numbers_are_refused(counts: Counts) -> None:
    split = split_heads(*counts)
    usable = usable_rounds(split)
    for at_once in set(range(1, counts[0] + 5)) - set(usable):
        with pytest.raises(PlanError) as caught:
            head_rounds(split, at_once)
        assert str(caught.value).startswith(f"heads={at_once} is not usable with {counts[0]} query heads on")
        assert str(caught.value).endswith(f": {', '.join(map(str, usable))} {'are' if len(usable) > 1 else 'is'}")


@given(head_counts())
def test_one_head_on_each_rank_and_all_heads_are_always_usable(counts: Counts) -> None:
    split = split_heads(*counts)
    assert {counts[2], counts[0]} <= set(usable_rounds(split))
    assert head_rounds(split, None) == head_rounds(split, counts[0]) == ((split,),)


@pytest.mark.parametrize(
    ("counts", "usable"),
    [
        ((8, 8, 2), [2, 4, 6, 8]),
        ((8, 2, 2), [2, 4, 6, 8]),
        ((8, 2, 1), [1, 2, 3, 4, 8]),
        ((14, 2, 4), [4, 8, 12, 14]),
        ((8, 2, 3), [3, 6, 8]),
        ((6, 3, 2), [2, 4, 6]),
        ((8, 8, 8), [8]),
    ],
    ids=str,
)
def test_usable_numbers(counts: Counts, usable: list[int]) -> None:
    assert usable_rounds(split_heads(*counts)) == usable


def test_rounds_that_read_the_same_keys_follow_each_other() -> None:
    groups = head_rounds(split_heads(8, 2, 2), 2)
    assert [[[list(q) for q in part.q] for part in group] for group in groups] == [
        [[[head], [head + 4]] for head in range(4)]
    ]
    assert groups[0][0].kv == (range(1), range(1, 2))


def test_a_rank_with_fewer_heads_has_none_left_at_last() -> None:
    first, second = (group[0] for group in head_rounds(split_heads(6, 3, 2), 4))
    assert [list(q) for q in first.q] == [[0, 1], [4, 5]]
    assert [list(q) for q in second.q] == [[2, 3], []]
    assert [len(kv) for kv in second.kv] == [1, 0]
    assert second.q_parts == [slice(0, 2), slice(0, 0)]


@given(head_counts())
def test_parts_say_where_a_ranks_heads_stand(counts: Counts) -> None:
    split = split_heads(*counts)
    for group in head_rounds(split, counts[2]):
        for part in group:
            for rank in range(counts[2]):
                assert list(part.q_heads[part.q_parts[rank]]) == list(part.q[rank])
                assert list(part.kv_heads[part.kv_parts[rank]]) == list(part.kv[rank])
            assert all(first < second for first, second in pairwise(part.q_heads))
