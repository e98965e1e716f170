"""K and V of a block as tapes, written by one chunk and read by the later ones; and the sums of their gradients."""

from collections.abc import Callable

from torch import Tensor

from ithaca.tape.tape import Tape


class Keys:
    """Tiles of K and V. A tile that is not there yet is made by `make` when it is first read."""

    def __init__(self, tapes: list[Tape], make: Callable[[int], tuple[Tensor, ...]] | None = None):
        self._tapes, self._make = tapes, make
        self._there: set[int] = set()
        self._open: dict[int, tuple[list[Tensor], bool]] = {}  # tile -> its tensors, and whether they are new

    def put(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in a tile and open it; `release` then writes it."""
        tiles = [tape.blank(index).copy_(tensor) for tape, tensor in zip(self._tapes, (k, v), strict=True)]
        self._open[index] = tiles, True
        self._there.add(index)
        return tiles[0], tiles[1]

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        if index not in self._there:
            assert self._make is not None
            return self.put(index, *self._make(index))
        tiles = [tape.read(index) for tape in self._tapes]
        if following in self._there:
            for tape in self._tapes:
                tape.prefetch(following)  # pyrefly: ignore
        self._open[index] = tiles, False
        return tiles[0], tiles[1]

    def release(self, index: int) -> None:
        tiles, new = self._open.pop(index)
        for tape, tile in zip(self._tapes, tiles, strict=True):
            tape.write(index, tile) if new else tape.release(tile)

    def has(self, index: int) -> bool:
        return index in self._there


class KeySums:
    """dK and dV of every tile, in at least fp32: chunks add to those of earlier tiles, in reverse order."""

    def __init__(self, tapes: list[Tape]):
        self._tapes = tapes
        self._begun: set[int] = set()

    def prefetch(self, index: int) -> None:
        if index in self._begun:
            for tape in self._tapes:
                tape.prefetch(index)

    def add(self, index: int, keys: slice, dk: Tensor, dv: Tensor) -> None:
        for tape, part in zip(self._tapes, (dk, dv), strict=True):
            total = tape.read(index) if index in self._begun else tape.blank(index).zero_()
            total[keys] += part
            tape.write(index, total)
        self._begun.add(index)

    def complete(self, index: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """The last part of a tile: what it gives itself. Returns the whole, in the dtype of the parts."""
        if index not in self._begun:
            return dk, dv
        whole = []
        for tape, part in zip(self._tapes, (dk, dv), strict=True):
            total = tape.read(index)
            whole.append((total + part).to(part.dtype))
            tape.release(total)
        return whole[0], whole[1]
