"""The file that holds a rank's disk tapes.

All of it is allocated before anything is written, so that the disk cannot run full later. It has no name, so that it
disappears with the process, however that ends.

Where the file system allows it, reads and writes bypass the page cache (O_DIRECT). The page cache would take the memory
that the tapes were to save, and a core for the copies. A tile is cut into parts for a few threads, because one thread
does not keep a fast disk busy (figures in docs/LOG.md).
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import BinaryIO

from ithaca.base.errors import PlanError, RunError
from ithaca.base.sizes import format_bytes
from ithaca.tape.spec import BLOCK

THREADS = 4
PART = 8 * 2**20  # bytes that a thread moves at a time; whole blocks


def free_space(folder: str) -> int:
    """Bytes that are free on the disk of a folder; raises PlanError if no file can be made there."""
    _open_nameless(folder).close()
    return shutil.disk_usage(folder).free


class TapeFile:
    """A file of `size` bytes on the disk of a folder. `direct` is True if it bypasses the page cache."""

    def __init__(self, folder: str, size: int):
        file = _open_nameless(folder)
        self._folder, self._file = folder, file.fileno()
        # Closed when the last reader or writer is gone
        self.close = weakref.finalize(self, file.close)
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as problem:
            free = format_bytes(shutil.disk_usage(folder).free)
            self.close()
            raise PlanError(
                f"plan.disk='{folder}' has no room for the {format_bytes(size)} of a rank's tapes ({problem.strerror}; "
                f"{free} are free): choose another folder, or a Plan with less on the disk"
            ) from None
        self.direct = _go_direct(self._file)
        self._threads = ThreadPoolExecutor(THREADS, "disk")

    def read(self, place: int, target: memoryview) -> None:
        self._move(os.preadv, "read from", place, target)

    def write(self, place: int, source: memoryview) -> None:
        self._move(os.pwritev, "written to", place, source)

    def _move(self, move: "_Move", done: str, place: int, memory: memoryview) -> None:
        parts = [
            self._threads.submit(_move_all, move, self._file, place + start, memory[start : start + PART])
            for start in range(0, len(memory), PART)
        ]
        wait(parts)  # for all: once one is seen to fail, the memory is used for something else
        try:
            for part in parts:
                part.result()
        except OSError as problem:
            raise RunError(
                f"{format_bytes(len(memory))} of a tape could not be {done} plan.disk='{self._folder}' "
                f"({problem.strerror}): try a folder on another disk"
            ) from None


_Move = Callable[[int, Sequence[memoryview], int], int]


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


def _go_direct(file: int) -> bool:
    """Whether reads and writes bypass the page cache now. Only trying tells whether the file system allows it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(file, [mmap.mmap(-1, BLOCK)], 0)  # some file systems accept the flag and refuse the write
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True
