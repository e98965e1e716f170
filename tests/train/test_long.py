"""What a run does only if steps, validations and tasks take minutes: it says where it is, and nothing else changes.

Tests are short, so the limits of time go down instead. Every rank passes them, not only the one that prints.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ithaca.config import Config, EvaluateSection, Stage
from ithaca.data.preparation.prepare import prepare
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.report import live_line, report
from ithaca.train.run import train
from tests.nursery import Nursery
from tests.train.test_validation import done

SAME = ("step", "loss", "gradient_norm", "validation_loss", "needle_greedy_256")


@contextmanager
def as_if_long() -> Iterator[None]:
    """Every step, validation and task takes longer than any limit after which something is said."""
    with (
        mock.patch.object(report, "SILENT_SECONDS", 0.0),
        mock.patch.object(report, "LONG_STEP", 0.0),
        mock.patch.object(live_line, "SHORT_SECONDS", 0.0),
        mock.patch.object(live_line, "POLL_SECONDS", 0.001),
    ):
        yield


def take_long(work: Callable[..., None], *args: Any) -> None:
    with as_if_long():
        work(*args)


@pytest.fixture(scope="module")
def config(small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two stages, with a validation and a task at the end of each."""
    folder = tmp_path_factory.mktemp("long")
    (folder / "books").mkdir()
    for number in range(40):
        (folder / "books" / f"{number}.txt").write_text(f"{number} and what follows it. " * 20)
    prepare([folder / "books"], folder / "books.tokens")
    stages = (Stage(tokens=128, steps=2), Stage(tokens=256, steps=2))
    return replace(
        small_config,
        data=replace(small_config.data, source=str(folder / "books.tokens"), validation="0.1"),
        train=replace(small_config.train, tokens=None, steps=None, warmup=None, stages=stages),
        evaluate=EvaluateSection(tasks=("needle",), tokens=(256,), count=3),
        run=replace(small_config.run, checkpoint_every=2),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_run_trains_as_a_short_one(nursery: Nursery, config: Config, ranks: int, tmp_path: Path) -> None:
    ends = nursery.job(take_long, train, config, tmp_path / "long", ranks=ranks)
    said = done(ends)
    assert [end.err for end in ends] == [""] * ranks
    assert "Validating: sequence 1 of" in said
    assert "Task needle, 256 tokens" in said
    assert all("Validating" not in end.out for end in ends[1:])
    done(nursery.job(train, config, tmp_path / "short", ranks=ranks))
    found = [
        [{name: line.get(name) for name in SAME} for line in lines]
        for run in (RunFolder(tmp_path / "long"), RunFolder(tmp_path / "short"))
        for lines in ([*run.read_metrics(), *run.read_validations(), *run.read_evaluations()],)
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 6
