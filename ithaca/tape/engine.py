"""What copies tiles between the device and the host while the device computes.

A copy is queued and returns at once with a mark; marks say what must have happened before something else may. On a GPU
there is one stream for each direction and marks are events, so nothing here ever waits on the host. On a CPU each
direction is a thread, and marks are waited for: slower than no copy at all, but the same order of events, with
`before_copy` to delay copies at random, so that a missing wait is found without a GPU.
"""

import queue
import threading
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
        return stream.record_event()

    def computed(self) -> Mark:
        return torch.cuda.current_stream(self.device).record_event()

    def hold(self, mark: Mark | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


class ThreadEngine(Engine):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self._queues: dict[str, queue.Queue[Callable[[], None]]] = {}
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

    def _queue(self, way: str) -> queue.Queue[Callable[[], None]]:
        """The thread of a direction begins with its first copy: before that a process may still be forked."""
        if way not in self._queues:
            work: queue.Queue[Callable[[], None]] = queue.Queue()
            self._queues[way] = work
            threading.Thread(target=_serve, args=(work,), name=f"copy-{way}", daemon=True).start()
        return self._queues[way]

    def computed(self) -> Mark:
        return None  # on a CPU what was asked for is done

    def hold(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.wait()
        if self._problem is not None:
            raise self._problem

    def settle(self) -> None:
        for work in self._queues.values():
            work.join()


def _serve(work: queue.Queue[Callable[[], None]]) -> None:
    while True:
        work.get()()
        work.task_done()
