"""Tapes on the disk. Tiles pass through the same slots as those of host tapes, and through a few pieces of registered
host memory, the staging:

    written    slot -> staging, beside the computation -> file, by a thread when that copy is done
    read       file -> staging, by a thread when what was written there last is in the file -> slot

Every copy to the device or from it is queued by the thread that computes, so that marks are the engine's own and mean
the same to all tapes. The price is that it waits, on the host, for a tile that is read before the disk has brought it,
and for staging where all of it is in use: where the disk is behind. On a GPU the host runs ahead of the computation by
about the staging's length, so that copies and the disk still work beside it.

Nothing waits for ever: a use of the staging waits only for copies and uses that were queued before it.
What a thread meets is raised by the next call that takes staging, or reads that tile.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from torch import Tensor

from ithaca.base.errors import RunError
from ithaca.base.tiles import Tiles
from ithaca.tape.engine import Engine, Mark
from ithaca.tape.file import TapeFile
from ithaca.tape.spec import Stretch, whole_blocks
from ithaca.tape.tape import Slots, SlotTape


class _Use(Protocol):
    """What a piece of staging is in use for."""

    future: Future[None]  # the disk's part of it

    @property
    def over(self) -> bool: ...

    def finish(self) -> None:
        """Wait until it is over; raises what the disk met."""
        ...


class _Piece:
    """A tile of staging."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.use: _Use | None = None
        self._view = memory.numpy().data

    def shaped(self, tile: Tensor) -> Tensor:
        return self.memory[: tile.nbytes].view(tile.dtype).view(tile.shape)

    def blocks(self, tile: Tensor) -> memoryview:
        """What goes to the disk for a tile: it, and what fills its last block."""
        return self._view[: whole_blocks(tile.nbytes)]


class Disk:
    """A file, the staging in front of it, and a thread for each direction that keeps the order of what is asked."""

    def __init__(self, file: TapeFile, staging: Sequence[Tensor], engine: Engine):
        self._file, self._engine = file, engine
        self._pieces = [_Piece(memory) for memory in staging]  # the one that was taken first comes first
        self._in, self._out = ThreadPoolExecutor(1, "disk-in"), ThreadPoolExecutor(1, "disk-out")
        self._written: dict[int, Future[None]] = {}  # by place in the file: tapes that lend each other theirs share it

    def fetch(self, place: int, tile: Tensor, free: Mark | None) -> "Fetching":
        """Begin to bring what lies at a place in the file to a slot that is free at a mark."""
        piece = self._take()
        before = self._written.get(place)
        read = self._in.submit(_read, self._engine, self._file, place, piece.blocks(tile), before)
        fetching = Fetching(self._engine, read, piece.shaped(tile), tile, free)
        piece.use = fetching
        return fetching

    def store(self, place: int, tile: Tensor) -> Mark:
        """Begin to take a tile, as it is computed so far, to a place in the file; its slot is free at the mark."""
        piece = self._take()
        copied = self._engine.copy_out(piece.shaped(tile), tile, after=(self._engine.computed(),))
        written = self._out.submit(_write, self._engine, self._file, place, piece.blocks(tile), copied)
        piece.use, self._written[place] = _Storing(written), written
        return copied

    def _take(self) -> _Piece:
        """A piece that is free; where none is, the one that was taken first, when it is."""
        for piece in self._pieces:
            if piece.use is not None and piece.use.over:
                _free(piece)
        piece = next((piece for piece in self._pieces if piece.use is None), self._pieces[0])
        _free(piece)
        self._pieces.remove(piece)
        self._pieces.append(piece)
        if self._engine.poison:
            piece.memory.fill_(255)  # every number NaN
        return piece

    def settle(self) -> None:
        """Wait until no thread is at work, and forget what they met: the pass that they worked for broke off."""
        wait([piece.use.future for piece in self._pieces if piece.use is not None])
        for piece in self._pieces:
            piece.use = None
        self._written.clear()

    def close(self) -> None:
        """Give the file back; what is still to be written is not."""
        for lane in (self._in, self._out):
            lane.shutdown(cancel_futures=True)
        self._file.close()


def _free(piece: _Piece) -> None:
    if piece.use is not None:
        piece.use.finish()
        piece.use = None


def _read(engine: Engine, file: TapeFile, place: int, target: memoryview, before: Future[None] | None) -> None:
    if before is not None:
        before.result()
    if engine.before_disk:
        engine.before_disk()
    file.read(place, target)


def _write(engine: Engine, file: TapeFile, place: int, source: memoryview, copied: Mark) -> None:
    engine.wait(copied)
    if engine.before_disk:
        engine.before_disk()
    file.write(place, source)


def _end(future: Future[None]) -> None:
    """Wait for the disk. What it met is raised anew: the future keeps its own, which would come to hold the frames that
    it goes through, and with them the pass that breaks off."""
    problem = future.exception()
    if isinstance(problem, RunError):
        raise RunError(str(problem))
    if problem is not None:
        raise RuntimeError("a thread of the disk has failed") from problem


class _Storing:
    def __init__(self, written: Future[None]):
        self.future = written

    @property
    def over(self) -> bool:
        return self.future.done()

    def finish(self) -> None:
        _end(self.future)


class Fetching:
    """A tile on its way from the disk to a slot."""

    def __init__(self, engine: Engine, read: Future[None], staged: Tensor, tile: Tensor, free: Mark | None):
        self.future = read
        self._engine, self._staged, self._tile, self._free = engine, staged, tile, free
        self._arrived: Mark | None = None
        self._dropped = False

    def wait(self) -> Mark:
        """The mark at which the tile is in its slot; known when the disk has brought it."""
        if self._arrived is None:
            _end(self.future)
            self._arrived = self._engine.copy_in(self._tile, self._staged, after=(self._free,))
        return self._arrived

    def drop(self) -> Mark | None:
        """Nobody reads the tile any more: the mark at which its slot is free."""
        self._dropped = self._arrived is None
        return self._free if self._dropped else self._arrived

    @property
    def over(self) -> bool:
        if self._dropped:
            return self.future.done()
        return self._arrived is not None and self._engine.reached(self._arrived)

    def finish(self) -> None:
        if self._dropped:
            wait([self.future])
        else:
            self._engine.wait(self.wait())


class DiskTape(SlotTape):
    """Of whatever features its slots have: a tape whose tiles need no more room than another's can have its stretch."""

    def __init__(self, disk: Disk, stretch: Stretch, tiles: Tiles, slots: Slots):
        super().__init__(tiles, slots)
        self.disk, self.stretch = disk, stretch

    def _fetch(self, index: int, tile: Tensor, free: Mark | None) -> Fetching:
        return self.disk.fetch(self.stretch.place(index), tile, free)

    def _arrived(self, coming: Fetching) -> Mark:
        return coming.wait()

    def _store(self, index: int, tile: Tensor) -> Mark:
        return self.disk.store(self.stretch.place(index), tile)

    def _dropped(self, coming: Fetching) -> Mark | None:
        return coming.drop()
