"""A sequence shared by ranks: the losses of a run are those of `dense`, under every recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from ithaca.config import Config, MeshSection
from ithaca.plans.plan import Plan
from ithaca.train.loop import train
from ithaca.train.run import RunFolder
from tests.nursery import Nursery

STEPS = 50
RECIPES = {
    "ulysses": Plan(recipe="ulysses", checkpoint="selective"),
    "alst": Plan(recipe="alst", tile=7),
    "untied": Plan(recipe="untied"),
    "sweep": Plan(recipe="sweep", chunk=50),
}


def losses(nursery: Nursery, config: Config, path: Path, **sections) -> list[float]:
    """Of fifty steps in float32 on four ranks."""
    run = replace(config.run, checkpoint_every=0)
    config = replace(config, train=replace(config.train, steps=STEPS), run=run, **sections)
    for end in nursery.job(train, config, path, ranks=4):
        assert end.code == 0, end.err
    return [line["loss"] for line in RunFolder(path).read_metrics()]


@pytest.fixture(scope="module")
def dense(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(nursery, small_config, tmp_path_factory.mktemp("dense") / "run")


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == "sweep" else pytest.mark.full) for name in RECIPES]
)
def test_the_first_fifty_losses(nursery, small_config: Config, dense: list[float], tmp_path: Path, recipe: str) -> None:
    mesh = MeshSection(ulysses=4) if recipe != "alst" else MeshSection(ulysses=2)  # beside it two data ranks
    found = losses(nursery, small_config, tmp_path / "run", plan=RECIPES[recipe], mesh=mesh)
    assert len(found) == STEPS
    assert found[-1] < found[0] - 1
    assert found == pytest.approx(dense, rel=1e-3)
