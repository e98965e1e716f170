"""`ithaca train` without options: a small model learns to find needles by `sweep` on two ranks; a table shows it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ithaca.config import Config, read_config
from ithaca.train.evaluation.first_run import measure_ranks, tell_first_run
from ithaca.train.run import train
from ithaca.train.setup.configuration import FIRST_RUN
from tests.nursery import Nursery
from tests.train.test_validation import done

ROW = re.compile(r"^(before training|after stage \d|by chance) +((?: *\d+%)+)$", re.MULTILINE)


@pytest.fixture
def config() -> Config:
    return read_config(FIRST_RUN, [])


def shorter(config: Config) -> Config:
    """Two steps in each of its stages, with few sequences."""
    stages = tuple(replace(stage, steps=2, batch=2) for stage in config.train.stages or ())
    return replace(config, train=replace(config.train, batch=2, stages=stages))


def test_what_it_is(config: Config) -> None:
    assert config.plan is not None
    assert (config.plan.recipe, config.mesh.ulysses, config.train.device) == ("sweep", 2, "cpu")
    assert [stage.tokens for stage in config.train.stages or ()] == [256, 512, 1024, 2048]
    assert config.run.keep >= len(config.train.stages or ())  # the table is about the ends of stages


def test_it_ends_with_a_table(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    done(nursery.job(train, shorter(config), tmp_path / "run", ranks=2))
    said = done(nursery.job(measure_ranks, tmp_path / "run", 3, ranks=2))
    rows = dict(ROW.findall(said))
    assert [*rows] == ["before training", "after stage 1", "after stage 4", "by chance"]
    assert all(len(row.split()) == 4 for row in rows.values())
    assert "Stage 1 trained on 256 tokens at a time, stage 4 on 2K." in said


def test_a_run_that_was_stopped_has_no_table(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    done(nursery.job(train, shorter(config), tmp_path / "run", ranks=2))
    assert done(nursery.job(tell_first_run, tmp_path / "run", config, None)) == ""  # of which this is the beginning


@pytest.mark.full
def test_needles_are_found(nursery: Nursery, tmp_path: Path) -> None:
    """The whole of it, as a user types it."""
    end = nursery.command("train", folder=tmp_path)
    assert end.code == 0, end.err
    rows = {name: [int(score) for score in re.findall(r"\d+", row)] for name, row in ROW.findall(end.out)}
    assert max(rows["before training"]) <= 20
    assert rows["after stage 4"][-1] >= 80
    assert rows["after stage 4"][-1] > rows["after stage 1"][-1]
