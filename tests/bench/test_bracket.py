"""The longest context is bracketed by lengths that were tried, whatever the prediction said."""

import pytest

from ithaca.bench.bracket import PERCENT, WIDEST, bracket
from ithaca.bench.predict import longest

UNIT = 128


class Device:
    """Holds so many tokens, and remembers what it was asked."""

    def __init__(self, holds: int):
        self.holds, self.tried = holds, []

    def __call__(self, tokens: int) -> bool:
        assert tokens not in self.tried, "no length is tried twice"
        self.tried.append(tokens)
        return tokens <= self.holds


@pytest.mark.parametrize("holds", [UNIT * 100, 10**6, 5 * 10**6 + 77])
def test_a_right_prediction_needs_two_tries(holds: int) -> None:
    device = Device(holds)
    found = bracket(holds, device, UNIT, 2**30)
    assert device.tried == [found.fits, found.fails]
    assert holds * (1 - PERCENT / 100) - UNIT <= found.fits <= holds < found.fails <= holds * (1 + PERCENT / 100) + UNIT
    assert found.fits % UNIT == found.fails % UNIT == 0


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8, 0.93, 1.07, 1.3, 2.5, 20.0])
def test_a_wrong_prediction_is_walked_away_from(share: float) -> None:
    holds = 10**6
    device = Device(holds)
    found = bracket(int(share * holds), device, UNIT, 2**30)
    assert found.fails is not None
    assert found.fits <= holds < found.fails
    assert {found.fits, found.fails} <= {*device.tried}
    assert found.fails <= found.fits * (1 + WIDEST / 100) + UNIT
    assert found.predicted == int(share * holds)
    assert len(device.tried) < 20


def test_where_nothing_fits() -> None:
    for predicted in (0, UNIT, 10**5):
        found = bracket(predicted, Device(UNIT - 1), UNIT, 2**20)
        assert (found.fits, found.fails) == (0, UNIT)


def test_nothing_beyond_the_most_is_tried() -> None:
    device = Device(10**9)
    found = bracket(10**8, device, UNIT, 2**20)
    assert (found.fits, found.fails, device.tried) == (2**20, None, [2**20])
    walked = bracket(10**5, device := Device(10**9), UNIT, 2**20)
    assert (walked.fits, walked.fails) == (2**20, None)
    assert max(device.tried) == 2**20


@pytest.mark.parametrize("holds", [0, 127, 128, 200, 1000, 65537, 2**20, 3 * 10**6])
def test_the_longest_that_is_predicted(holds: int) -> None:
    found = longest(lambda tokens: tokens <= holds, UNIT, 2**21)
    assert found % UNIT == 0
    assert found <= holds
    assert found == (0 if holds < UNIT else found)
    assert min(holds, 2**21) - found <= max(holds / 32, UNIT)
