"""A length cut into tiles of one size; the last one is shorter if the size does not divide. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    length: int
    size: int

    def __post_init__(self) -> None:
        assert self.length >= 1
        assert self.size >= 1

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    def rows(self, index: int) -> slice:
        """The rows of tile `index`."""
        assert 0 <= index < self.count
        return slice(index * self.size, min((index + 1) * self.size, self.length))

    def rows_in(self, index: int) -> int:
        """The number of rows of tile `index`."""
        rows = self.rows(index)
        return rows.stop - rows.start

    def holding(self, row: int) -> int:
        """The tile that holds a row."""
        assert 0 <= row < self.length
        return row // self.size

    def slices(self) -> list[slice]:
        return [self.rows(index) for index in range(self.count)]
