"""Host memory for tapes and optimizer states: one region, cut into parts, registered with the CUDA driver once.

torch's pinned allocator rounds every tensor up to a power of two: 1.25 TiB of tapes would take 2 TiB. Registering takes
most of the time (see docs/LOG.md), so several threads touch the pages first and register the parts then. A copy must
not cross the border between two parts; each tape lies within one part, so none does.
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

STRIDE = 256 * 2**20  # bytes that a thread touches at a time


def whole_pages(size: int) -> int:
    """The bytes that a part of a slab takes: `size`, rounded up to whole pages."""
    return size + -size % mmap.PAGESIZE


class Slab:
    """Host memory whose `parts[i]` has `sizes[i]` bytes. `say` is called with the progress of registering."""

    def __init__(self, sizes: Sequence[int], device: torch.device, say: Callable[[str], None]):
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += whole_pages(size)
        self.nbytes = total
        # Private: shared memory would come from a tmpfs, with its own limits and small pages
        region = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones are slower to register
                region.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(region, dtype=torch.uint8)
        # Each part has a storage of its own: saving or copying one would otherwise take the whole region along
        self.parts = [_part(region, start, size) for start, size in zip(starts, sizes, strict=True)]
        self._device, self._registered = device, []
        if device.type == "cuda":
            try:
                self._register(memory, say)
            except BaseException:
                self.close()
                raise
        else:
            memory[:: mmap.PAGESIZE] = 0  # touch the pages now, so that they no longer count as free memory

    def belong_to(self, owner: object, engine: Engine) -> weakref.finalize:
        """Close the slab when the owner is freed or the result is called, after the last copy has ended."""
        close = weakref.finalize(owner, _close, engine, self)
        close.atexit = False  # pyrefly: ignore
        return close

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
                    f"the CUDA driver cannot register {format_bytes(part.nbytes)} of host memory (code {code}): "
                    "try `ulimit -l unlimited`, or a Plan that keeps less in host memory"
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
        """Unregister the memory and free it. No copy may be under way."""
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


def _close(engine: Engine, slab: Slab) -> None:
    engine.settle()
    slab.close()
