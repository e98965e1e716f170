"""What a run shows goes on being logged when nobody watches any more."""

import os
from pathlib import Path

import pytest

from ithaca.train.report import Progress
from tests.nursery import Nursery

METRICS = {"loss": 1.0, "tokens_per_second_per_rank": 5.0, "mfu_causal": None, "gpu_bytes": None, "host_bytes": 1}


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
    said = [line.split(" ", 2)[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert said == ["first", "before step 1", "before step 2", "before step 3", "last"]


def test_the_time_left_of_a_run_that_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of this start took 60 s, so that the eight steps left take 240 s; the 90 steps before do not count."""
    now = 1000.0
    monkeypatch.setattr("ithaca.train.report.time.perf_counter", lambda: now)
    progress = Progress(tmp_path / "log", first_step=90, steps=100)
    now += 60
    progress.step({"step": 92, **METRICS})
    progress.close()
    line = capsys.readouterr().out
    assert line.startswith("Step 92/100")
    assert line.endswith("  4:00 left\n")
