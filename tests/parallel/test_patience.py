"""How long ranks wait for one another, and that every group of a mesh does."""

from datetime import timedelta

import pytest
import torch

import ithaca
from ithaca.base.sizes import MOST_SECONDS
from ithaca.parallel.hangs import set_timeout, step_seconds, timeout

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_time_of_a_step() -> None:
    assert step_seconds(200e12 * 277, GPU, cores=1) == step_seconds(200e12 * 277, GPU, cores=8) == 277
    assert step_seconds(5e9, CPU, cores=1) == 1
    assert step_seconds(5e9, CPU, cores=4) == 0.25


def test_patience_is_longer_than_any_step() -> None:
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
