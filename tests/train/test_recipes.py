"""A sequence shared by ranks: the losses of a run are those of `dense`, under every recipe."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ithaca.config import Config, MeshSection
from ithaca.plans.plan import Plan
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.nursery import Nursery
from tests.sampling import sampled

STEPS, FEW = 50, 15
SHARED = MeshSection(ulysses=4)
RECIPES = {
    "ulysses": (Plan(recipe="ulysses", checkpoint="selective"), SHARED),
    "alst": (Plan(recipe="alst", tile=7), MeshSection(ulysses=2)),  # beside it two data ranks
    "untied": (Plan(recipe="untied"), SHARED),
    "untied-ring": (Plan(recipe="untied"), MeshSection(ulysses=2, ring=2)),
    "ring": (Plan(recipe="ring"), MeshSection(ring=4)),
    "hybrid": (Plan(recipe="hybrid", travel="gather"), MeshSection(ulysses=2, ring=2)),
    "tensor": (Plan(recipe="tensor", checkpoint="selective"), MeshSection(tensor=2)),  # beside it two data ranks
    "tensor-ring": (Plan(recipe="tensor", tile=7), MeshSection(tensor=2, ring=2)),
    "fpdt": (Plan(recipe="fpdt", chunks=4), SHARED),
    "sweep": (Plan(recipe="sweep", chunk=50), SHARED),
    "sweep-ring": (Plan(recipe="sweep", chunk=50), MeshSection(ulysses=2, ring=2)),
}


def losses(nursery: Nursery, config: Config, path: Path, steps: int, **sections) -> list[float]:
    """Of some steps in float32 on four ranks."""
    run = replace(config.run, checkpoint_every=0)
    config = replace(config, train=replace(config.train, steps=steps), run=run, **sections)
    for end in nursery.job(train, config, path, ranks=4):
        assert end.code == 0, end.err
    return [line["loss"] for line in RunFolder(path).read_metrics()]


@pytest.fixture(scope="module")
def dense(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda steps: losses(nursery, small_config, tmp_path_factory.mktemp("dense") / "run", steps))


@pytest.mark.parametrize(
    ("recipe", "steps"),
    sampled([("sweep-ring", FEW), *((name, STEPS) for name in RECIPES)], lambda _, steps: steps == FEW),
)
def test_the_first_losses(nursery, small_config: Config, dense, tmp_path: Path, recipe: str, steps: int) -> None:
    plan, mesh = RECIPES[recipe]
    found = losses(nursery, small_config, tmp_path / "run", steps, plan=plan, mesh=mesh)
    assert len(found) == steps
    assert found[-1] < found[0] - 1
    assert found == pytest.approx(dense(steps), rel=1e-3)
    waiting = [line["ring_waiting"] for line in RunFolder(tmp_path / "run").read_metrics()]
    said = RunFolder(tmp_path / "run").log.read_text(encoding="utf-8")
    if mesh.ring == 1:
        assert waiting == [None] * steps
        assert "ring ranks attend" not in said
    else:  # documents end where they like
        assert max(waiting) > 0
        assert said.count("In this step ring ranks attend to") == 1
