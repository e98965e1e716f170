"""Copies of tiles between the device and the host, beside the computation.

Queueing a copy returns a mark at once. Copies and the computation can be told to wait for a mark, as for a CUDA event.
On a GPU there is one stream for each direction and marks are CUDA events, so the host does not wait unless asked
to. On a CPU there is one thread for each direction and marks are threading events. That is slower than no copy at all,
but it has the same order of events, so tests that delay copies at random (`before_copy`) find a missing wait without a
GPU.
"""

import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Mark = Any  # a CUDA event or a threading.Event
# Names of the work of an engine's threads, for traces
COPY_IN, COPY_OUT, DISK_READ, DISK_WRITE = "copy in", "copy out", "disk read", "disk write"


class Engine(ABC):
    """Queues copies to and from one device, and orders them against the computation there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.before_copy: Callable[[], None] | None = None  # called before each copy, by tests that delay copies
        self.before_disk: Callable[[], None] | None = None  # the same before each read from the disk or write to it
        # Called by a thread with the name of its work; a profile times the context. A GPU's own trace has its copies
        self.watch: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
        self.poison = False  # fill freed slots with NaN, by tests that look for reads of a freed slot

    @abstractmethod
    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        """Queue a copy to the device, to begin after these marks."""

    @abstractmethod
    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None], stays: bool = False) -> Mark:
        """Queue a copy to the host; the source's slot is free at the mark. `stays`: it will be read there again."""

    @abstractmethod
    def computed(self) -> Mark | None:
        """A mark that is reached when all work that the computation has queued so far is done."""

    @abstractmethod
    def hold(self, mark: Mark | None) -> None:
        """Make the computation wait for the mark."""

    @abstractmethod
    def wait(self, mark: Mark | None) -> None:
        """Block the calling thread until the mark of a copy is reached."""

    @abstractmethod
    def reached(self, mark: Mark | None) -> bool:
        """Whether the mark is reached, without waiting."""

    @abstractmethod
    def settle(self) -> None:
        """Block the calling thread until no copy is under way."""


def make_engine(device: torch.device) -> Engine:
    return CudaEngine(device) if device.type == "cuda" else ThreadEngine(device)


class CudaEngine(Engine):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        return self._copy(self._in, target, source, after, spoil=False)

    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None], stays: bool = False) -> Mark:
        return self._copy(self._out, target, source, after, spoil=self.poison and not stays)

    def _copy(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Sequence[Mark | None], spoil: bool
    ) -> Mark:
        for mark in after:
            if mark is not None:
                stream.wait_event(mark)
        with torch.cuda.stream(stream):
            if self.before_copy:
                self.before_copy()
            target.copy_(source, non_blocking=True)
            if spoil:
                source.fill_(torch.nan)
        return stream.record_event(torch.cuda.Event(blocking=True))  # blocking: a waiting thread uses no core

    def computed(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    def hold(self, mark: Mark | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            with torch.cuda.device(self.device):  # a new thread would use the first GPU and allocate there
                mark.synchronize()

    def reached(self, mark: Mark | None) -> bool:
        return mark is None or mark.query()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


class ThreadEngine(Engine):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self._queues: dict[tuple[str, int], queue.Queue[Callable[[], None] | None]] = {}
        self._problem: BaseException | None = None

    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        return self._copy("in", target, source, after, spoil=False)

    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None], stays: bool = False) -> Mark:
        return self._copy("out", target, source, after, spoil=self.poison and not stays)

    def _copy(self, way: str, target: Tensor, source: Tensor, after: Sequence[Mark | None], spoil: bool) -> Mark:
        done, what = threading.Event(), COPY_IN if way == "in" else COPY_OUT

        def work() -> None:
            try:
                for mark in after:
                    if mark is not None:
                        mark.wait()
                if self.before_copy:
                    self.before_copy()
                with torch.no_grad(), self.watch(what):
                    target.copy_(source)
                    if spoil:
                        source.fill_(torch.nan)
            except BaseException as problem:  # raised where the copy is waited for
                self._problem = problem
            finally:
                done.set()

        self._queue(way).put(work)
        return done

    def _queue(self, way: str) -> queue.Queue[Callable[[], None] | None]:
        """The queue of a direction's thread. A forked child has no threads, so each process starts its own."""
        key = way, os.getpid()
        if key not in self._queues:
            work: queue.Queue[Callable[[], None] | None] = queue.Queue()
            self._queues[key] = work
            threading.Thread(target=_serve, args=(work,), name=f"copy-{way}", daemon=True).start()
            # End the thread with the engine, but not at Python's own end, when a thread that wakes up would crash it
            weakref.finalize(self, work.put, None).atexit = False  # pyrefly: ignore
        return self._queues[key]

    def computed(self) -> Mark:
        return None  # a CPU has nothing queued

    def hold(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.wait()
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.wait()

    def reached(self, mark: Mark | None) -> bool:
        return mark is None or mark.is_set()

    def settle(self) -> None:
        for (_, process), work in self._queues.items():
            if process == os.getpid():
                work.join()


def _serve(work: queue.Queue[Callable[[], None] | None]) -> None:
    """Run queued copies until the engine is gone, which puts None into the queue."""
    while copy := work.get():
        copy()
        del copy  # it holds the engine and two tensors, and the next one may never come
        work.task_done()
