"""The file that a rank's tapes on the disk lie in: all of it allocated before anything is written, and without a name,
so that it is gone with the process whatever ends that.

Where the file system allows it, reading and writing go around the page cache (O_DIRECT), which would take the memory
that tapes were moved away from, and a core to copy through. A tile is cut into parts for a few threads: one alone does
not keep a fast disk busy (figures in docs/LOG.md).
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
    """Bytes that are free on the disk of a folder, in which a file can be made."""
    _open_nameless(folder).close()
    return shutil.disk_usage(folder).free


class TapeFile:
    """`size` bytes on the disk of a folder. `direct`: they do not go through the page cache."""

    def __init__(self, folder: str, size: int):
        file = _open_nameless(folder)
        self._folder, self._file = folder, file.fileno()
        # With the last who reads or writes, however late that is
        self.close = weakref.finalize(self, file.close)
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as problem:
            free = format_bytes(shutil.disk_usage(folder).free)
            self.close()
            raise PlanError(
                f"plan.disk='{folder}' does not take the {format_bytes(size)} of a rank's tapes ({problem.strerror}; "
                f"{free} are free): less on the disk or another folder may"
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
        wait(parts)  # for all, since the memory has another use as soon as one of them is heard to fail
        try:
            for part in parts:
                part.result()
        except OSError as problem:
            raise RunError(
                f"{format_bytes(len(memory))} of a tape could not be {done} plan.disk='{self._folder}' "
                f"({problem.strerror}): a folder on another disk may serve"
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
            f"plan.disk='{folder}' is no folder in which a file can be made ({reason}): one that exists and can be "
            "written to is needed"
        ) from None


def _go_direct(file: int) -> bool:
    """Whether the file system reads and writes around the page cache, found by trying."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(file, [mmap.mmap(-1, BLOCK)], 0)  # some agree, and then refuse this
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True
