"""Ctrl-C, once: the step under way is finished and saved. Twice: stop at once.

SIGTERM, which cluster managers send before they take a machine away, counts as one Ctrl-C, and so does SIGHUP, which
comes when a terminal is closed, unless nohup had it ignored. Ranks get their signals at different moments, so they
agree at the end of each step whether one of them was asked to stop.
"""

import os
import signal
import sys
import time
from types import FrameType

import torch
import torch.distributed as dist

from ithaca.parallel.mesh import Mesh
from ithaca.train.report import tell

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 0.5  # a terminal signals every process, and torchrun passes on what it gets: both are one request


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that are requests to this process."""
    kept = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return SIGNALS if kept else SIGNALS[:-1]


class Requests:
    """Counts requests to stop by the signals that bring them."""

    def __init__(self) -> None:
        self.count, self._last = 0, -SAME_SECONDS

    def add(self, number: int) -> bool:
        """Whether this signal is a new request: not one that comes with another, nor a terminal closed after one."""
        now = time.monotonic()
        same, self._last = now - self._last <= SAME_SECONDS, now
        if same or (self.count and number == signal.SIGHUP):
            return False
        self.count += 1
        return True


class StopRequest:
    """Whether the run was asked to stop; installs its handlers in the main thread of a rank.

    A rank that a launcher of ours has started leaves the second request to it: the launcher kills its ranks then, and
    knows what came twice from what came over two ways.
    """

    def __init__(self, mesh: Mesh, launched: bool):
        self._mesh, self._launched, self._requests = mesh, launched, Requests()
        self._before = {number: signal.signal(number, self._handle) for number in heeded()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until a rank can handle them

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._requests.add(number):
            return
        if self._requests.count == 1:
            if self._mesh.first_on_node:
                tell("\nfinishing this step, then saving; Ctrl-C again stops at once", sys.stderr)
        elif not self._launched:
            if sys.stdout and sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # the live line hides the cursor
            os._exit(130)

    def close(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """True on every rank once one was asked. Collective."""
        asked = torch.tensor(self._requests.count)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._mesh.group)
        return bool(asked)
