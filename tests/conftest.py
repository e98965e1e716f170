import gc
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch
import torch._dynamo  # FSDP2 does at its first use: once here, instead of in every forked rank

from tests.nccl import NO_GPU, no_shared_gpu
from tests.nursery import Nursery
from tests.ranks import Ranks

# Tensors are small here, and threads that wait for each other spin: on busy cores that doubles what the suite costs
torch.set_num_threads(1)


LONGEST = ("train", "schedule")  # tests that come first, so that no worker is left alone with one of them at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", help="a share of the tests, as 2/3: every third, from the second on")


@pytest.hookimpl(trylast=True)  # what -m and -k leave is shared out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, of = map(int, config.getoption("--share").split("/"))
    items[:] = items[number - 1 :: of]
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    reasons = {"gpu": None if torch.cuda.is_available() else NO_GPU, "nccl": no_shared_gpu()}
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


# How long an example takes says nothing on a machine that does other things as well
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

WORLDS = range(1, 9)


@pytest.fixture(scope="session", autouse=True)
def _jobs() -> Iterator[dict[int, Ranks]]:
    # Forked before the first test: later this process would have threads and a process group that a child inherits.
    # What is imported by now is left out of collections, each of which would look at it and copy its pages in a child
    gc.collect()
    gc.freeze()
    jobs = {world: Ranks(world) for world in WORLDS}
    yield jobs
    for job in jobs.values():
        job.stop()


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[Nursery]:
    """Where whole commands and jobs are forked from; begun before the first test, for the same reason."""
    nursery = Nursery()
    yield nursery
    nursery.stop()


@pytest.fixture(scope="session")
def ranks(_jobs: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """ranks(4): the job of four ranks."""
    return lambda world: _jobs[world]
