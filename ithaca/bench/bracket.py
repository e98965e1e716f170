"""The longest context, bracketed: a length that was seen to fit, and one a little above that was seen not to.

The prediction says where to look. `PERCENT` below it must fit and `PERCENT` above it must not. If the prediction is
wrong on a side, the search walks on in growing steps until something fits and something does not, and then narrows
the two down to `WIDEST`. Nothing is assumed: both lengths were tried.
"""

from collections.abc import Callable
from dataclasses import dataclass

PERCENT = 4
WIDEST = 2.5 * PERCENT  # percent between the two lengths at the end


@dataclass(frozen=True)
class Bracket:
    """The lengths between which the longest context lies."""

    predicted: int
    fits: int  # the longest that was seen to fit; 0: none was
    fails: int | None  # the shortest that was seen not to; None: the longest that was looked at fits


def bracket(predicted: int, fits: Callable[[int], bool], shortest: int, most: int) -> Bracket:
    """Find the longest context by trying lengths about the predicted one."""
    low, high = 0, None
    tried = _round(predicted * (1 - PERCENT / 100), shortest) if predicted < most else most
    walk = PERCENT
    while low == 0:  # down, until something fits
        if fits(tried):
            low = tried
        elif tried <= shortest:
            return Bracket(predicted, 0, tried)
        else:
            high, walk = tried, min(2 * walk, 50)
            tried = _round(tried * (1 - walk / 100), shortest)
    walk = PERCENT
    tried = _round(max(predicted, low) * (1 + PERCENT / 100), shortest, up=True)
    while high is None and low < most:  # up, until something does not
        tried = min(tried, most)
        if fits(tried):
            low, walk = tried, min(2 * walk, 100)
            tried = _round(tried * (1 + walk / 100), shortest, up=True)
        else:
            high = tried
    while high is not None and high > low * (1 + WIDEST / 100) and high - low > shortest:
        middle = _round((low + high) / 2, shortest)
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Bracket(predicted, low, high)


def _round(tokens: float, unit: int, up: bool = False) -> int:
    """Round to whole units, to at least one."""
    return max(int(-(-tokens // unit)) if up else int(tokens // unit), 1) * unit
