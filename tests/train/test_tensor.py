"""Runs on tensor ranks: clipped as others are, continued under other recipes and back, exported as one folder."""

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from ithaca.config import Config, MeshSection
from ithaca.plans.plan import Plan
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from tests.nursery import Nursery
from tests.train.test_snapshot import train_some

TENSOR = Plan(recipe="tensor")
STAGES = [  # steps, Plan, mesh, ranks
    (3, TENSOR, MeshSection(tensor=3), 3),
    (2, Plan(recipe="sweep", chunk=50), MeshSection(ulysses=2), 2),
    (2, replace(TENSOR, zero=2, checkpoint="none"), MeshSection(tensor=2), 2),
    (2, replace(TENSOR, optimizer="host"), MeshSection(tensor=2, shard=2), 4),
    (1, Plan(), MeshSection(), 1),
]


def run(nursery: Nursery, config: Config, path: Path, steps: int, plan: Plan, mesh: MeshSection, ranks: int) -> None:
    """Some steps more of a run."""
    for end in nursery.job(train_some, replace(config, plan=plan, mesh=mesh), path, steps, ranks=ranks):
        assert end.code == 0, end.err


@pytest.fixture(scope="module")
def runs(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of one recipe, and one that changes it several times. Two rows a step, so that two data ranks have some."""
    top, steps = tmp_path_factory.mktemp("runs"), sum(stage[0] for stage in STAGES)
    options = replace(small_config.train, batch=2, clip=0.5, steps=steps)
    config = replace(small_config, train=options, run=replace(small_config.run, checkpoint_every=1))
    run(nursery, config, top / "one", steps, Plan(), MeshSection(), 1)
    for stage in STAGES:
        run(nursery, config, top / "many", *stage)
    return top / "one", top / "many"


def test_the_losses_and_norms_of_one_recipe(runs: tuple[Path, Path]) -> None:
    one, many = (RunFolder(path).read_metrics() for path in runs)
    assert [line["step"] for line in many] == [line["step"] for line in one]
    for name in ("loss", "gradient_norm"):
        assert [line[name] for line in many] == pytest.approx([line[name] for line in one], rel=2e-4), name
    assert min(line["gradient_norm"] for line in one) > 0.5  # so that every step was clipped


def test_the_exported_weights(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for name, path in zip(("one", "many"), runs, strict=True):
        export(path, tmp_path / name, "float32")
    one, many = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "many"))
    for (name, wanted), (_, found) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert (found - wanted).norm() <= 1e-3 * wanted.norm(), name
