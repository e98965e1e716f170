"""K and V of a block on tapes, written by one chunk and read by later ones; and the sums of their gradients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ithaca.tape.tape import Tape


class KVTiles:
    """Tiles of K and V. A tile that is not written yet is computed at its first read (`make`).

    Tapes are as wide as the largest head round. A round with fewer heads uses the first places of a token.
    """

    def __init__(self, tapes: list[Tape], heads: int, written: Iterable[int] = ()):
        self._tapes, self._heads = tapes, heads
        self._written = set(written)
        self._open: dict[int, tuple[list[Tensor], bool]] = {}  # tile -> K and V, and whether they are new

    def put(self, index: int, k: Tensor, v: Tensor) -> None:
        """Add a new tile. It stays open for its first reader and is written when that reader releases it."""
        tiles = [tape.blank(index) for tape in self._tapes]
        for tile, tensor in zip(tiles, (k, v), strict=True):
            tile[:, : self._heads].copy_(tensor)
        self._open[index] = tiles, True
        self._written.add(index)

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        if index not in self._written:
            self.put(index, *self.make(index))
        elif index not in self._open:
            self._open[index] = [tape.read(index) for tape in self._tapes], False
        if following is not None:
            self.prefetch(following)
        k, v = (tile[:, : self._heads] for tile in self._open[index][0])
        return k, v

    def prefetch(self, index: int) -> None:
        """Begin to fetch a tile, if it is written."""
        if index in self._written:
            for tape in self._tapes:
                tape.prefetch(index)

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"K and V of tile {index} are read before they are written")

    def release(self, index: int) -> None:
        tiles, new = self._open.pop(index)
        for tape, tile in zip(self._tapes, tiles, strict=True):
            tape.write(index, tile) if new else tape.release(tile)

    def has(self, index: int) -> bool:
        return index in self._written


class KVGradients:
    """dK and dV of every tile, in at least fp32. Chunks run in reverse and add to those of earlier tiles.

    A tile stays open until the chunk's visit to it is over (`close`). The chunk's own tile, to which no later chunk
    adds, stays open until `take`. If there is one tile and one kernel call gives all its gradients, they stay in the
    kernel's own tensors.
    """

    def __init__(self, tapes: list[Tape], heads: int):
        self._tapes, self._heads = tapes, heads
        self._begun: set[int] = set()
        self._open: dict[int, list[Tensor]] = {}
        self._only: tuple[Tensor, Tensor] | None = None

    def prefetch(self, index: int) -> None:
        if index in self._begun:
            for tape in self._tapes:
                tape.prefetch(index)

    def add(self, index: int, keys: slice, dk: Tensor, dv: Tensor) -> None:
        tiles = self._tapes[0].tiles
        whole = keys.indices(tiles.rows_in(index)) == (0, tiles.rows_in(index), 1)
        if whole and tiles.count == 1 and not self._begun and self._only is None:
            self._only = dk, dv
            return
        if self._only is not None:
            only, self._only = self._only, None
            self._add(index, slice(None), only, whole=True)
        self._add(index, keys, (dk, dv), whole)

    def _add(self, index: int, keys: slice, parts: tuple[Tensor, Tensor], whole: bool) -> None:
        new = index not in self._begun
        tiles = self._open.get(index) or [tape.blank(index) if new else tape.read(index) for tape in self._tapes]
        for tile, part in zip(tiles, parts, strict=True):
            total = tile[:, : self._heads]
            if new and whole:
                total.copy_(part)
                continue
            if new:
                total.zero_()
            total[keys] += part
        self._begun.add(index)
        self._open[index] = tiles

    def close(self, index: int) -> None:
        """Store a tile after additions. Other chunks will add to it again."""
        if self._heads:  # otherwise this rank has no heads in this round, and nothing was added
            for tape, tile in zip(self._tapes, self._open.pop(index), strict=True):
                tape.write(index, tile)

    def take(self, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dK and dV of a tile that no later chunk will add to."""
        if self._only is not None:
            (dk, dv), self._only = self._only, None
            return dk.to(dtype), dv.to(dtype)
        tiles = self._open.pop(index) if self._heads else [tape.blank(index) for tape in self._tapes]
        dk, dv = (tile[:, : self._heads].to(dtype, copy=True) for tile in tiles)  # copies: the tiles are released
        for tape, tile in zip(self._tapes, tiles, strict=True):
            tape.release(tile)
        return dk, dv


class KVWithGradients:
    """K and V for the backward walk of a chunk, with the sums that it will add to."""

    def __init__(self, keys: KVTiles, sums: KVGradients, chunk: int):
        self._keys, self._sums, self._chunk = keys, sums, chunk

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        self._sums.prefetch(index)
        return self._keys.read(index, following)

    def release(self, index: int) -> None:
        self._keys.release(index)
        if index != self._chunk:
            self._sums.close(index)
