"""How long ranks wait for each other, and that all others name a rank that ends or hangs."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

import ithaca
from ithaca.base.sizes import MOST_SECONDS
from ithaca.parallel import hangs
from ithaca.parallel.hangs import set_timeout, step_seconds, timeout
from ithaca.train.ranks.elastic import exit_now
from tests.missing import survive, vanish
from tests.nursery import SECONDS, Nursery


def collectives(how: str, pid: Path) -> None:
    """Some collectives, in the third of which rank 2 of 4 is missing; where it was killed, rank 3 is late as well."""
    hangs.POLL_SECONDS, hangs.ANSWER_SECONDS = 0.1, 4.0
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    dist.barrier()
    set_timeout([group], 7200 if how == "killed" else 4)  # longer than a test may take, or not
    with hangs.answering(group):
        for number in range(4):
            if number == 2 and rank == 2:
                vanish(how, pid)
            if number == 2 and rank == 3 and how == "killed":
                while not pid.with_name("noticed").exists():  # which is longer than ranks have to answer
                    torch.ones(100, 100) @ torch.ones(100, 100)
            dist.all_reduce(torch.ones(8), group=group)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 2 of 4 does not answer any more (it has ended or hangs): its own output says why [2]"),
        ("hangs", "rank 2 of 4 answers, but has not come to where the others wait: rank 2 is at missing.py:"),
    ],
    ids=["killed", "hangs"],
)
def test_the_rank_that_is_missing(nursery: Nursery, tmp_path: Path, how: str, said: str) -> None:
    """And not the one that computes meanwhile, and is well."""
    pid = tmp_path / "pid"
    first, second, odd, last = nursery.job(survive, collectives, 2, pid, how, pid, ranks=4)
    assert odd.code == -signal.SIGKILL
    for end in (first, second, last):
        assert end.code == 7, end
        assert said in end.out


def beside_a_host(pid: Path) -> None:
    """As without a launcher, where the store lives in rank 0, which stops: its connections stay, and say nothing."""
    hangs.ANSWER_SECONDS, hangs.STORE_SECONDS = 0.5, 0.5
    host = dist.get_rank() == 0
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if host else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("localhost", port[0])
    hangs.job_store = lambda: store  # pyrefly: ignore
    dist.barrier()
    if host:
        vanish("stopped", pid)
    until = time.monotonic() + SECONDS
    while not pid.exists() or psutil.Process(int(pid.read_text() or os.getpid())).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)
    end_of_a_collective("Connection closed by peer")


def apart(pid: Path) -> None:
    """Ranks 0, 1 and 3 of 4 work longer than the watch allows silence, in no collective; rank 2 is stopped."""
    hangs.POLL_SECONDS, hangs.ANSWER_SECONDS, hangs.END_SECONDS = 0.1, 4.0, 0.1
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None

    def end(found: object) -> NoReturn:
        print(found)
        if rank == 3:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        exit_now(7)

    with hangs.answering(group, end) as roll:
        with roll.watch(0.3):
            time.sleep(2)
        dist.barrier()  # all are there, so nothing has happened
        with roll.watch(0.3):
            if rank == 2:
                vanish("stopped", pid)
            time.sleep(100)
        end("nobody was missed")


def test_a_rank_that_is_stopped_outside_of_a_step(nursery: Nursery, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    first, second, odd, last = nursery.job(apart, pid, ranks=4)
    assert odd.code == -signal.SIGKILL
    for end in (first, second, last):
        assert end.code == 7, end
        assert "rank 2 of 4 does not answer any more (it has ended or hangs): its own output says why" in end.out


def end_of_a_collective(text: str) -> None:
    assert dist.group.WORLD is not None
    with hangs.answering(dist.group.WORLD):
        raise RuntimeError(text)


def test_the_host_of_the_store(nursery: Nursery, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    _, end = nursery.job(survive, beside_a_host, 0, pid, pid, ranks=2)
    assert end.code == 7, end
    assert "rank 0 of 2 does not answer any more" in end.out


def test_all_ranks_answer(nursery: Nursery, tmp_path: Path) -> None:
    for end in nursery.job(survive, end_of_a_collective, 0, tmp_path / "pid", "reset by peer", ranks=2):
        assert "has lost the connection to others of the 2 ranks: their own output says why []" in end.out


def other_errors() -> list[bool]:
    """Whether each comes out as it was."""
    assert dist.group.WORLD is not None
    errors = (RuntimeError("CUDA out of memory"), ValueError("Timed out waiting"), KeyboardInterrupt())
    same = []
    for error in errors:
        with pytest.raises(BaseException) as caught, hangs.answering(dist.group.WORLD):
            raise error
        same.append(caught.value is error)
    return same


def test_errors_that_no_rank_caused(ranks) -> None:
    assert ranks(2).run(other_errors) == [[True] * 3] * 2


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_time_of_a_step() -> None:
    assert step_seconds(200e12 * 277, GPU, cores=1) == step_seconds(200e12 * 277, GPU, cores=8) == 277
    assert step_seconds(5e9, CPU, cores=1) == 1
    assert step_seconds(5e9, CPU, cores=4) == 0.25


def test_the_timeout_is_longer_than_any_step() -> None:
    assert timeout(0) == 600
    assert timeout(277) == 600 + 3 * 277
    assert timeout(1e30) == MOST_SECONDS
    timedelta(seconds=timeout(1e30)) / timedelta(milliseconds=1)


def waits(replicate: int, ulysses: int) -> list[float]:
    mesh = ithaca.mesh(replicate=replicate, ulysses=ulysses, device="cpu")
    set_timeout(mesh.groups, 1234.5)
    used = [mesh.group, *(mesh.parameters.get_group(axis) for axis in range(mesh.parameters.ndim))]
    used += [mesh.ulysses_group] if mesh.ulysses_group else []
    found = [group._get_backend(CPU).options._timeout.total_seconds() for group in used]
    set_timeout(mesh.groups, 1800)  # the job serves other tests
    return found


@pytest.mark.parametrize(("replicate", "ulysses", "groups"), [(1, 1, 2), (2, 1, 3), (1, 2, 3), (2, 2, 4)])
def test_every_group_of_a_mesh(ranks, replicate: int, ulysses: int, groups: int) -> None:
    assert ranks(4).run(waits, replicate, ulysses) == [[1234.5] * groups] * 4
