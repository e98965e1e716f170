"""What a run does only if steps, validations and tasks take minutes: it says where it is, and nothing else changes.

Tests are short, so the limits of time go down instead. Every rank passes them, not only the one that prints.
"""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from ithaca.base.errors import ConfigError
from ithaca.config import Config, EvaluateSection, Stage, read_config
from ithaca.data.preparation.prepare import prepare
from ithaca.parallel.hangs import set_timeout
from ithaca.parallel.joining import TORCH_SECONDS
from ithaca.train import loop
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.report import live_line, report
from ithaca.train.report.conclusion import draw_loss
from ithaca.train.run import train
from ithaca.train.setup import opening
from ithaca.train.step_profile import StepProfile
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


def note_timeouts(config: Config, path: Path) -> None:
    """Train, and print how long ranks wait for each other in what one of them does alone, and in steps."""
    now = [TORCH_SECONDS]

    def set_now(groups: Any, seconds: float) -> None:
        now[0] = seconds
        set_timeout(groups, seconds)

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **more: Any) -> Any:
            print("waits", name, now[0], flush=True)
            return work(*args, **more)

        return inner

    with (
        mock.patch.object(loop, "set_timeout", set_now),
        mock.patch.object(opening, "settle", noted("settle", opening.settle)),
        mock.patch.object(loop, "describe_rope", noted("describe", loop.describe_rope)),
        mock.patch.object(loop, "tell_conclusion", noted("conclude", loop.tell_conclusion)),
        mock.patch.object(loop.TrainingRun, "_step", noted("step", loop.TrainingRun._step)),
        mock.patch.object(loop, "validate", noted("validate", loop.validate)),
    ):
        train(config, path)


def test_other_ranks_wait_for_work_of_one_rank_as_long_as_torch_does(
    nursery: Nursery, config: Config, tmp_path: Path
) -> None:
    """run.timeout is made for steps. Data of a next stage, pictures and old checkpoints may take longer than one."""
    config = replace(config, run=replace(config.run, timeout=100.0))
    ends = nursery.job(note_timeouts, config, tmp_path / "run", ranks=2)
    done(ends)
    waits = [line.split()[1:] for line in ends[0].out.splitlines() if line.startswith("waits")]
    found = {name: {float(seconds) for what, seconds in waits if what == name} for name, _ in waits}
    alone, together = {TORCH_SECONDS}, {100.0}
    assert found == {
        "settle": alone, "describe": alone, "conclude": alone, "step": together, "validate": together,
    }  # fmt: skip
    assert [name for name, _ in waits].count("settle") == 2  # one for each stage


def test_a_long_run_is_drawn_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The running mean of a million steps took ten minutes, in which the other ranks gave up. Its values are means."""

    class Loss(float):
        sums = 0

        def __add__(self, other: float) -> "Loss":
            Loss.sums += 1
            return Loss(float(self) + float(other))

        __radd__ = __add__

    generator = np.random.default_rng(0)
    losses = [Loss(loss) for loss in generator.random(1000)]
    drawn: list[Any] = []
    plot = Axes.plot

    def noted(axes: Axes, *args: Any, **more: Any) -> Any:
        drawn.append(args)
        return plot(axes, *args, **more)

    monkeypatch.setattr(Axes, "plot", noted)
    draw_loss([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)], tmp_path / "loss.png")
    assert Loss.sums <= 2 * len(losses)
    means = [np.mean(losses[max(at - 49, 0) : at + 1]) for at in range(1000)]
    assert np.allclose(np.array(drawn[1][1], dtype=float), means, rtol=1e-10)


def test_metrics_are_read_line_by_line(tmp_path: Path) -> None:
    """Of a million steps with fifty sources, the metrics as objects would fill 39 GB on the first rank."""
    run, most = RunFolder(tmp_path), 3000
    sources = {f"source_{number}": 0.5 for number in range(50)}
    lines = [json.dumps({"step": step, "loss": 1.0, **sources}) for step in range(1, most + 1)]
    run.metrics.write_text("\n".join([*lines, '{"step": 3001, "lo']))
    tracemalloc.start()
    run.cut_metrics(most)
    found = run.read_metrics("loss", "labels")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [{"step": step, "loss": 1.0} for step in range(1, most + 1)]
    assert run.metrics.read_text() == "\n".join(lines) + "\n"
    assert len(run.read_metrics()[0]) == 52
    assert peak < 500 * most  # all objects are 5 KB a step


def test_seconds_of_all_steps_are_not_kept(tmp_path: Path) -> None:
    """Of a profiled step and its neighbours alone: 94 MB on every rank after a million steps."""
    for step, kept in ((None, []), (10, [*range(6, 15)])):
        profile = StepProfile(step, tmp_path, torch.device("cpu"), torch.float32)
        for number in range(1, 101):
            profile.add(None, {"step": number, "seconds": 1.0})  # pyrefly: ignore
        assert [*profile._seconds] == kept


def test_every_stage_is_checked_before_the_first_step(tmp_path: Path) -> None:
    """A stage whose step has too many tokens was refused when it began, days later; no option could mend the run."""
    stage = "[[train.stages]]\ntokens = '{}'\nsteps = 1\nbatch = {}\n"
    for batch, refused in ((4, False), (5, True)):
        (tmp_path / "a.toml").write_text(stage.format("1M", 16) + stage.format("1024M", batch))
        with pytest.raises(ConfigError, match="tokens=1073741824, more than") if refused else nullcontext():
            read_config(tmp_path / "a.toml", [])
