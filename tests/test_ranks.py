"""The tests' own ranks: one that dies fails the test at once, and those after it, instead of being waited for."""

import os
import signal
import time

from tests.nursery import Nursery
from tests.ranks import Ranks


def end_or_wait() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def run_twice() -> None:
    ranks = Ranks(2)
    for function in (end_or_wait, os.getpid):
        try:
            ranks.run(function)
        except ChildProcessError as error:
            print(error)


def test_a_rank_that_dies_is_not_waited_for(nursery: Nursery) -> None:
    (end,) = nursery.job(run_twice)
    assert (end.code, end.err) == (0, "")
    assert (
        end.out
        == """\
rank 1 of 2 died, in this test or before (-9)
rank 0 of 2 died, in this test or before (-9)
"""
    )
