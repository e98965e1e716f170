"""Where the tiles of a tape lie in a file: each begins with a block of the disk, so that it can go around the kernel's
page cache. Arithmetic, no tensors."""

from dataclasses import dataclass

from ithaca.base.tiles import Tiles

BLOCK = 4096  # bytes; what a disk reads and writes at a time is this or a part of it
STAGED = 6  # tiles of a rank in host memory, on their way to the disk or from it: three of a chunk, and of the next


def whole_blocks(size: int) -> int:
    return size + -size % BLOCK


@dataclass(frozen=True)
class Stretch:
    """The part of a file that a tape has."""

    start: int
    stride: int  # from a tile to the next

    def place(self, index: int) -> int:
        return self.start + index * self.stride


def stretch_bytes(tiles: Tiles, row: int) -> int:
    """What a tape of such tiles takes, of `row` bytes a token."""
    last = tiles.count - 1
    return last * whole_blocks(tiles.size * row) + whole_blocks(tiles.rows_in(last) * row)


def staged_bytes(tiles: Tiles, row: int) -> int:
    """A tile on its way."""
    return whole_blocks(min(tiles.size, tiles.length) * row)
