"""A Tape is a long tensor, [tokens, features…], cut into tiles that may live on the device, in host memory or on disk.

A schedule reads and writes tiles in the same way wherever they live:

    tile = tape.read(i)        tile i, to be read, or to be changed and written back
    tile = tape.blank(i)       memory for tile i with undefined content; it may be the memory that read(i) returned
    tape.write(i, tile)        store a tile that read or blank returned; returns at once, and the tile must not be used
    tape.release(tile)         give back a tile that read returned and that is not written

A device tape is one tensor and its tiles are views of it. A host tape is one piece of host memory. Its tiles pass
through slots, tile-sized tensors on the device; `read` and `prefetch` queue the copies ahead of their use. A disk tape
(disk.py) is a stretch of a file and uses slots too. Four rules about order keep this right:

    the computation uses a tile      after the tile has arrived in its slot
    a tile arrives in a slot         after the tile was last written out, and after the slot is free
    a slot is free                   after the computation released its tile, or after the tile was copied out
    a tile is copied out             after it is computed

If a tape has one tile, one that is written to be read again at once (`again`) stays in its slot: it is copied out, but
not back. Then a fifth rule holds: the computation changes it, or frees its slot, after it was copied out.
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
    """Tile-sized tensors on the device, which the tiles of host and disk tapes pass through."""

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
        """The first rows of the slot that was given back first, and the mark at which it is free."""
        assert self._free, "all slots are in use: a schedule holds more tiles at once than it asked for"
        slot, mark = self._free.popleft()
        self._held[slot.data_ptr()] = slot
        return slot[:rows], mark

    def give(self, tile: Tensor, mark: Mark | None) -> None:
        """Give back the slot of a tile; it is free at the mark."""
        self._free.append((self._held.pop(tile.data_ptr()), mark))

    def reclaim(self) -> None:
        """Take back all slots after a pass was interrupted. No copy may be under way."""
        self._free.extend((slot, None) for slot in self._held.values())
        self._held.clear()

    @property
    def held(self) -> int:
        return len(self._held)


class Tape(Protocol):
    tiles: Tiles

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:
        """Tile `index`. With `toward` ±1, also begin to fetch its neighbour in that direction.

        A caller that will not change the tile says `changed=False`, and does not wait for the tile's copy out.
        """
        ...

    def prefetch(self, index: int) -> None:
        """Begin to fetch a tile that will be read later."""
        ...

    def blank(self, index: int) -> Tensor: ...

    def write(self, index: int, tile: Tensor, again: bool = False) -> None:
        """Store a tile. `again`: the next read is of this tile."""
        ...

    def release(self, tile: Tensor) -> None: ...

    def drop(self) -> None:
        """Drop tiles that were fetched ahead and not read, after a pass was interrupted."""
        ...


class _Memory:
    """The memory of a tape, one row per token.

    With `features`, tiles have those features instead, and each lies at the start of one of the memory's own tiles. So
    a tape whose content is no longer needed lends its memory to another tape.
    """

    def __init__(self, memory: Tensor, tiles: Tiles, features: tuple[int, ...] | None = None):
        assert memory.shape[0] == tiles.length or isinstance(self, StandIn)
        self.memory, self.tiles = memory, tiles
        self._features = tuple(memory.shape[1:]) if features is None else features

    def place(self, index: int) -> Tensor:
        """The memory of tile `index`."""
        count, part = self.tiles.rows_in(index), self.memory[self.tiles.rows(index)]
        return part.flatten()[: count * math.prod(self._features)].view(count, *self._features)


class DeviceTape(_Memory):
    """One tensor on the device; tiles are views of it."""

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:  # noqa: ARG002
        return self.place(index)

    def prefetch(self, index: int) -> None:
        pass

    def blank(self, index: int) -> Tensor:
        return self.place(index)

    def write(self, index: int, tile: Tensor, again: bool = False) -> None:  # noqa: ARG002
        assert tile.data_ptr() == self.blank(index).data_ptr()

    def release(self, tile: Tensor) -> None:
        pass

    def drop(self) -> None:
        pass


class SlotTape(ABC):
    """A tape whose tiles pass through slots; the subclasses say how a slot is filled and emptied."""

    def __init__(self, tiles: Tiles, slots: Slots):
        self.tiles = tiles
        self._slots, self._engine = slots, slots.engine
        self._arriving: dict[int, tuple[Tensor, Any]] = {}  # tile -> its slot, and what `_fetch` returned
        self._staying: dict[int, tuple[Tensor, Mark]] = {}  # tile -> its slot, and the mark of its copy out
        self._leaving: dict[int, Mark] = {}  # address of a staying tile that is being read -> the same mark

    @abstractmethod
    def _fetch(self, index: int, tile: Tensor, free: Mark | None) -> Any:
        """Begin to fill a slot with tile `index`; the slot is free at the mark."""

    @abstractmethod
    def _arrived(self, coming: Any) -> Mark:
        """The mark at which the tile is in its slot; `coming` is what `_fetch` returned."""

    @abstractmethod
    def _dropped(self, coming: Any) -> Mark | None:
        """The mark at which the slot is free when the tile will not be read after all."""

    @abstractmethod
    def _store(self, index: int, tile: Tensor, stays: bool) -> Mark:
        """Begin to store tile `index`; its slot is free at the returned mark, unless the tile stays in it."""

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:
        if index in self._staying:
            tile, copied = self._staying.pop(index)
            if changed:
                self._engine.hold(copied)
            else:
                self._leaving[tile.data_ptr()] = copied
            return tile
        self.prefetch(index)
        tile, coming = self._arriving.pop(index)
        if toward:
            self.prefetch(index + toward)
        self._engine.hold(self._arrived(coming))
        return tile

    def prefetch(self, index: int) -> None:
        if index in self._arriving or index in self._staying or not 0 <= index < self.tiles.count:
            return
        tile, free = self._slots.take(self.tiles.rows_in(index))
        self._arriving[index] = tile, self._fetch(index, tile, free)

    def blank(self, index: int) -> Tensor:
        tile, free = self._slots.take(self.tiles.rows_in(index))
        self._engine.hold(free)
        return tile

    def write(self, index: int, tile: Tensor, again: bool = False) -> None:
        assert index not in self._arriving, "a tile is written while its old content is being fetched"
        assert tile.data_ptr() not in self._leaving, "a tile is written that was read as one that does not change"
        stays = again and self.tiles.count == 1
        copied = self._store(index, tile, stays)
        if stays:
            self._staying[index] = tile, copied
        else:
            self._slots.give(tile, copied)

    def release(self, tile: Tensor) -> None:
        if tile.data_ptr() in self._leaving:
            self._engine.hold(self._leaving.pop(tile.data_ptr()))
        if self._engine.poison:
            tile.fill_(torch.nan)
        self._slots.give(tile, self._engine.computed())

    def drop(self) -> None:
        for tile, coming in self._arriving.values():
            self._slots.give(tile, self._dropped(coming))
        for tile, copied in self._staying.values():
            self._slots.give(tile, copied)
        for waiting in (self._arriving, self._staying, self._leaving):
            waiting.clear()


class HostTape(_Memory, SlotTape):
    """One piece of host memory; tiles are copied to slots and back."""

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

    def _store(self, index: int, tile: Tensor, stays: bool) -> Mark:
        after = (self._engine.computed(),)
        self._written[index] = self._engine.copy_out(self.place(index), tile, after=after, stays=stays)
        return self._written[index]


class StandIn(HostTape):
    """A host or disk tape with memory for a few tiles only, which all tiles share. For rehearsals: values are wrong."""

    def place(self, index: int) -> Tensor:
        count, held = self.tiles.rows_in(index), len(self.memory) // self.tiles.size
        start = index % held * self.tiles.size
        part = self.memory[start : start + count]
        return part.flatten()[: count * math.prod(self._features)].view(count, *self._features)
