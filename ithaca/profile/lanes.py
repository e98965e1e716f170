"""Lanes of a step, from the Chrome trace of torch's profiler: what computes, sends and copies when.

    compute    on a GPU its kernels, with fills and copies within its memory; on a CPU torch's operations
    exchange   kernels of NCCL, messages of gloo, or copies that stand for them in a rehearsal (parallel/loopback.py)
    host       copies between the device and host memory; on a CPU by the threads of its engine (tape/engine.py)
    disk       reads and writes of tapes, by threads

A lane is busy while at least one of its operations runs, and idle for the rest of the step. `exposed` is the part of
its busy time in which nothing computes: what the step waits for. On a GPU `device` is computing and exchange together;
its idle share is that of the GPU.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ithaca.parallel.loopback import MARK
from ithaca.profile.spans import Span, clipped, covered, overlap, union
from ithaca.tape.engine import COPY_IN, COPY_OUT, DISK_READ, DISK_WRITE

COMPUTE, EXCHANGE, HOST, DISK, DEVICE = "compute", "exchange", "host copies", "disk", "device"
STEP = "ithaca: step"  # the range of the step in the trace
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
THREAD_LANES = {COPY_IN: HOST, COPY_OUT: HOST, DISK_READ: DISK, DISK_WRITE: DISK}
LONGEST = 8  # operations of a lane that are named
NAME = 100  # characters of an operation's name

Event = dict[str, Any]  # of a Chrome trace; times in microseconds


@dataclass(frozen=True)
class Lanes:
    """The step's span, and what runs in each lane: (name, span), in microseconds of the trace's clock."""

    step: Span
    work: dict[str, list[tuple[str, Span]]]

    @property
    def seconds(self) -> float:
        return (self.step[1] - self.step[0]) / 1e6

    def spans(self, lane: str) -> list[Span]:
        return union(span for _, span in self.work[lane])


class Threads:
    """The work of threads that torch's profiler does not see, on the host's clock."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self.found: list[tuple[str, float, float]] = []
        self._clock = clock

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Time the body; `Engine.watch` takes it."""
        began = self._clock()
        try:
            yield
        finally:
            self.found.append((what, began, self._clock()))


def thread_events(threads: Threads, offset: float, process: Any) -> list[Event]:
    """Return the work of threads as events of a trace. `offset`: microseconds from the host's clock to the trace's."""
    return [
        {
            "ph": "X",
            "cat": "ithaca_thread",
            "name": what,
            "pid": process,
            "tid": f"ithaca {what}",
            "ts": began * 1e6 + offset,
            "dur": (ended - began) * 1e6,
        }
        for what, began, ended in threads.found
    ]


def read_lanes(events: Iterable[Event]) -> Lanes:
    """Return the lanes of a trace in which one step ran under the name `STEP`."""
    complete = [event for event in events if event.get("ph") == "X"]
    step = next(span_of(event) for event in complete if event["name"] == STEP and event.get("cat") == "user_annotation")
    gpu = [event for event in complete if event.get("cat") in ON_GPU]
    work: dict[str, list[tuple[str, Span]]] = {COMPUTE: [], EXCHANGE: [], HOST: [], DISK: []}
    if gpu:
        # The host leaves the step before the GPU finishes it, unless it waited; the step ends with its last operation
        step = step[0], max(step[1], *(span_of(event)[1] for event in gpu))
        looped = _launched_within(complete, MARK)
        for event in gpu:
            work[_gpu_lane(event, looped)].append((event["name"][:NAME], span_of(event)))
    else:
        _read_cpu(complete, work)
    for event in complete:
        if event.get("cat") == "ithaca_thread" and not (gpu and event["name"] in (COPY_IN, COPY_OUT)):
            work[THREAD_LANES[event["name"]]].append((event["name"], span_of(event)))
    inside = {
        lane: [(name, span) for name, whole in found for span in clipped([whole], step)] for lane, found in work.items()
    }
    return Lanes(step, inside)


def span_of(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _gpu_lane(event: Event, looped: set[Any]) -> str:
    name = event["name"]
    if "nccl" in name.lower() or event.get("args", {}).get("correlation") in looped:
        return EXCHANGE
    return HOST if event.get("cat") == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name) else COMPUTE


def _launched_within(events: list[Event], mark: str) -> set[Any]:
    """Correlations of what the host launched within ranges of this name."""
    ranges: dict[Any, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == mark:
            ranges[event["tid"]].append(span_of(event))
    sorted_ranges = {thread: union(spans) for thread, spans in ranges.items()}
    return {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
        and _within(event["ts"], sorted_ranges.get(event["tid"], []))
    }


def _within(moment: float, spans: list[Span]) -> bool:
    index = bisect_right(spans, (moment, float("inf"))) - 1
    return index >= 0 and spans[index][0] <= moment <= spans[index][1]


def _read_cpu(events: list[Event], work: dict[str, list[tuple[str, Span]]]) -> None:
    """A CPU's operations; those of a message that loops back are the message's."""
    messages = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and (event["name"] == MARK or event["name"].startswith("gloo:"))
    ]
    work[EXCHANGE] += [(event["name"], span_of(event)) for event in messages]
    looped: dict[Any, list[Span]] = defaultdict(list)
    for event in messages:
        looped[event["tid"]].append(span_of(event))
    ranges = {thread: union(spans) for thread, spans in looped.items()}
    until: dict[Any, float] = {}  # the end of the last operation of each thread: what lies within it is a part of it
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event.get("cat") != "cpu_op" or not event["name"].startswith("aten::"):
            continue
        thread, (start, end) = event["tid"], span_of(event)
        if start < until.get(thread, 0.0) or _within(start, ranges.get(thread, [])):
            continue
        until[thread] = end
        work[COMPUTE].append((event["name"][:NAME], (start, end)))


def describe_lanes(lanes: Lanes) -> dict[str, dict[str, Any]]:
    """Return figures of each lane: busy and exposed seconds, idle share, its longest operations."""
    computing, whole = lanes.spans(COMPUTE), lanes.step[1] - lanes.step[0]
    found: dict[str, dict[str, Any]] = {}
    for lane, work in lanes.work.items():
        spans, longest, counts = lanes.spans(lane), Counter[str](), Counter[str]()
        for name, (start, end) in work:
            longest[name] += end - start  # pyrefly: ignore
            counts[name] += 1
        busy = covered(spans)
        found[lane] = {
            "busy_seconds": busy / 1e6,
            "idle_share": 1 - busy / whole,
            "exposed_seconds": None if lane == COMPUTE else (busy - overlap(spans, computing)) / 1e6,
            "operations": len(work),
            "longest": [
                {"name": name, "seconds": seconds / 1e6, "operations": counts[name]}
                for name, seconds in longest.most_common(LONGEST)
            ],
        }
    both = covered([*computing, *lanes.spans(EXCHANGE)])
    found[DEVICE] = {"busy_seconds": both / 1e6, "idle_share": 1 - both / whole}
    return found
