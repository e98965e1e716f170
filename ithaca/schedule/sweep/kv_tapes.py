"""K and V of a block as tapes, written by one chunk and read by the later ones; and the sums of their gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ithaca.tape.tape import Tape


class KVTiles:
    """Tiles of K and V. A tile that is not there yet is made when it is first read."""

    def __init__(self, tapes: list[Tape], there: Iterable[int] = ()):
        self._tapes = tapes
        self._there = set(there)
        self._open: dict[int, tuple[list[Tensor], bool]] = {}  # tile -> its tensors, and whether they are new

    def put(self, index: int, k: Tensor, v: Tensor) -> None:
        """Take in a tile and open it for the next reader, after whom it is written."""
        tiles = [tape.blank(index).copy_(tensor) for tape, tensor in zip(self._tapes, (k, v), strict=True)]
        self._open[index] = tiles, True
        self._there.add(index)

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        if index not in self._there:
            self.put(index, *self.make(index))
        elif index not in self._open:
            self._open[index] = [tape.read(index) for tape in self._tapes], False
        if following in self._there:
            for tape in self._tapes:
                tape.prefetch(following)  # pyrefly: ignore
        k, v = self._open[index][0]
        return k, v

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"K and V of tile {index} are read before they are there")

    def release(self, index: int) -> None:
        tiles, new = self._open.pop(index)
        for tape, tile in zip(self._tapes, tiles, strict=True):
            tape.write(index, tile) if new else tape.release(tile)

    def has(self, index: int) -> bool:
        return index in self._there


class KVGradients:
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

    def take(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dK and dV of a tile to which nothing will be added any more."""
        whole = []
        for tape in self._tapes:
            total = tape.read(index)
            whole.append(total.to(dtype, copy=True))  # the tile itself is given up
            tape.release(total)
        return whole[0], whole[1]


class KVWithGradients:
    """Keys as a walk backward reads them: the sums that it adds to as soon as the kernel is done come with them."""

    def __init__(self, keys: KVTiles, sums: KVGradients):
        self._keys, self._sums = keys, sums

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        self._sums.prefetch(index)
        return self._keys.read(index, following)

    def release(self, index: int) -> None:
        self._keys.release(index)
