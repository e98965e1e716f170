"""The example of a curriculum, examples/needles/: it runs, it learns, and no recipe changes its numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ithaca.config import Config, read_config
from ithaca.data.synthetic import ASK, FACT, IS, LENGTH, VOCAB, Kind, Vocabulary, make_document, needles
from ithaca.plans.plan import Plan
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.nursery import Nursery
from tests.train.test_validation import done

EXAMPLE = Path(__file__).parents[2] / "examples" / "needles" / "needles.toml"


@pytest.fixture(scope="module")
def config() -> Config:
    return read_config(EXAMPLE, ["train.device=cpu"])


def test_every_question_has_been_answered_before() -> None:
    words, chance = Vocabulary(VOCAB), np.random.default_rng(5)
    gaps = []
    for _ in range(100):
        known: dict[int, int] = {}
        seen: dict[int, int] = {}
        for slot, (mark, key, middle, value) in enumerate(make_document(words, chance, Kind()).tolist()):
            if mark not in (FACT, ASK):
                assert not {key, middle, value} - {*words.noise}
                continue
            assert (key in words.keys, middle, value in words.values) == (True, IS, True)
            assert mark == FACT or key in known
            assert known.setdefault(key, value) == value
            gaps += [slot - seen[key]] if key in seen else []
            seen[key] = slot
        assert 1 <= len(known) <= 8
    assert min(gaps) == 1
    assert sum(4 * gap > 1024 for gap in gaps) > 20  # answers that stand far back


def test_only_answers_are_learned() -> None:
    data = needles()
    window = data.read(0, 64 * LENGTH)
    assert window.learned is not None
    slots, learned = window.tokens.reshape(-1, 4), window.learned.reshape(-1, 4)
    assert not learned[:, :3].any()
    assert (learned[:, 3] == (slots[:, 0] == ASK)).all()
    assert data.identity() == needles.__wrapped__().identity()  # as another rank makes it


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
    assert np.mean(found[-5:]) < np.mean(found[:5]) - 0.5


PLANS = {
    "untied": (Plan(recipe="untied"), {"ulysses": 2}),
    "ring": (Plan(recipe="ring"), {"ring": 2}),
    "sweep": (Plan(recipe="sweep", chunk=100), {"ulysses": 2}),
}


def same_losses(nursery: Nursery, few: Config, top: Path, *names: str) -> None:
    """Train on one rank, and under these recipes on two that share sequences, and compare every loss."""
    done(nursery.job(train, replace(few, plan=Plan(recipe="dense")), top / "dense"))
    wanted = losses(top / "dense")
    assert len(wanted) == sum(stage.steps for stage in few.train.stages or ())
    for name in names:
        plan, axes = PLANS[name]
        shared = replace(few, plan=plan, mesh=replace(few.mesh, **axes))
        done(nursery.job(train, shared, top / name, ranks=2))
        assert np.allclose(losses(top / name), wanted, rtol=0, atol=1e-3), name


def test_the_sweep_changes_no_number(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """Ten steps over two stages."""
    same_losses(nursery, short(config, 4, 6, 4), tmp_path, "sweep")


@pytest.mark.full
def test_recipes_change_no_number(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """The first 50 steps, over two stages."""
    same_losses(nursery, short(config, 8, 30, 20), tmp_path, *PLANS)
