"""Tiles cover a length once, in order, and know which of them holds a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ithaca.base.tiles import Tiles

TILES = st.builds(Tiles, length=st.integers(1, 200), size=st.integers(1, 250))


@given(tiles=TILES)
def test_rows_cover_the_length_once_and_in_order(tiles: Tiles) -> None:
    covered = [row for index in range(tiles.count) for row in range(tiles.length)[tiles.rows(index)]]
    assert covered == list(range(tiles.length))
    assert tiles.slices() == [tiles.rows(index) for index in range(tiles.count)]


@given(tiles=TILES)
def test_only_the_last_tile_is_short_and_none_is_empty(tiles: Tiles) -> None:
    sizes = [tiles.rows_in(index) for index in range(tiles.count)]
    assert sizes[:-1] == [tiles.size] * (tiles.count - 1)
    assert 1 <= sizes[-1] <= tiles.size
    assert sum(sizes) == tiles.length


@given(tiles=TILES)
def test_holding_is_the_tile_whose_rows_have_it(tiles: Tiles) -> None:
    for row in range(tiles.length):
        rows = tiles.rows(tiles.holding(row))
        assert rows.start <= row < rows.stop


def test_what_lies_outside_is_refused() -> None:
    tiles = Tiles(10, 4)
    for index in (-1, 3):
        with pytest.raises(AssertionError):
            tiles.rows(index)
    for row in (-1, 10):
        with pytest.raises(AssertionError):
            tiles.holding(row)
    for length, size in ((0, 4), (4, 0)):
        with pytest.raises(AssertionError):
            Tiles(length, size)
