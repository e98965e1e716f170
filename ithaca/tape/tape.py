"""A Tape is a long tensor cut into tiles, [tokens, features…]; a schedule reads and writes tiles and never asks where
they live.

    tile = tape.read(i)        tile i, to be read, or changed and written back
    tile = tape.blank(i)       memory for tile i, to be filled; may be the memory that read(i) gave
    tape.write(i, tile)        what read or blank gave is tile i now; returns at once, and the tile is given up
    tape.release(tile)         what read gave is no longer needed

A device tape is one tensor and its tiles are views of it. A host tape is one piece of host memory; its tiles pass
through slots on the device, and `read` and `prefetch` queue copies ahead of their use. The order that keeps this right:

    a tile is computed on      after it has arrived
    it arrives                 after it was written out, and after its slot is free
    a slot is filled           after the slot is free: after its last reader, or after it was copied out
    it is copied out           after it is computed
"""

from typing import Protocol

import torch
from torch import Tensor

from ithaca.tape.engine import Mark
from ithaca.tape.slots import Slots
from ithaca.tape.tiles import Tiles


class Tape(Protocol):
    tiles: Tiles
    memory: Tensor

    def read(self, index: int, toward: int = 0) -> Tensor:
        """Tile `index`; with `toward` ±1 its neighbour in that direction is fetched ahead."""
        ...

    def prefetch(self, index: int) -> None:
        """Begin to fetch a tile that will be read."""
        ...

    def blank(self, index: int) -> Tensor: ...

    def write(self, index: int, tile: Tensor) -> None: ...

    def release(self, tile: Tensor) -> None: ...

    def drop(self) -> None:
        """Give up tiles that were fetched ahead and not read: a pass broke off."""
        ...


class DeviceTape:
    def __init__(self, memory: Tensor, tiles: Tiles):
        assert memory.shape[0] == tiles.length
        self.memory, self.tiles = memory, tiles

    def read(self, index: int, toward: int = 0) -> Tensor:  # noqa: ARG002
        return self.memory[self.tiles.rows(index)]

    def prefetch(self, index: int) -> None:
        pass

    def blank(self, index: int) -> Tensor:
        return self.memory[self.tiles.rows(index)]

    def write(self, index: int, tile: Tensor) -> None:
        assert tile.data_ptr() == self.blank(index).data_ptr()

    def release(self, tile: Tensor) -> None:
        pass

    def drop(self) -> None:
        pass


class HostTape:
    def __init__(self, memory: Tensor, tiles: Tiles, slots: Slots):
        assert memory.shape[0] == tiles.length
        self.memory, self.tiles = memory, tiles
        self._slots, self._engine = slots, slots.engine
        self._arriving: dict[int, tuple[Tensor, Mark]] = {}
        self._written: dict[int, Mark] = {}

    def read(self, index: int, toward: int = 0) -> Tensor:
        self.prefetch(index)
        tile, arrived = self._arriving.pop(index)
        if toward:
            self.prefetch(index + toward)
        self._engine.hold(arrived)
        return tile

    def prefetch(self, index: int) -> None:
        if index in self._arriving or not 0 <= index < self.tiles.count:
            return
        tile, free = self._slots.take(self.tiles.rows_in(index))
        source = self.memory[self.tiles.rows(index)]
        arrived = self._engine.copy_in(tile, source, after=(free, self._written.get(index)))
        self._arriving[index] = tile, arrived

    def blank(self, index: int) -> Tensor:
        tile, free = self._slots.take(self.tiles.rows_in(index))
        self._engine.hold(free)
        return tile

    def write(self, index: int, tile: Tensor) -> None:
        assert index not in self._arriving, "a tile is written while its old content is being fetched"
        target = self.memory[self.tiles.rows(index)]
        copied = self._engine.copy_out(target, tile, after=(self._engine.computed(),))
        self._written[index] = copied
        self._slots.give(tile, copied)

    def release(self, tile: Tensor) -> None:
        if self._engine.poison:
            tile.fill_(torch.nan)
        self._slots.give(tile, self._engine.computed())

    def drop(self) -> None:
        for tile, arrived in self._arriving.values():
            self._slots.give(tile, arrived)
        self._arriving.clear()
