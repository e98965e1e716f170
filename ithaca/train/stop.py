"""Ctrl-C, once: the step under way is finished and saved. Twice: stop at once.

SIGTERM, which cluster managers send before they take a machine away, counts as one Ctrl-C. Ranks get their signals at
different moments, so they agree at the end of each step whether one of them was asked to stop.
"""

import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist

from ithaca.parallel.mesh import Mesh

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 0.5  # a terminal signals every process, and the launcher passes on what it gets: both are one request


class StopRequest:
    """Whether the run was asked to stop; installs its handlers in the main thread of a rank."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._asked, self._last = mesh, 0, -SAME_SECONDS
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until a rank can handle them

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        again, self._last = now - self._last <= SAME_SECONDS, now
        if again:
            return
        self._asked += 1
        if self._asked > 1:
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # the live line hides the cursor
            os._exit(130)
        if self._mesh.first_on_node:
            print("\nfinishing this step, then saving; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """True on every rank once one was asked. Collective."""
        asked = torch.tensor(self._asked)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._mesh.group)
        return bool(asked)
