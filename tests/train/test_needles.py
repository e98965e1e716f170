"""The example of a curriculum, examples/needles/: it runs, it learns, and no recipe changes its numbers."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.config import Config, read_config
from ithaca.data.preparation.prepare import prepare
from ithaca.evaluate.language import ASK, FACT, Synthetic
from ithaca.plans.plan import Plan
from ithaca.train.loop import train
from ithaca.train.run_folder import RunFolder
from tests.nursery import Nursery
from tests.train.test_validation import done

EXAMPLES = Path(__file__).parents[2] / "examples" / "needles"


def needles() -> Any:
    """The script that makes the example's data."""
    spec = importlib.util.spec_from_file_location("needles", EXAMPLES / "make_tokens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documents() -> np.ndarray:
    script, chance = needles(), np.random.default_rng(5)
    return np.stack([script.make_document(Synthetic(script.VOCAB), chance) for _ in range(300)])


@pytest.fixture(scope="module")
def config(documents: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The example on fewer documents."""
    top = tmp_path_factory.mktemp("needles")
    np.save(top / "documents.npy", documents)
    prepare([top / "documents.npy"], top / "needles.tokens")
    return read_config(EXAMPLES / "needles.toml", [f"data.source={top / 'needles.tokens'}", "train.device=cpu"])


def test_every_question_has_been_answered_before(documents: np.ndarray) -> None:
    for document in documents[:50]:
        known: dict[int, int] = {}
        asked = 0
        for mark, key, _, value in document.reshape(-1, 4).tolist():
            if mark == FACT:
                assert known.setdefault(key, value) == value
            elif mark == ASK:
                assert known[key] == value
                asked += 1
        assert asked > 50


def short(config: Config, batch: int, *steps: int) -> Config:
    """The example with fewer sequences and steps in its stages."""
    assert config.train.stages is not None
    stages = tuple(replace(stage, steps=n) for stage, n in zip(config.train.stages, steps, strict=False))
    return replace(config, train=replace(config.train, batch=batch, stages=stages))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(run).read_metrics()]


def test_forty_steps(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """Twenty of the first stage, twenty of the second: the loss falls."""
    done(nursery.job(train, short(config, 8, 20, 20), tmp_path / "run"))
    found = losses(tmp_path / "run")
    assert len(found) == 40
    assert found[-1] < found[0] - 0.5


PLANS = {
    "untied": (Plan(recipe="untied"), {"ulysses": 2}),
    "ring": (Plan(recipe="ring"), {"ring": 2}),
    "sweep": (Plan(recipe="sweep", chunk=100), {"ulysses": 2}),
}


@pytest.mark.full
def test_recipes_change_no_number(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """The first 50 steps, over two stages, on one rank and on two that share sequences."""
    few = short(config, 8, 30, 20)
    done(nursery.job(train, replace(few, plan=Plan(recipe="dense")), tmp_path / "dense"))
    wanted = losses(tmp_path / "dense")
    assert len(wanted) == 50
    for name, (plan, axes) in PLANS.items():
        shared = replace(few, plan=plan, mesh=replace(few.mesh, **axes))
        done(nursery.job(train, shared, tmp_path / name, ranks=2))
        assert np.allclose(losses(tmp_path / name), wanted, rtol=0, atol=1e-3), name
