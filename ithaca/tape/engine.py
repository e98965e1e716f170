"""What copies tiles between the device and the host while the device computes.

A copy is queued and returns at once with a mark; marks say what must have happened before something else may. On a GPU
there is one stream for each direction and marks are events, so nothing here waits on the host unasked. On a CPU each
direction is a thread, and marks are waited for: slower than no copy at all, but the same order of events, with
`before_copy` to delay copies at random, so that a missing wait is found without a GPU.
"""

import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Mark = Any  # of the engine that made it


class Engine(ABC):
    def __init__(self, device: torch.device):
        self.device = device
        self.before_copy: Callable[[], None] | None = None  # run by the copying side: tests delay copies with it
        self.before_disk: Callable[[], None] | None = (
            None  # the same for what threads read from the disk or write to it
        )
        self.poison = False  # fill freed slots with NaN: tests find what reads one

    @abstractmethod
    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        """Queue a copy to the device, to begin after these marks."""

    @abstractmethod
    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        """Queue a copy to the host; the source's slot is free at the mark."""

    @abstractmethod
    def computed(self) -> Mark | None:
        """All that the computation has been asked for so far."""

    @abstractmethod
    def hold(self, mark: Mark | None) -> None:
        """The computation goes on after the mark."""

    @abstractmethod
    def wait(self, mark: Mark | None) -> None:
        """Wait, on the host and in any thread, for the mark of a copy."""

    @abstractmethod
    def reached(self, mark: Mark | None) -> bool:
        """Whether that would be no wait at all."""

    @abstractmethod
    def settle(self) -> None:
        """Wait, on the host, until nothing is under way."""


def make_engine(device: torch.device) -> Engine:
    return CudaEngine(device) if device.type == "cuda" else ThreadEngine(device)


class CudaEngine(Engine):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        return self._copy(self._in, target, source, after, spoil=False)

    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        return self._copy(self._out, target, source, after, spoil=self.poison)

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
        return stream.record_event(torch.cuda.Event(blocking=True))  # a thread that waits for it takes no core

    def computed(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    def hold(self, mark: Mark | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            with torch.cuda.device(self.device):  # a new thread's is the first GPU, where it would take memory
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

    def copy_out(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        return self._copy("out", target, source, after, spoil=self.poison)

    def _copy(self, way: str, target: Tensor, source: Tensor, after: Sequence[Mark | None], spoil: bool) -> Mark:
        done = threading.Event()

        def work() -> None:
            try:
                for mark in after:
                    if mark is not None:
                        mark.wait()
                if self.before_copy:
                    self.before_copy()
                with torch.no_grad():
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
        """The thread of a direction begins with its first copy in this process: a forked child has none of them."""
        key = way, os.getpid()
        if key not in self._queues:
            work: queue.Queue[Callable[[], None] | None] = queue.Queue()
            self._queues[key] = work
            threading.Thread(target=_serve, args=(work,), name=f"copy-{way}", daemon=True).start()
            # With the engine, but not as late as Python's own end, when a thread that wakes up takes all down
            weakref.finalize(self, work.put, None).atexit = False  # pyrefly: ignore
        return self._queues[key]

    def computed(self) -> Mark:
        return None  # on a CPU what was asked for is done

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
    """Until there is no engine any more."""
    while copy := work.get():
        copy()
        del copy  # it holds the engine and two tensors, and the next one may never come
        work.task_done()
