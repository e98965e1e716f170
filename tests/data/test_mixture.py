"""Dealing out rows by weight: to within half a row of two sources, two rows of several; no replay."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.data.mixture import Interleave

WEIGHTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_row_by_row(weights: list[float]) -> None:
    deal, seen = Interleave(weights), [0] * len(weights)
    for row in range(400):
        assert deal.counts(row) == seen
        source, earlier = deal.locate(row)
        assert earlier == seen[source]
        seen[source] += 1
        for count, weight in zip(seen, weights, strict=True):
            off = abs(count - (row + 1) * weight / sum(weights))
            assert off <= (0.5 if len(weights) <= 2 else 2) + 1e-6


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_far_away(weights: list[float], row: int) -> None:
    deal = Interleave(weights)
    before, after = deal.counts(row), deal.counts(row + 1)
    source, earlier = deal.locate(row)
    assert before[source] == earlier
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(i == source) for i in range(len(weights))]


def test_the_same_in_every_release() -> None:
    deal = Interleave([0.5, 0.3, 0.2])
    assert [deal.locate(row)[0] for row in range(10)] == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
