"""A loss far above its start is said once, with both numbers; noise is not said."""

import random
from pathlib import Path

import pytest

from ithaca.config import TrainSection
from ithaca.train.report.loss_watch import LABELS, LossWatch
from tests.nursery import Nursery
from tests.train.conftest import SMALL

ADVICE = (
    "a lower train.learning_rate than 0.003, or a longer train.warmup than 4, may help (--fresh starts again); "
    "the run goes on"
)


def said(losses: list[float | None], labels: int = 8192, before: int = 0) -> list[tuple[int, str]]:
    """The steps with a sentence, and the sentences; the first `before` steps are of an earlier start."""
    lines = [{"step": step, "loss": loss, "labels": labels} for step, loss in enumerate(losses, start=1)]
    watch = LossWatch(TrainSection(learning_rate=0.003, warmup=4), lines[:before])
    found = [(line["step"], text) for line in lines[before:] if (text := watch.add(line))]
    assert all(text.endswith(f": {ADVICE}") for _, text in found)
    return [(step, text.removesuffix(f": {ADVICE}")) for step, text in found]


def test_a_model_that_is_spoiled() -> None:
    """As SmolLM2 was, at a rate of 0.003."""
    assert said([3.34, 3.6, 4.4, 5.24, 5.9, 6.1, 6.2]) == [
        (4, "the loss has risen from 3.34 (step 1) to 4.41 (steps 2 to 4)")
    ]


def test_it_is_said_once_also_after_a_resume() -> None:
    losses: list[float | None] = [11.9, 13.0, 16.0, 19.6, 19.0, 18.0, 21.0]
    assert len(said(losses)) == 1
    assert said(losses, before=5) == []
    assert said(losses, before=2) == said(losses)  # the start is that of the run


@pytest.mark.parametrize("labels", [100, LABELS - 1, LABELS, 10 * LABELS])
def test_noise_is_not_said(labels: int) -> None:
    """Losses of a step scatter the more, the fewer labels it has: by 6 nats of a label, far more than usual."""
    for seed in range(100):
        chance = random.Random(seed)
        falling = [3 - step / 1000 + chance.gauss(0, 6 / labels**0.5) for step in range(1000)]
        assert said(falling, labels) == []


def test_few_bad_steps_are_not_said() -> None:
    assert said([3.0, 3.0, 9.0, 3.0, 3.0, 3.0], labels=100) == []
    assert said([3.0, 2.9, 2.8, 5.7, 2.8, 2.9, 2.9, 2.8]) == []
    assert said([3.0, 3.9, 3.9, 3.9, 3.9, 3.9]) == []


def test_steps_without_labels_count_for_nothing() -> None:
    assert said([None, 3.0, None, 4.5, 4.5, None, 4.5]) == [
        (7, "the loss has risen from 3.00 (step 2) to 4.50 (steps 4 to 7)")
    ]


def test_a_run_says_it(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    sets = [*SMALL, f"model.source={small_model}", "train.tokens=4200", "train.batch=1", "train.steps=5"]
    sets += ["train.learning_rate=3", "train.clip=1e9", "train.warmup=0"]
    words = [word for option in sets for word in ("--set", option)]
    end = nursery.command("train", "--run", "run", "--ranks", "1", *words, folder=tmp_path)
    assert end.code == 0, end.err
    lines = [line for line in end.out.splitlines() if "the loss has risen" in line]
    assert len(lines) == 1, end.out
    assert "a lower train.learning_rate than 3, or a longer train.warmup than 0, may help" in lines[0]
    assert lines[0] in (tmp_path / "run" / "log.txt").read_text()
