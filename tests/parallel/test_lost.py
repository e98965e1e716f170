"""A rank that ends or hangs is named by all others, soon or within the time that they were told to wait."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ithaca.parallel import hangs as lost
from ithaca.parallel.hangs import set_timeout
from tests.missing import survive, vanish
from tests.nursery import SECONDS, Nursery


def collectives(how: str, pid: Path) -> None:
    """Some collectives, in the third of which rank 2 of 4 is missing; where it was killed, rank 3 is late as well."""
    lost.POLL_SECONDS, lost.ANSWER_SECONDS = 0.1, 4.0
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    dist.barrier()
    set_timeout([group], 7200 if how == "killed" else 4)  # longer than a test may take, or not
    with lost.answering(group):
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
    lost.ANSWER_SECONDS, lost.STORE_SECONDS = 0.5, 0.5
    host = dist.get_rank() == 0
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if host else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("localhost", port[0])
    lost._get_default_store = lambda: store
    dist.barrier()
    if host:
        vanish("stopped", pid)
    until = time.monotonic() + SECONDS
    while not pid.exists() or psutil.Process(int(pid.read_text() or os.getpid())).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)
    end_of_a_collective("Connection closed by peer")


def end_of_a_collective(text: str) -> None:
    assert dist.group.WORLD is not None
    with lost.answering(dist.group.WORLD):
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
        with pytest.raises(BaseException) as caught, lost.answering(dist.group.WORLD):
            raise error
        same.append(caught.value is error)
    return same


def test_errors_that_no_rank_caused(ranks) -> None:
    assert ranks(2).run(other_errors) == [[True] * 3] * 2
