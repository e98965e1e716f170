"""What a run shows: the line of a step, what goes to the log, and what happens when nobody watches any more."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.report.conclusion import stopped_at_once
from ithaca.train.report.report import Progress
from ithaca.train.report.sinks import TensorBoard
from tests.nursery import Nursery

METRICS = {
    "loss": 1.0,
    "gradient_norm": 2.5,
    "learning_rate": 1e-05,
    "tokens_per_second_per_rank": 5.0,
    "mfu_causal": None,
    "gpu_bytes": None,
    "host_bytes": 1,
}


def lose_the_watcher(log: Path, terminal: bool) -> None:
    """`| head`, or a terminal that is closed."""
    reader, writer = os.openpty() if terminal else os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    os.environ["TERM"] = "xterm"
    progress = Progress(log, 0, 3)
    assert bool(progress._live) == terminal
    progress.say("first")
    os.close(reader)
    for step in range(1, 4):
        progress.say(f"before step {step}")
        progress.live("now")
        progress.step({"step": step, **METRICS})
    progress.end_live()
    progress.say("last")
    progress.close()
    print("and whatever else is said", flush=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_output_that_goes_away(nursery: Nursery, tmp_path: Path, terminal: bool) -> None:
    (end,) = nursery.job(lose_the_watcher, tmp_path / "log", terminal)
    assert (end.code, end.err) == (0, "")
    before = [f"before step {step}" for step in (1, 2, 3)]
    said = [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert [line for line in said if not line.startswith("Step")] == ["first", *before, "last"]
    assert [line.split()[1] for line in said if line.startswith("Step")] == ["1/3", "2/3", "3/3"]


def test_the_time_left_of_a_run_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of this start took 60 s, so that the eight steps left take 240 s; the 90 steps before do not count."""
    now = 1000.0
    monkeypatch.setattr("ithaca.train.report.report.time.perf_counter", lambda: now)
    progress = Progress(tmp_path / "log", first_step=90, steps=100)
    now += 60
    progress.step({"step": 92, **METRICS})
    progress.close()
    line = capsys.readouterr().out
    assert line.startswith("Step 92/100")
    assert line.endswith("  4:00 left\n")


def test_the_first_step_says_little_about_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compiles: 30 s, and 2 s for each of the next two. So 17 s is no mean, and 94 steps are left of 2 s each.

    If all steps are long, that hardly counts.
    """
    now = 1000.0
    monkeypatch.setattr("ithaca.train.report.report.time.perf_counter", lambda: now)
    for first, later, left in ((30, 2, ["host 1 B", "3:10 left", "3:08 left"]), (90, 60, ["about 2:24:00 left"])):
        progress = Progress(tmp_path / "log", first_step=3, steps=100, log_every=1)
        for step, seconds in ((4, first), (5, later), (6, later)):
            now += seconds
            progress.step({"step": step, **METRICS})
        progress.close()
        found = [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]
        assert found[: len(left)] == left


def test_the_line_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last validation loss stays until there is another one."""
    progress = Progress(tmp_path / "log", 0, 5, log_every=1)
    gpu = {"mfu_causal": 0.512, "gpu_bytes": 2**30}
    for more in ({}, {"validation_loss": 1.23456}, {"validation_loss": None}, {"validation_loss": 0.0}, gpu):
        progress.step({"step": len(log_lines(tmp_path)) + 1, **METRICS, **more})
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == log_lines(tmp_path)
    assert lines[0].startswith("Step 1/5  loss 1.000  grad norm 2.5  lr 1e-05  5 tokens/s/rank  host 1 B")
    assert [line.split("  ")[2] for line in lines] == [
        "grad norm 2.5",
        *2 * ["validation 1.235"],
        *2 * ["validation 0.000"],
    ]
    assert "  5 tokens/s/rank  51.2 % causal MFU  GPU 1 GiB  host 1 B  0:00 left" in lines[4]


def log_lines(folder: Path) -> list[str]:
    """The lines of the log, without their times."""
    return [line.split(" ", 2)[2] for line in (folder / "log").read_text().splitlines()]


