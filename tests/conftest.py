from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(4): the job of four ranks."""
    jobs: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in jobs:
            jobs[world] = Ranks(world)
        return jobs[world]

    yield of
    for job in jobs.values():
        job.stop()
