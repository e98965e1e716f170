"""A Tape is a long tensor cut into tiles, [tokens, features…]; a schedule reads and writes tiles and never asks where
they live.

    tile = tape.read(i)        tile i, to be read, or changed and written back
    tile = tape.blank(i)       memory for tile i, to be filled; may be the memory that read(i) gave
    tape.write(i, tile)        what read or blank gave is tile i now; returns at once, and the tile is given up
    tape.release(tile)         what read gave is no longer needed

A device tape is one tensor and its tiles are views of it. A host tape is one piece of host memory; its tiles pass
through slots on the device, and `read` and `prefetch` queue copies ahead of their use. So do those of a disk tape
(disk.py), which has a stretch of a file. The order that keeps this right:

    a tile is computed on      after it has arrived
    it arrives                 after it was written out, and after its slot is free
    a slot is filled           after the slot is free: after its last reader, or after it was copied out
    it is copied out           after it is computed
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from ithaca.base.tiles import Tiles
from ithaca.tape.engine import Engine, Mark


class Slots:
    def __init__(self, engine: Engine, rows: int, features: tuple[int, ...], dtype: torch.dtype, count: int):
        self.engine = engine
        self._free: deque[tuple[Tensor, Mark | None]] = deque()
        self._held: dict[int, Tensor] = {}  # by address
        for _ in range(count):
            slot = torch.empty(rows, *features, dtype=dtype, device=engine.device)
            if engine.poison:
                slot.fill_(torch.nan)
            self._free.append((slot, engine.computed()))

    def take(self, rows: int) -> tuple[Tensor, Mark | None]:
        """The first rows of a slot, and the mark at which it is free: the one that was given back first."""
        assert self._free, "every slot is held: a schedule takes more tiles at a time than it asked for"
        slot, mark = self._free.popleft()
        self._held[slot.data_ptr()] = slot
        return slot[:rows], mark

    def give(self, tile: Tensor, mark: Mark | None) -> None:
        """The slot of a tile that was taken is free again at the mark."""
        self._free.append((self._held.pop(tile.data_ptr()), mark))

    def reclaim(self) -> None:
        """All slots are free: whoever held one is gone, and nothing is under way."""
        self._free.extend((slot, None) for slot in self._held.values())
        self._held.clear()

    @property
    def held(self) -> int:
        return len(self._held)


class Tape(Protocol):
    tiles: Tiles

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


class _Memory:
    """The memory of a tape, one row a token. With `features`, tiles are rows of those instead, each at the beginning of
    its own place: a tape that has served lends its memory to another one, tile by tile."""

    def __init__(self, memory: Tensor, tiles: Tiles, features: tuple[int, ...] | None = None):
        assert memory.shape[0] == tiles.length or isinstance(self, StandIn)
        self.memory, self.tiles = memory, tiles
        self._features = tuple(memory.shape[1:]) if features is None else features

    def place(self, index: int) -> Tensor:
        """Where tile `index` lies."""
        count, part = self.tiles.rows_in(index), self.memory[self.tiles.rows(index)]
        return part.flatten()[: count * math.prod(self._features)].view(count, *self._features)


class DeviceTape(_Memory):
    def read(self, index: int, toward: int = 0) -> Tensor:  # noqa: ARG002
        return self.place(index)

    def prefetch(self, index: int) -> None:
        pass

    def blank(self, index: int) -> Tensor:
        return self.place(index)

    def write(self, index: int, tile: Tensor) -> None:
        assert tile.data_ptr() == self.blank(index).data_ptr()

    def release(self, tile: Tensor) -> None:
        pass

    def drop(self) -> None:
        pass


class SlotTape(ABC):
    """A tape whose tiles pass through slots."""

    def __init__(self, tiles: Tiles, slots: Slots):
        self.tiles = tiles
        self._slots, self._engine = slots, slots.engine
        self._arriving: dict[int, tuple[Tensor, Any]] = {}  # what `_fetch` gave

    @abstractmethod
    def _fetch(self, index: int, tile: Tensor, free: Mark | None) -> Any:
        """Begin to fill a slot, which is free at the mark, with tile `index`."""

    @abstractmethod
    def _arrived(self, coming: Any) -> Mark:
        """The mark at which what is fetched is there."""

    @abstractmethod
    def _dropped(self, coming: Any) -> Mark | None:
        """The mark at which the slot of what is fetched is free, since nobody will read it."""

    @abstractmethod
    def _store(self, index: int, tile: Tensor) -> Mark:
        """Begin to take a tile away; its slot is free at the mark."""

    def read(self, index: int, toward: int = 0) -> Tensor:
        self.prefetch(index)
        tile, coming = self._arriving.pop(index)
        if toward:
            self.prefetch(index + toward)
        self._engine.hold(self._arrived(coming))
        return tile

    def prefetch(self, index: int) -> None:
        if index in self._arriving or not 0 <= index < self.tiles.count:
            return
        tile, free = self._slots.take(self.tiles.rows_in(index))
        self._arriving[index] = tile, self._fetch(index, tile, free)

    def blank(self, index: int) -> Tensor:
        tile, free = self._slots.take(self.tiles.rows_in(index))
        self._engine.hold(free)
        return tile

    def write(self, index: int, tile: Tensor) -> None:
        assert index not in self._arriving, "a tile is written while its old content is being fetched"
        self._slots.give(tile, self._store(index, tile))

    def release(self, tile: Tensor) -> None:
        if self._engine.poison:
            tile.fill_(torch.nan)
        self._slots.give(tile, self._engine.computed())

    def drop(self) -> None:
        for tile, coming in self._arriving.values():
            self._slots.give(tile, self._dropped(coming))
        self._arriving.clear()


class HostTape(_Memory, SlotTape):
    def __init__(self, memory: Tensor, tiles: Tiles, slots: Slots, features: tuple[int, ...] | None = None):
        _Memory.__init__(self, memory, tiles, features)
        SlotTape.__init__(self, tiles, slots)
        self._written: dict[int, Mark] = {}

    def _fetch(self, index: int, tile: Tensor, free: Mark | None) -> Mark:
        return self._engine.copy_in(tile, self.place(index), after=(free, self._written.get(index)))

    def _arrived(self, coming: Mark) -> Mark:
        return coming

    def _dropped(self, coming: Mark) -> Mark:
        return coming

    def _store(self, index: int, tile: Tensor) -> Mark:
        self._written[index] = self._engine.copy_out(self.place(index), tile, after=(self._engine.computed(),))
        return self._written[index]


class StandIn(HostTape):
    """A host or disk tape of which a few tiles are in memory and stand for all in turn: for rehearsals, its values are
    wrong."""

    def place(self, index: int) -> Tensor:
        count, held = self.tiles.rows_in(index), len(self.memory) // self.tiles.size
        start = index % held * self.tiles.size
        part = self.memory[start : start + count]
        return part.flatten()[: count * math.prod(self._features)].view(count, *self._features)
