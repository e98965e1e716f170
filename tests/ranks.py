"""Ranks for tests: forked once per world size (0.1 s instead of 5), kept, and given many cases to run."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240  # a case that takes longer hangs


class Ranks:
    """`world` processes in one gloo job; `run` calls a function in each and gives back their results by rank."""

    def __init__(self, world: int):
        self.world = world
        fork = multiprocessing.get_context("fork")
        store = tempfile.mktemp(prefix="ithaca-ranks-")
        pipes = [fork.Pipe() for _ in range(world)]
        self._pipes = [here for here, _ in pipes]
        self._processes = [
            fork.Process(target=_serve, args=(rank, world, store, pipes[rank][1]), daemon=True) for rank in range(world)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.stop()
                raise TimeoutError(f"rank {rank} of {self.world} did not answer within {SECONDS} s")
            results.append(pipe.recv())
        for rank, (fine, result) in enumerate(results):
            assert fine, f"rank {rank} of {self.world} failed:\n{result}"
        return [result for _, result in results]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
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
