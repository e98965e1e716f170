"""The file that holds a rank's disk tapes, striped over one or several folders.

All of it is allocated before anything is written, so that a disk cannot run full later. Its parts have no name, so that
they disappear with the process, however that ends.

Bytes go to the folders in turn, a stripe at a time: each tile uses all disks, and all disks hold the same share.
Where the file system allows it, reads and writes bypass the page cache (O_DIRECT). The page cache would take the memory
that the tapes were to save, and a core for the copies. A stripe is a thread's work; every folder has a few threads of
its own, because one thread does not keep a fast disk busy (figures in docs/LOG.md), and a slow disk must not take the
threads of another.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import BinaryIO

from ithaca.base.errors import PlanError, RunError
from ithaca.base.sizes import format_bytes
from ithaca.tape.spec import BLOCK

THREADS = 4  # of each folder
PART = 8 * 2**20  # bytes that a thread moves at a time; whole blocks


def shares(size: int, folders: int) -> list[int]:
    """Bytes of each folder's part of a file of `size` bytes."""
    stripes, rest = divmod(size, PART)
    each, more = divmod(stripes, folders)
    return [each * PART + (PART if folder < more else rest if folder == more else 0) for folder in range(folders)]


def free_space(folder: str) -> int:
    """Bytes that are free on the disk of a folder; raises PlanError if no file can be made there."""
    _open_nameless(folder).close()
    return shutil.disk_usage(folder).free


class TapeFile:
    """A file of `size` bytes on the disks of some folders. `direct` is True if it bypasses the page cache."""

    def __init__(self, folders: tuple[str, ...], size: int):
        self._stripe = PART
        self._parts: list[_Part] = []
        try:
            for folder, share in zip(folders, shares(size, len(folders)), strict=True):
                self._parts.append(_Part(folder, share))
        except PlanError:
            self.close()
            raise
        self.direct = all(part.direct for part in self._parts)
        self.folders = len(folders)

    def read(self, place: int, target: memoryview) -> None:
        self._move(os.preadv, "read from", place, target)

    def write(self, place: int, source: memoryview) -> None:
        self._move(os.pwritev, "written to", place, source)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _move(self, move: "_Move", done: str, place: int, memory: memoryview) -> None:
        moving = [(part, part.begin(move, where, piece)) for part, where, piece in self._pieces(place, memory)]
        # For all: after the first error is raised, the memory may be used for something else
        wait([future for _, future in moving])
        for part, future in moving:
            try:
                future.result()
            except OSError as problem:
                raise RunError(
                    f"{format_bytes(len(memory))} of a tape could not be {done} plan.disk='{part.folder}' "
                    f"({problem.strerror}): try a folder on another disk"
                ) from None

    def _pieces(self, place: int, memory: memoryview) -> "Iterator[tuple[_Part, int, memoryview]]":
        """For each stripe of the memory: the folder's part of the file, the offset in it, and the stripe's memory."""
        while len(memory):
            stripe, within = divmod(place, self._stripe)
            turn, number = divmod(stripe, len(self._parts))
            size = min(self._stripe - within, len(memory))
            yield self._parts[number], turn * self._stripe + within, memory[:size]
            place, memory = place + size, memory[size:]


_Move = Callable[[int, Sequence[memoryview], int], int]


class _Part:
    """The part of a file in one folder."""

    def __init__(self, folder: str, size: int):
        file = _open_nameless(folder)
        self.folder, self.file = folder, file.fileno()
        # Closed when the last reader or writer is gone
        self.close = weakref.finalize(self, file.close)
        try:
            if size:  # posix_fallocate refuses 0 bytes
                os.posix_fallocate(self.file, 0, size)
        except OSError as problem:
            free = format_bytes(shutil.disk_usage(folder).free)
            self.close()
            raise PlanError(
                f"plan.disk='{folder}' has no room for the {format_bytes(size)} of a rank's tapes ({problem.strerror}; "
                f"{free} are free): choose another folder, or a Plan with less on the disk"
            ) from None
        self.direct = _set_direct(self.file)
        self._threads = ThreadPoolExecutor(THREADS, "disk")

    def begin(self, move: _Move, place: int, memory: memoryview) -> Future[None]:
        return self._threads.submit(_move_all, move, self.file, place, memory)


def _move_all(move: _Move, file: int, place: int, memory: memoryview) -> None:
    while len(memory):
        moved = move(file, [memory], place)
        if not moved:
            raise OSError(None, "the file has ended")
        memory, place = memory[moved:], place + moved


def _open_nameless(folder: str) -> BinaryIO:
    try:
        return tempfile.TemporaryFile(dir=folder, buffering=0)  # pyrefly: ignore
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise PlanError(
            f"plan.disk='{folder}' is not a folder that a file can be made in ({reason}): name one that exists and is "
            "writable"
        ) from None


def _set_direct(file: int) -> bool:
    """Set O_DIRECT if the file system allows it; return whether it does. Only trying a write can tell."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(file, [mmap.mmap(-1, BLOCK)], 0)  # some file systems accept the flag and refuse the write
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True
