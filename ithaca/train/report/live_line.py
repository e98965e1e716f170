"""The live line of a long step: phase, layer and chunk that the device has come to, and the time left.

A thread of the rank that prints asks a few times a second which mark the device has passed (schedule/marks.py). It
never waits for the device. The time left follows from the time so far and the share of the step's work that is done: it
assumes that the rest goes on at the same rate. A short step shows nothing of this.
"""

import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from ithaca.base.sizes import format_clock
from ithaca.schedule.marks import OPTIMIZER, Reached, StepMarks
from ithaca.train.ranks.stop import write_error
from ithaca.train.report.report import Progress

POLL_SECONDS = 0.25
SHORT_SECONDS = 2.0  # a step shows its progress after this time
LEAST_SHARE = 0.01  # of a step's work: too early to estimate the time left


@dataclass(frozen=True)
class Estimate:
    """The seconds that are left of a step, as of a moment; None if it is too early to say."""

    reached: Reached
    at: float
    left: float | None

    @staticmethod
    def of(reached: Reached, now: float) -> "Estimate":
        share = reached.share()
        left = (now - reached.step.began) * (1 - share) / share if share >= LEAST_SHARE else None
        return Estimate(reached, now, left)

    def seconds(self, now: float) -> float | None:
        """Return the seconds that are left now."""
        return None if self.left is None else max(self.left - (now - self.at), 0.0)


class LiveLine:
    """A thread that shows the progress of a run's steps."""

    def __init__(self, marks: StepMarks, progress: Progress, device: torch.device):
        self._marks, self._progress, self._device = marks, progress, device
        self._estimate: Estimate | None = None
        self._notes: deque[str] = deque()  # lines to print above
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-line", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread would use the first GPU
        try:
            while not self._ended.wait(POLL_SECONDS):
                self._show_notes()
                self._look()
        except RuntimeError:
            self._ended.wait()  # a GPU that failed: the training thread reports it
        self._show_notes()

    def _show_notes(self) -> None:
        while self._notes:
            self._progress.show(self._notes.popleft())

    def announce(self, text: str) -> None:
        """Print a line soon, above the live line; without one, to stderr now. A signal's handler may call this."""
        self._notes.append(text) if self._progress.is_live else write_error(text)

    def _look(self) -> None:
        """Ask what the device has reached, and show it if the step is long."""
        reached, now = self._marks.last(), time.perf_counter()
        if reached is None:
            self._estimate = None
            return
        if now - reached.step.began < SHORT_SECONDS:
            return
        if self._estimate is None or self._estimate.reached is not reached:
            self._estimate = Estimate.of(reached, now)
        self._progress.place(self._line(self._estimate, now))

    def _line(self, estimate: Estimate, now: float) -> str:
        reached, progress = estimate.reached, self._progress
        number, passed = reached.step.number, now - reached.step.began
        text = f"Step {number}/{progress.steps}: {describe(reached)}; {format_clock(passed)} so far"
        left = estimate.seconds(now)
        if left is None:
            return text
        step_seconds = passed + left if progress.step_seconds is None else progress.step_seconds
        in_run = left + step_seconds * (progress.steps - number)
        return f"{text}, {format_clock(left)} left in the step, {format_clock(in_run)} in the run"

    def seconds_left(self) -> float | None:
        """Return the seconds that are left of a long step; None if none is under way or it is too early to say."""
        estimate = self._estimate
        if estimate is None or not self._marks.runs(estimate.reached.step):
            return None
        return estimate.seconds(time.perf_counter())

    def close(self) -> None:
        """End the thread, then forget all marks."""
        self._ended.set()
        self._thread.join()
        self._marks.close()


def describe(reached: Reached) -> str:
    """Return phase, pass, layer and chunk, as 'backward, pass 2 of 4, layer 12 of 32, chunk 40 of 160'.

    With head rounds also the round, as 'layer 12 of 32, heads 2 of 4, chunk 40 of 160'.
    """
    parts, work = [reached.phase], reached.work()
    passes, chunks = len(reached.step.passes), len(work.forward) // work.rounds
    if passes > 1 and reached.phase != OPTIMIZER:
        parts.append(f"pass {reached.number + 1} of {passes}")
    if reached.layer is not None:
        parts.append(f"layer {reached.layer + 1} of {work.layers}")
    if reached.chunk is not None:
        number, chunk = divmod(reached.chunk, chunks)
        if work.rounds > 1:
            parts.append(f"heads {number + 1} of {work.rounds}")
        parts.append(f"chunk {chunk + 1} of {chunks}")
    return ", ".join(parts)
