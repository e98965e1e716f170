"""A memory meter that keeps a log: all bytes that come and go in a step, with time, owner, shape and source line.

The log is replayed after the step (timeline.py). Nothing of it is thinned out while the step runs, so the peak and the
tensors that are alive at it are exact.

    cost   a look at the Python stack for each new storage, some ten microseconds of the host, and about 200 bytes of
           host memory for each change. It slows the host down, so lanes are recorded in another step (record.py)
"""

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from ithaca.rehearsal.memory_meter import Meter

PACKAGE = str(Path(__file__).parent.parent) + "/"
WATCHING = tuple(f"{PACKAGE}{name}" for name in ("profile/", "rehearsal/memory_meter.py", "base/", "cli.py"))
FindOperation = Callable[[Iterable[CodeType]], str | None]
PLACES = 3  # lines of Ithaca that are kept for an allocation, the innermost first


@dataclass(frozen=True)
class Allocation:
    """The first tensor of a storage, and where it was made."""

    shape: tuple[int, ...]
    dtype: str
    places: tuple[str, ...]  # lines below ithaca/, as 'model/linear.py:81 linears', the innermost first
    operation: str | None  # the part of a block that made it (operations.py)
    before: bool  # whether it was there before the step


@dataclass(frozen=True)
class Change:
    """An owner's bytes of one storage grew or shrank."""

    seconds: float  # since the step began, on the host's clock
    number: int  # of the storage, in order of appearance
    owner: str
    size: int


class MemoryLog(Meter):
    """Bytes by owner, with everything that led to them since the last restart."""

    def __init__(self, device: torch.device, dtype: torch.dtype, find_operation: FindOperation):
        """`find_operation` finds the operation on the stack (operations.py)."""
        super().__init__(device, dtype)
        self.changes: list[Change] = []
        self.allocations: list[Allocation] = []
        self.held: dict[int, tuple[str, int]] = {}  # storages that were there at the restart: owner and bytes
        self._find_operation, self._numbers = find_operation, dict[int, int]()
        self._began, self._in_step = 0.0, False

    def restart(self) -> None:
        super().restart()
        self.changes.clear()
        self.held = {self._numbers[key]: found for key, found in self._live.items()}
        self._began, self._in_step = time.perf_counter(), True

    def __exit__(self, *problem: Any) -> None:
        self._in_step = False  # what the step leaves behind is freed later, and belongs to no step
        super().__exit__(*problem)

    def now_seconds(self) -> float:
        """Seconds since the restart, the clock of the log."""
        return time.perf_counter() - self._began

    def _appeared(self, key: int, tensor: Tensor) -> None:
        places, operation = self._look(sys._getframe(1))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._numbers[key] = len(self.allocations)
        self.allocations.append(Allocation(tuple(tensor.shape), dtype, places, operation, not self._in_step))

    def _changed(self, key: int, owner: str, size: int) -> None:
        if self._in_step and size:
            self.changes.append(Change(self.now_seconds(), self._numbers[key], owner, size))

    def _look(self, frame: FrameType | None) -> tuple[tuple[str, ...], str | None]:
        """Return the innermost lines of Ithaca on the stack, and the operation that runs."""
        places: list[str] = []
        codes: list[CodeType] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(WATCHING):
                codes.append(code)
                if len(places) < PLACES:
                    name = code.co_filename.removeprefix(PACKAGE)
                    places.append(f"{name}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return tuple(places), self._find_operation(codes)
