"""Stopping a run: the first Ctrl-C finishes the step and saves, the second one stops at once.

SIGTERM, which cluster managers send before they take a machine away, counts as a Ctrl-C. So does SIGHUP, which a closed
terminal sends, unless nohup made the process ignore it. Ranks get signals at different moments, so they agree at the
end of each step whether one of them was asked to stop.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from ithaca.base.sizes import format_clock
from ithaca.parallel.mesh import Mesh

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 0.5  # a terminal signals every process and torchrun forwards its own signal: together one request


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop."""
    kept = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return SIGNALS if kept else SIGNALS[:-1]


class Requests:
    """Counts requests to stop. Signals that come together are one request."""

    def __init__(self) -> None:
        self.count, self._last = 0, -SAME_SECONDS

    def add(self, number: int) -> bool:
        """Return whether this signal is a new request. A terminal that closes after a request makes none."""
        now = time.monotonic()
        same, self._last = now - self._last <= SAME_SECONDS, now
        if same or (self.count and number == signal.SIGHUP):
            return False
        self.count += 1
        return True


def show_cursor() -> None:
    """Show the terminal's cursor again, which the live line hides."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")


def write_error(text: str) -> None:
    """Write a line to stderr past Python's streams: a signal may come while its thread writes to one of them."""
    with contextlib.suppress(OSError):  # the reader may be gone
        os.write(2, f"\n{text}\n".encode(errors="backslashreplace"))


class StopRequest:
    """Whether a user has asked the run to stop. Installs signal handlers in the main thread of a rank.

    A rank that our launcher started ignores the second request: the launcher kills its ranks then.

    seconds_left   those of the step, if they are known
    ending         what a second request did, and what is left of the run
    say            shows the answer to the first request

    They run in a signal's handler, so they must not write to Python's streams.
    """

    def __init__(
        self,
        mesh: Mesh,
        launched: bool,
        seconds_left: Callable[[], float | None] = lambda: None,
        ending: Callable[[], str] = lambda: "Stopped at once.",
        say: Callable[[str], None] = write_error,
    ):
        self._mesh, self._launched, self._requests = mesh, launched, Requests()
        self._seconds_left, self._ending, self._say = seconds_left, ending, say
        self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher blocks them until a rank has its handlers

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self._requests.add(number):
            return
        if self._requests.count == 1:
            if self._mesh.first_on_node:
                left = self._seconds_left()
                when = "" if left is None else f" (about {format_clock(left)} left)"
                self._say(f"Finishing this step{when}, then saving. Ctrl-C again stops at once.")
        elif not self._launched:
            ending = self._ending()
            show_cursor()
            if self._mesh.first_on_node:
                write_error(ending)
            os._exit(130)

    def ask(self) -> None:
        """Ask all ranks to stop, from within the run."""
        self._requests.count = max(self._requests.count, 1)

    def ignore(self) -> None:
        """Ignore signals from now on. A rank that has lost another one finds out which, also if torchrun ends it."""
        for number in self._before:
            signal.signal(number, lambda *_: None)
        self._before = {}

    def close(self) -> None:
        """Restore the signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Return True on every rank if one was asked to stop. Collective."""
        asked = torch.tensor(self._requests.count)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self._mesh.group)
        return bool(asked)
