"""Host memory for tapes and states: one region, cut into parts, registered with the driver once.

torch's pinned allocator rounds every tensor up to a power of two: 1.25 TiB of tapes would take 2. Registering is what
takes time (see docs/LOG.md), so threads first touch the pages, then register the parts. A copy must not cross the
border of a part, and none does: a tape lies within one.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ithaca.base.errors import RunError
from ithaca.base.sizes import format_bytes
from ithaca.tape.engine import Engine

STRIDE = 256 * 2**20  # what a thread touches at a time


def whole_pages(size: int) -> int:
    """What a part of a slab takes."""
    return size + -size % mmap.PAGESIZE


class Slab:
    """`parts[i]` is sizes[i] bytes of host memory; `say` is told how far it is."""

    def __init__(self, sizes: Sequence[int], device: torch.device, say: Callable[[str], None]):
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += whole_pages(size)
        self.nbytes = total
        # Private: shared memory would come from a tmpfs, with its own limits and small pages
        region = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them: small ones do, only slower to register
                region.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(region, dtype=torch.uint8)
        # Each with a storage of its own: what saves or copies one would otherwise take the whole region along
        self.parts = [_part(region, start, size) for start, size in zip(starts, sizes, strict=True)]
        self._device, self._registered = device, []
        if device.type == "cuda":
            try:
                self._register(memory, say)
            except BaseException:
                self.close()
                raise
        else:
            memory[:: mmap.PAGESIZE] = 0  # now, so that whoever asks how much is free does not count it twice

    def belong_to(self, owner: object, engine: Engine) -> weakref.finalize:
        """Close with the owner, or when what this gives is called: after the last copy from the memory or to it."""
        let_go = weakref.finalize(owner, _let_go, engine, self)
        let_go.atexit = False  # pyrefly: ignore
        return let_go

    def _register(self, memory: Tensor, say: Callable[[str], None]) -> None:
        cudart = torch.cuda.cudart()
        threads = min(os.cpu_count() or 1, 16)

        def touch(start: int) -> int:
            memory[start : start + STRIDE : mmap.PAGESIZE] = 0
            return min(STRIDE, len(memory) - start)

        def register(part: Tensor) -> int:
            with torch.cuda.device(self._device):
                code = int(cudart.cudaHostRegister(part.data_ptr(), part.nbytes, 0))  # pyrefly: ignore
            if code:
                raise RunError(
                    f"the driver does not register {format_bytes(part.nbytes)} of host memory (code {code}); "
                    "ulimit -l unlimited may help, or less on the host"
                )
            self._registered.append(part)
            return part.nbytes

        with ThreadPoolExecutor(threads) as pool:
            done = 0
            for share, work, items in (
                (0.5, touch, range(0, self.nbytes, STRIDE)),
                (0.5, register, [part for part in self.parts if part.nbytes]),
            ):
                for size in pool.map(work, items):
                    done += share * size
                    say(f"registering {format_bytes(self.nbytes)} of host memory: {100 * done / self.nbytes:.0f} %")

    def close(self) -> None:
        """Let the driver forget the memory, and give it back; no copy may be under way."""
        self.parts = []
        if not self._registered:
            return
        cudart = torch.cuda.cudart()
        for part in self._registered:
            cudart.cudaHostUnregister(part.data_ptr())  # pyrefly: ignore
        self._registered.clear()


def _part(region: mmap.mmap, start: int, size: int) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(region, dtype=torch.uint8, offset=start, count=size)


def _let_go(engine: Engine, slab: Slab) -> None:
    engine.settle()
    slab.close()
