"""Ranks for tests: forked once per world size (0.1 s instead of 5), kept, and given many cases to run.

Between cases a job is stopped: each of its gloo groups has a thread that wakes up a hundred times a second, and the
idle jobs of all world sizes together would take more than a tenth of two cores.
"""

import atexit
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ithaca.base.parent import end_with_parent

SECONDS = 900  # a case that takes longer hangs, however busy the machine is


class Ranks:
    """`world` processes in one gloo job; `run` calls a function in each and gives back their results by rank."""

    def __init__(self, world: int, seconds: float = SECONDS):
        self.world, self._seconds = world, seconds
        fork = multiprocessing.get_context("fork")
        store = tempfile.mktemp(prefix="ithaca-ranks-")
        pipes = [fork.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            fork.Process(target=_serve, args=(rank, world, store, pipes[rank][1], os.getpid()), daemon=True)
            for rank in range(world)
        ]
        for process in self._processes:
            process.start()
        atexit.register(self.stop)  # multiprocessing would end them by SIGTERM, which a stopped process does not hear

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._check_alive()
        self._signal(signal.SIGCONT)
        try:
            answers = self._answers(function, args)
        finally:
            self._signal(signal.SIGSTOP)
        for rank, (fine, result) in sorted(answers.items()):
            assert fine, f"rank {rank} of {self.world} failed:\n{result}"
        return [result for _, (_, result) in sorted(answers.items())]

    def _answers(self, function: Callable[..., Any], args: tuple[Any, ...]) -> dict[int, tuple[bool, Any]]:
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + self._seconds
        while len(answers) < self.world:
            missing = {self._pipes[rank]: rank for rank in range(self.world) if rank not in answers}
            wait([*missing, *(process.sentinel for process in self._processes)], until - time.monotonic())
            self._check_alive()
            answers |= {rank: pipe.recv() for pipe, rank in missing.items() if pipe.poll()}
            if time.monotonic() > until:
                self.stop()
                late = [rank for rank in range(self.world) if rank not in answers]
                failed = "".join(f"\nrank {rank} failed:\n{said}" for rank, (fine, said) in answers.items() if not fine)
                raise TimeoutError(f"ranks {late} of {self.world} took more than {self._seconds} s{failed}")
        return answers

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None:
                assert process.pid is not None
                os.kill(process.pid, number)

    def _check_alive(self) -> None:
        """The others of a job would wait for ever for one that has died, and so would every test after this one."""
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None:
                self.stop()
                raise ChildProcessError(
                    f"rank {rank} of {self.world} died, in this test or before ({process.exitcode})"
                )

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world: int, store: str, pipe: Connection, parent: int) -> None:
    if not end_with_parent(parent):  # a run of the tests that is killed leaves no stopped ranks
        return
    torch.set_num_threads(1)  # before the first operation: a forked child would wait for the parent's threads
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    while True:
        function, args = pipe.recv()
        if not dist.is_initialized():  # only now: most runs of a few tests need no job at all
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        try:
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)
