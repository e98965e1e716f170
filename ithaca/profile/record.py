"""Records a step twice: once with a log of its memory, and once under torch's profiler for its lanes and its trace.

The log looks at the Python stack of every allocation and slows the host down, so the two never watch the same step.
torch's profiler slows the host by a few microseconds an operation; the seconds of a step that nothing watches stand
beside its own.
"""

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ithaca.profile.lanes import STEP, Event, Lanes, Threads, read_lanes, thread_events
from ithaca.rehearsal.kernel_bound import synchronize
from ithaca.schedule.marks import Mark, PassWork, StepMarks
from ithaca.tape.engine import Engine

CLOCK = "ithaca: clock"  # a range that gives the offset of the trace's clock from the host's
QUIET = "6"  # torch's profiler would print a line at its start and at its end
LARGE = 8 << 20  # bytes of a trace that is compressed


class Phases(StepMarks):
    """Notes when each part of a pass begins, on a clock, and passes each mark on to `inner`."""

    def __init__(self, clock: Callable[[], float], inner: StepMarks | None = None):
        super().__init__(None)
        self.found: list[dict[str, Any]] = []
        self._clock, self._inner = clock, inner

    def step(self, number: int, passes: Sequence[float]) -> AbstractContextManager[None]:
        return self._inner.step(number, passes) if self._inner else super().step(number, passes)

    def begin_pass(self, work: Callable[[], PassWork]) -> Mark:
        further = self._inner.begin_pass(work) if self._inner else None

        def mark(phase: str, layer: int | None = None, chunk: int | None = None) -> None:
            if further:
                further(phase, layer, chunk)
            self._note(phase, layer)

        return mark

    def mark(self, phase: str) -> None:
        if self._inner:
            self._inner.mark(phase)
        self._note(phase, None)

    def _note(self, phase: str, layer: int | None) -> None:
        last = self.found[-1] if self.found else {}
        if (last.get("phase"), last.get("layer")) != (phase, layer):  # chunks of a layer are not told apart
            self.found.append({"seconds": self._clock(), "phase": phase, "layer": layer})


class Recording:
    """The trace of one step, when it is over."""

    def __init__(self) -> None:
        self.trace: dict[str, Any] = {}

    @property
    def lanes(self) -> Lanes:
        return read_lanes(self.trace["traceEvents"])

    def write(self, folder: Path) -> Path:
        """Write the trace for Perfetto, compressed if it is large; return the file."""
        text = json.dumps(self.trace, separators=(",", ":")).encode()
        for name in ("trace.json", "trace.json.gz"):
            (folder / name).unlink(missing_ok=True)
        file = folder / ("trace.json.gz" if len(text) > LARGE else "trace.json")
        file.write_bytes(gzip.compress(text, 6) if len(text) > LARGE else text)
        return file


@contextmanager
def record_lanes(device: torch.device, engine: Engine) -> Iterator[Recording]:
    """Record the body, which is one step, with torch's profiler and the threads of the engine."""
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    recording, threads, before = Recording(), Threads(), engine.watch
    engine.watch = threads.watch
    try:
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]) as profiled:
            with record_function(CLOCK):
                pass  # the first range takes longer than the others
            clock = perf_counter()
            with record_function(CLOCK):
                pass
            with record_function(STEP):
                yield recording
                synchronize(device)
    finally:
        engine.watch = before
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(file))
        recording.trace = json.loads(file.read_text(encoding="utf-8"))
    recording.trace["traceEvents"] += _thread_events(recording.trace["traceEvents"], threads, clock)


def _thread_events(events: list[Event], threads: Threads, clock: float) -> list[Event]:
    """The work of the engine's threads on the trace's clock."""
    ranges = [event for event in events if event.get("name") == CLOCK and event.get("cat") == "user_annotation"]
    last = max(ranges, key=lambda event: event["ts"])
    return thread_events(threads, last["ts"] - clock * 1e6, last["pid"])
