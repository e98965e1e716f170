"""Tapes on the disk. Tiles pass through slots, as those of host tapes do, and through staging: pieces of host memory.

    write    slot -> staging, beside the computation; then staging -> file, by a thread
    read     file -> staging, by a thread, after the last write to that place; then staging -> slot

The thread that computes queues every copy to or from the device, so that marks mean the same as for other tapes. The
price: it waits on the host when it reads a tile that the disk has not brought yet, and when all staging is in use. Both
happen only if the disk is slower than the computation. On a GPU the host runs ahead of the computation by about the
length of the staging, so that copies and the disk still overlap with it.

There is no deadlock: a use of staging waits only for copies and uses that were queued before it. An error of a disk
thread is raised by the next call that takes staging or reads that tile.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from torch import Tensor

from ithaca.base.errors import RunError
from ithaca.base.tiles import Tiles
from ithaca.tape.engine import DISK_READ, DISK_WRITE, Engine, Mark
from ithaca.tape.file import TapeFile
from ithaca.tape.spec import Stretch, whole_blocks
from ithaca.tape.tape import Slots, SlotTape


class _Use(Protocol):
    """A read or a write that a piece of staging is used for."""

    future: Future[None]  # the disk's part

    @property
    def over(self) -> bool: ...

    def finish(self) -> None:
        """Wait until the use is over; raises an error of the disk."""
        ...


class _Piece:
    """A piece of staging, for one tile."""

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.use: _Use | None = None
        self._view = memory.numpy().data

    def shaped(self, tile: Tensor) -> Tensor:
        return self.memory[: tile.nbytes].view(tile.dtype).view(tile.shape)

    def blocks(self, tile: Tensor) -> memoryview:
        """The bytes that go to the disk for a tile, up to the end of its last block."""
        return self._view[: whole_blocks(tile.nbytes)]


class Disk:
    """A file, the staging in front of it, and one thread for each direction, which keeps the order of requests."""

    def __init__(self, file: TapeFile, staging: Sequence[Tensor], engine: Engine):
        self._file, self._engine = file, engine
        self._pieces = [_Piece(memory) for memory in staging]  # in the order in which they were taken
        self._in, self._out = ThreadPoolExecutor(1, "disk-in"), ThreadPoolExecutor(1, "disk-out")
        self._written: dict[int, Future[None]] = {}  # by place in the file; tapes that share a stretch share places

    def fetch(self, place: int, tile: Tensor, free: Mark | None) -> "Fetching":
        """Begin to read a tile from a place in the file into a slot, which is free at the mark."""
        piece = self._take(tile)
        before = self._written.get(place)
        read = self._in.submit(_read, self._engine, self._file, place, piece.blocks(tile), before)
        fetching = Fetching(self._engine, read, piece.shaped(tile), tile, free)
        piece.use = fetching
        return fetching

    def store(self, place: int, tile: Tensor, stays: bool) -> Mark:
        """Begin to write a tile to a place in the file; its slot is free at the returned mark, unless it stays."""
        piece = self._take(tile)
        copied = self._engine.copy_out(piece.shaped(tile), tile, after=(self._engine.computed(),), stays=stays)
        written = self._out.submit(_write, self._engine, self._file, place, piece.blocks(tile), copied)
        piece.use, self._written[place] = _Storing(written), written
        return copied

    def _take(self, tile: Tensor) -> _Piece:
        """The smallest free piece of staging for a tile. If none is free, wait for the one that was taken first."""
        for piece in self._pieces:
            if piece.use is not None and piece.use.over:
                _free(piece)
        fitting = [piece for piece in self._pieces if len(piece.memory) >= whole_blocks(tile.nbytes)]
        free = (piece for piece in fitting if piece.use is None)
        piece = min(free, key=lambda piece: len(piece.memory), default=fitting[0])
        _free(piece)
        self._pieces.remove(piece)
        self._pieces.append(piece)
        if self._engine.poison:
            piece.memory.fill_(255)  # NaN in every dtype
        return piece

    def settle(self) -> None:
        """After a pass was interrupted: wait until no thread is at work, and forget their errors."""
        wait([piece.use.future for piece in self._pieces if piece.use is not None])
        for piece in self._pieces:
            piece.use = None
        self._written.clear()

    def close(self) -> None:
        """Close the file. Tiles that are still to be written are dropped."""
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
    with engine.watch(DISK_READ):
        file.read(place, target)


def _write(engine: Engine, file: TapeFile, place: int, source: memoryview, copied: Mark) -> None:
    engine.wait(copied)
    if engine.before_disk:
        engine.before_disk()
    with engine.watch(DISK_WRITE):
        file.write(place, source)


def _end(future: Future[None]) -> None:
    """Wait for the disk and raise its error, if any, as a new one.

    The future keeps its own error, which would collect the frames that it passes and keep the broken pass alive.
    """
    problem = future.exception()
    if isinstance(problem, RunError):
        raise RunError(str(problem))
    if problem is not None:
        raise RuntimeError("a disk thread failed") from problem


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
        """The mark at which the tile is in its slot. Blocks until the disk has read it."""
        if self._arrived is None:
            _end(self.future)
            self._arrived = self._engine.copy_in(self._tile, self._staged, after=(self._free,))
        return self._arrived

    def drop(self) -> Mark | None:
        """Do not wait for the tile any more; returns the mark at which its slot is free."""
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
    """A tape in a stretch of the file. Two tapes can share a stretch if the tiles of both fit into its strides."""

    def __init__(self, disk: Disk, stretch: Stretch, tiles: Tiles, slots: Slots):
        super().__init__(tiles, slots)
        self.disk, self.stretch = disk, stretch

    def _fetch(self, index: int, tile: Tensor, free: Mark | None) -> Fetching:
        return self.disk.fetch(self.stretch.place(index), tile, free)

    def _arrived(self, coming: Fetching) -> Mark:
        return coming.wait()

    def _store(self, index: int, tile: Tensor, stays: bool) -> Mark:
        return self.disk.store(self.stretch.place(index), tile, stays)

    def _dropped(self, coming: Fetching) -> Mark | None:
        return coming.drop()