def logged(progress: Progress, folder: Path, steps: int, wait: Callable[[], None] = lambda: None) -> list[int]:
    for step in range(1, steps + 1):
        wait()
        progress.step({"step": step, **METRICS})
    progress.close()
    return [int(line.split()[1].split("/")[0]) for line in log_lines(folder)]


def test_which_steps_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last one; in between those that `run.log_every` names, else twelve, or one a minute."""
    now = 0.0
    monkeypatch.setattr("ithaca.train.report.report.time.perf_counter", lambda: now)

    def wait() -> None:
        nonlocal now
        now += 25

    for name, every, waits, wanted in (
        ("few", None, lambda: None, [1, *range(8, 97, 8), 100]),
        ("slow", None, wait, [1, 4, 7, 8, 11, 14, 16, 19]),
        ("given", 40, wait, [1, 40, 80, 100]),
        ("all", 1, wait, list(range(1, 101))),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert logged(Progress(folder / "log", 0, 100, log_every=every), folder, 100, waits)[: len(wanted)] == wanted


def test_a_long_step_is_told_once_a_minute_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("ithaca.train.report.report.time.perf_counter", lambda: now)
    progress = Progress(tmp_path / "log", 0, 9)
    for second in range(200):
        now = float(second)
        progress.place(f"Step 1/9: forward, second {second}")
    progress.close()
    assert log_lines(tmp_path) == [f"Step 1/9: forward, second {second}" for second in (60, 120, 180)]
    assert capsys.readouterr().out.splitlines() == log_lines(tmp_path)


def test_steps_of_less_than_a_minute_do_not_tell_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("ithaca.train.report.report.time.perf_counter", lambda: now)
    progress = Progress(tmp_path / "log", 0, 9, log_every=100)
    for step in range(1, 10):
        now += 50
        progress.place(f"Step {step}/9: forward")
        progress.step({"step": step, **METRICS})
    progress.close()
    assert [line.split("  ")[0] for line in log_lines(tmp_path)] == ["Step 1/9", "Step 9/9"]
    assert capsys.readouterr().out.splitlines() == log_lines(tmp_path)


def test_tensorboard_has_the_numbers_of_a_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(RunFolder(tmp_path))
    board.write({"step": 1, **METRICS, "note": "words"})
    board.write({"step": 2, **METRICS, "loss": None, "validation_loss": 1.5})
    board.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    numbers = {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert numbers["validation_loss"] == [(2, 1.5)]
    assert numbers["loss"] == [(1, 1.0)]
    assert [step for step, _ in numbers["learning_rate"]] == [1, 2]
    assert set(numbers) == {name for name, value in METRICS.items() if value is not None} | {"validation_loss"}


def test_what_is_left_when_a_run_stops_at_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert stopped_at_once(folder, 0) == "Stopped at once. The first step was not finished; nothing was saved."
    folder.path.mkdir()
    folder.config.write_text("")
    again = f"ithaca train --run {folder.path}"
    assert stopped_at_once(folder, 3) == (
        f"Stopped at once. Step 3 was the last to finish; there is no checkpoint yet: {again} starts again from the "
        "beginning."
    )
    (folder.checkpoints / "step-00000010").mkdir(parents=True)
    assert stopped_at_once(folder, 11) == (
        f"Stopped at once. Step 11 was the last to finish; the checkpoint of step 10 is kept: {again} continues from "
        "there."
    )


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("run.log_every=0", "run.log_every is 0: 1 or more is needed"),
        ("run.log_every=-3", "run.log_every is -3: 1 or more is needed"),
        ("run.log_every=1.5", "run.log_every 1.5 is not a whole number"),
        ("run.log_every=often", "run.log_every 'often' is not a whole number"),
        ("run.log_every=true", "run.log_every true is not a whole number"),
        ("run.log_every=[10]", "run.log_every [10] is not a whole number"),
        ("run.log_evry=10", "'run.log_evry' is not an option: did you mean"),
    ],
)
def test_wrong_intervals(nursery: Nursery, tmp_path: Path, option: str, sentence: str) -> None:
    end = nursery.command("train", "--run", "run", "--set", option, folder=tmp_path)
    assert (end.code, end.out) == (2, "")
    assert end.err.startswith(f"error: {sentence}")
    assert end.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
