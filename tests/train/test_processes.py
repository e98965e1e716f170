"""A node's ranks and their launcher: signals at any moment, what ends them, what a user reads. Stubs for training.

Ranks are forked, not spawned as they are for users, who wait seconds for each to import torch.
"""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ithaca.base.errors import IthacaError, RunError
from ithaca.train.ranks import processes, stop
from ithaca.train.ranks.processes import Rank, Watch, run_ranks
from ithaca.train.ranks.stop import StopRequest
from tests.nursery import Nursery, fork_ranks


def launch(train: Callable[..., None], asked: bool = False) -> None:
    """Run two ranks that train so, on a machine without a folder for temporary files; print how it ended."""
    fork_ranks()
    tempfile.tempdir = "/nonexistent"
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for rank in range(2)
    ]
    with Watch() as watch:
        if asked:
            watch._handle(signal.SIGTERM, None)
        try:
            print(run_ranks(partial(train, None, Path(), launched=True), environments, watch))
        except (IthacaError, KeyboardInterrupt) as error:
            print(type(error).__name__, error)


def train_well(config: Any, path: Path, launched: bool) -> None:  # noqa: ARG001
    """Be sent what the launcher passes on too late for the last step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    StopRequest(SimpleNamespace(first_on_node=False), launched).close()  # pyrefly: ignore
    for number in stop.SIGNALS:
        os.kill(os.getpid(), number)


def train_well_without_output(config: Any, path: Path, launched: bool) -> None:
    """As Python has it where the shell was told `>&-`."""
    sys.stdout = None  # pyrefly: ignore
    train_well(config, path, launched)


@pytest.mark.parametrize("train", [train_well, train_well_without_output])
def test_a_signal_after_the_last_step_harms_no_rank(nursery: Nursery, train: Callable[..., None]) -> None:
    (end,) = nursery.job(launch, train)
    assert (end.code, end.out, end.err) == (0, "None\n", "")


def fill_the_disk(config: Any, path: Path, launched: bool) -> None:  # noqa: ARG001
    raise RunError("the disk is full" + 10**6 * "!" if os.environ["RANK"] == "1" else "the disk is full")


@pytest.mark.parametrize("asked", [False, True])
def test_a_sentence_is_told_whatever_else_ended_the_ranks(nursery: Nursery, asked: bool) -> None:
    (end,) = nursery.job(launch, fill_the_disk, asked)
    assert (end.code, end.err) == (0, "")
    assert end.out.startswith("RunError the disk is full")


def launch_with_few_files(tracked: bool) -> None:
    """Two more than there are, whatever numbers pytest's own files have; `tracked`: after the launcher's helper."""
    resource_tracker._resource_tracker = tracker = resource_tracker.ResourceTracker()  # not one of an earlier test
    resource_tracker.ensure_running = tracker.ensure_running
    if tracked:
        tracker.ensure_running()
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, free + 2))
    try:
        launch(train_well)
    except RunError as error:
        print(error)


@pytest.mark.parametrize("tracked", [True, False])
def test_too_few_open_files(nursery: Nursery, tracked: bool) -> None:
    (end,) = nursery.job(launch_with_few_files, tracked)
    what = "of the 2 on this node" if tracked else "multiprocessing's resource tracker"
    assert (end.code, end.err) == (0, "")
    assert f"{what} could not be started (Too many open files): allow more" in end.out


class Process:
    """A rank's, whose exit code is read from a list, the last one for ever."""

    def __init__(self, *codes: int | None):
        self.codes, self.heard = list(codes), []

    @property
    def exitcode(self) -> int | None:
        return self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]

    def terminate(self) -> None:
        self.heard.append("asked")

    def kill(self) -> None:
        self.heard.append("killed")

    def join(self, timeout: float) -> None: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """run_ranks over processes that are given, after so many requests."""
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(processes, "GONE_SECONDS", 0.001)

    def run(*ranks: Process, asked: int = 0) -> str | None:
        started = iter(
            [Rank(str(number), rank, multiprocessing.Pipe()[0]) for number, rank in enumerate(ranks)]  # pyrefly: ignore
        )
        monkeypatch.setattr(processes, "_start", lambda *_: next(started))
        watch: Any = SimpleNamespace(ranks=[], asked=asked, forward_request=lambda: None)
        return run_ranks(lambda: None, [{} for _ in ranks], watch)

    return run


def test_a_rank_that_is_slow_to_die(run: Callable[..., str | None]) -> None:
    """It is waited for until it has ended, or until one is asked twice."""
    slow = Process(*8 * [None], -9)
    assert run(Process(1), slow) == "rank 0 ended with code 1"
    assert slow.exitcode == -9
    with pytest.raises(KeyboardInterrupt):
        run(Process(1), Process(None), asked=2)


def test_a_rank_that_dies_just_when_it_is_looked_at(run: Callable[..., str | None]) -> None:
    assert run(Process(None, 1)) == "rank 0 ended with code 1"


def test_the_first_request_is_passed_on_and_the_second_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, rank = Watch(), Process(None)
    watch.ranks.append(rank)  # pyrefly: ignore
    watch.forward_request()
    for number in (signal.SIGINT, signal.SIGTERM):  # together: one
        watch._handle(number, None)
    assert (watch.asked, rank.heard) == (1, ["asked"])
    monkeypatch.setattr(stop, "SAME_SECONDS", -1.0)
    watch._handle(signal.SIGHUP, None)
    watch._handle(signal.SIGINT, None)
    assert (watch.asked, rank.heard) == (2, ["asked", "killed"])


@pytest.mark.parametrize(
    ("codes", "how"),
    [
        ((None, 0), None),
        ((0, 1), "rank 1 ended with code 1"),
        ((1, -9), "rank 1 was killed by signal 9"),
        ((-9, 1), "rank 0 was killed by signal 9"),
        ((None, 1, -6, 1), "rank 2 was killed by signal 6"),
    ],
)
def test_the_rank_that_others_failed_because_of_is_named(codes: tuple[int | None, ...], how: str | None) -> None:
    """Ranks that lose a killed one end with code 1, often before the launcher looks."""
    ranks = [Rank(str(number), SimpleNamespace(exitcode=code), None) for number, code in enumerate(codes)]  # pyrefly: ignore
    assert processes._death(ranks) == how
