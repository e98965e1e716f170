"""Processes that work on tasks; results come in the order of the tasks, whatever the number of processes.

Processes and not threads, since rendering and reading are Python. They are forked before the first task: what they need
is inherited, not sent. A thread for each process sends it a task and waits for the result. At most two tasks a process
are held. If a process is killed, the next result is an error; no process outlives its parent.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

from ithaca.base.errors import IthacaError, RunError
from ithaca.base.parent import end_with_parent

Task = TypeVar("Task")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers(Generic[Task]):
    """`count` processes that call `work` on tasks; with 0 the calling process does."""

    def __init__(self, work: Callable[[Task], Any], count: int):
        self._work, self._count = work, count
        self._processes: list[tuple[BaseProcess, Connection]] = []
        self._idle: queue.SimpleQueue[tuple[BaseProcess, Connection]] = queue.SimpleQueue()

    def __enter__(self) -> "Workers[Task]":
        with _quiet_fork():
            for _ in range(self._count):
                self._start()
        self._threads = ThreadPoolExecutor(max(self._count, 1), thread_name_prefix="ithaca-data")
        return self

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        inherited = [ours, *(pipe for _, pipe in self._processes)]
        process = fork.Process(target=_serve, args=(self._work, theirs, inherited, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        self._processes.append((process, ours))
        self._idle.put((process, ours))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, _ in self._processes:
            process.kill()  # they hold nothing; a thread that waits for one sees the end of its pipe
        self._threads.shutdown(cancel_futures=True)
        for process, pipe in self._processes:
            process.join()
            pipe.close()

    def map(self, tasks: Iterable[Task], here: Callable[[Task], bool]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result, in order. The calling process works on tasks for which `here` is true."""
        window: deque[tuple[Task, Future | None]] = deque()
        held = _Held(iter(tasks))
        for task in held:
            remote = self._count > 0 and not here(task)
            window.append((task, self._threads.submit(self._ask, task) if remote else None))
            if len(window) > 2 * self._count:
                yield self._finished(*window.popleft())
        while window:
            yield self._finished(*window.popleft())
        if held.problem:
            raise held.problem

    def _finished(self, task: Task, future: Future | None) -> tuple[Task, Any]:
        return task, future.result() if future else self._work(task)

    def _ask(self, task: Task) -> Any:
        process, pipe = self._idle.get()
        try:
            pipe.send(task)
            result, problem = pipe.recv()
        except (EOFError, OSError):
            process.join(5)
            raise RunError(
                f"a process that prepares data has ended (exit code {process.exitcode}; -9: killed, often for want of "
                "memory): run the same command again, which continues where it stopped, or with fewer --workers"
            ) from None
        finally:
            self._idle.put((process, pipe))
        if problem is not None:
            raise problem
        return result


class _Held(Generic[Task]):
    """Tasks up to the first that cannot be made. Its error is held until the results of earlier tasks are taken."""

    def __init__(self, tasks: Iterator[Task]):
        self._tasks = tasks
        self.problem: IthacaError | None = None

    def __iter__(self) -> Iterator[Task]:
        try:
            yield from self._tasks
        except IthacaError as problem:
            self.problem = problem


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Tell `tokenizers` that children use no threads; else it warns in each one if this process has used them."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _serve(work: Callable[[Any], Any], pipe: Connection, inherited: list[Connection], parent: int) -> None:
    """Answer the tasks that come through the pipe until it is closed."""
    if not end_with_parent(parent):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(_answer(work, pipe.recv()))


def _answer(work: Callable[[Any], Any], task: Any) -> tuple[Any, Exception | None]:
    try:
        return work(task), None
    except Exception as problem:
        return None, problem
