"""How fast the disks of tapes write and read, measured on the file that tapes would use."""

import math
import mmap
import os
import time
from collections.abc import Callable

from ithaca.tape.file import TapeFile

TILE = 32 * 2**20  # bytes of a write or read, for each folder


def write_and_read(file: TapeFile, size: int, seconds: float = math.inf) -> dict[str, float]:
    """Bytes a second of `write` and `read`, measured by one pass over the file that ends after `seconds`.

    The bytes are random, because a file system may compress other content.
    """
    tile = min(TILE * file.folders, size)
    memory = memoryview(mmap.mmap(-1, tile))
    memory[:] = os.urandom(tile)
    written = _pass(file.write, memory, size, seconds)
    read = _pass(file.read, memory, written[0], seconds)
    return {"write": written[0] / written[1], "read": read[0] / read[1]}


def _pass(move: Callable[[int, memoryview], None], memory: memoryview, size: int, seconds: float) -> tuple[int, float]:
    """Bytes that were moved, and the seconds that it took."""
    began, place = time.perf_counter(), 0
    while place < size and (place == 0 or time.perf_counter() - began < seconds):
        move(place, memory[: size - place])
        place = min(place + len(memory), size)
    return place, time.perf_counter() - began
