"""A long step on a terminal says where it is; Ctrl-C says what it waits for, and the second one what is left."""

import json
import os
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import main as torchrun

from ithaca.cli import main
from ithaca.config import Config
from ithaca.schedule.marks import BACKWARD, FORWARD, LOSS, OPTIMIZER, PassWork, Reached, Step, make_marks
from ithaca.tape.engine import ThreadEngine
from ithaca.train.report import live_line
from ithaca.train.report.live_line import Estimate, LiveLine, describe
from ithaca.train.run import train
from tests.nursery import Nursery, fork_ranks
from tests.terminal import run_on_a_terminal
from tests.train.conftest import SMALL
from tests.train.dying import die

ROOT = Path(__file__).parents[2]
PHASES = ["forward", "loss", "backward", "optimizer"]
PLACE = re.compile(r"Step (\d)/9: (\w+)(?:, layer (\d) of 3)?(?:, chunk (\d) of 4)?; \d:\d\d so far")
LEFT = re.compile(r", \d:\d\d left in the step, \d+:\d\d in the run$")


def reached(
    phase: str, layer: int | None = None, chunk: int | None = None, number: int = 0, passes: int = 1
) -> Reached:
    """A place in a step that began at 100 s."""
    work = PassWork(layers=2, forward=(1.0, 1.0), loss=2.0, backward=(2.0, 2.0))  # 14 in all
    return Reached(Step(3, [1.0] * passes, 100.0), number, lambda: work, phase, layer, chunk)


def test_a_place_in_words() -> None:
    assert describe(reached(FORWARD, 0, 1)) == "forward, layer 1 of 2, chunk 2 of 2"
    assert describe(reached(BACKWARD, 1, None, number=1, passes=4)) == "backward, pass 2 of 4, layer 2 of 2"
    assert describe(reached(LOSS)) == "loss"
    assert describe(reached(OPTIMIZER, number=3, passes=4)) == "optimizer"


def test_the_time_left_follows_from_the_rate_so_far() -> None:
    """4 of 14 are done after 20 s, so that 50 s are left; until the next mark comes, the clock counts down."""
    estimate = Estimate.of(reached(LOSS), 120.0)
    assert estimate.left == pytest.approx(50)
    assert [estimate.seconds(now) for now in (120.0, 130.0, 200.0)] == pytest.approx([50, 40, 0])
    assert Estimate.of(reached(FORWARD, 0, 0), 120.0).left is None


class Shown:
    """The part of `Progress` that a live line uses."""

    steps = 9

    def __init__(self, step_seconds: float | None):
        self.step_seconds, self.places = step_seconds, list[str]()

    def place(self, text: str) -> None:
        self.places.append(text)


@pytest.mark.parametrize(("mean", "in_run"), [(None, "7:50"), (100.0, "10:50")])
def test_the_time_left_in_the_run(mean: float | None, in_run: str) -> None:
    """Six more steps, of the mean so far, or in the first step like this one."""
    line: Any = LiveLine.__new__(LiveLine)
    line._progress = Shown(mean)
    text = line._line(Estimate.of(reached(LOSS), 120.0), 120.0)
    assert text == f"Step 3/9: loss; 0:20 so far, 0:50 left in the step, {in_run} in the run"


def test_a_short_step_shows_nothing_and_a_gpu_that_fails_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "POLL_SECONDS", 0.001)
    marks, progress = make_marks(torch.device("cpu")), Shown(None)
    line = LiveLine(marks, progress, torch.device("cpu"))  # pyrefly: ignore
    with marks.step(1, [1.0]):
        marks.begin_pass(reached(LOSS).work)(LOSS)
        monkeypatch.setattr(live_line, "SHORT_SECONDS", 1000.0)
        line._look()
        assert progress.places == []
        assert line.seconds_left() is None

        failed = threading.Event()

        def fail() -> None:
            failed.set()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        marks.last = fail  # pyrefly: ignore
        assert failed.wait(60)
    line.close()
    assert not line._thread.is_alive()


def words(run: str, *sets: str) -> list[str]:
    options = [*SMALL, "train.steps=9", "train.batch=1", "run.checkpoint_every=0", "model.dtype=float32", *sets]
    return ["train", "--run", run, *(word for item in options for word in ("--set", item))]


def run_command(words: list[str], folder: Path, hangs: list[str], delay: float = 0.0) -> None:
    """`ithaca …` or `torchrun …` in a folder. Each copy of a tile takes `delay`; ranks of ours hang where told."""
    make = ThreadEngine.__init__

    def make_slow(engine: ThreadEngine, device: torch.device) -> None:
        make(engine, device)
        engine.before_copy = lambda: time.sleep(delay)

    ThreadEngine.__init__ = make_slow
    live_line.SHORT_SECONDS, live_line.POLL_SECONDS = 0.1, 0.02
    os.chdir(folder)
    torch.set_num_threads(1)
    die(hangs)
    if words[0] == "torchrun":
        os.environ["PYTHONPATH"] = str(ROOT)
        torchrun(words[1:])
        return
    fork_ranks()
    sys.argv = ["ithaca", *words]
    main()


def on_a_terminal(nursery: Nursery, folder: Path, *args: Any, stops: list[str]) -> tuple[int, list[list[str]]]:
    """The command's exit code and its screens."""
    (end,) = nursery.job(run_on_a_terminal, run_command, args, folder / "screens", stops)
    assert end.code == 0, end.err
    found = json.loads((folder / "screens").read_text())
    return found["code"], found["screens"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_long_step_on_a_terminal(nursery: Nursery, three_layers: Path, tmp_path: Path, ranks: int) -> None:
    """Copies take 40 ms each, so that a step takes seconds on any machine. Ctrl-C comes in the second one."""
    sets = ["plan.recipe=sweep", "plan.chunk=16", f"mesh.ulysses={ranks}", f"model.source={three_layers}"]
    arguments = ([*words("run", *sets), "--ranks", str(ranks)], tmp_path, [], 0.04)
    code, screens = on_a_terminal(nursery, tmp_path, *arguments, stops=["Step 2/9: forward.*left in the step"])
    assert code == 0, screens[-1]
    for step in ("1", "2"):
        check_places(
            [place for lines in screens for line in lines if (place := PLACE.match(line)) and place[1] == step]
        )
    shown = [lines for lines in screens if any(line.startswith("Step 2/9: backward") for line in lines)]
    for lines in shown:  # below what the step before had come to
        at = next(number for number, line in enumerate(lines) if line.startswith("Step 2/9: backward"))
        assert lines[at - 1].startswith("Step 1/9  loss ")
        assert LEFT.search(lines[at]), lines[at]
    last = "\n".join(screens[-1])
    assert re.search(r"Finishing this step \(about \d:\d\d left\), then saving\. Ctrl-C again stops at once\.", last)
    assert "Stopped after step 2. Continue with: ithaca train --run run" in last
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"Step 1/9  loss \d\.\d{3}  grad norm [\d.]+  lr 0\.001  ", log), log


def check_places(found: list[re.Match[str]]) -> None:
    """Every phase in its order; layers and chunks rise going forward, and fall going backward."""
    assert [phase for phase in PHASES if phase in [place[2] for place in found]] in (PHASES, PHASES[:-1])
    order = [PHASES.index(place[2]) for place in found]
    assert order == sorted(order)
    for phase, sign in (("forward", 1), ("backward", -1)):
        places = [(sign * int(place[3]), sign * int(place[4])) for place in found if place[2] == phase]
        assert places == sorted(places)
        assert len(set(places)) >= 4  # of the 12 of 3 layers and 4 chunks


@pytest.fixture(scope="module")
def two_steps(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 2."""
    path = tmp_path_factory.mktemp("two") / "run"
    config = replace(small_config, train=replace(small_config.train, steps=2, batch=2))
    (end,) = nursery.job(train, config, path)
    assert end.code == 0, end.err
    return path


@pytest.mark.parametrize("start", ["alone", "launcher", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_second_ctrl_c_says_what_is_left(nursery, small_model, two_steps: Path, tmp_path: Path, start: str) -> None:
    """The run hangs in its fourth step."""
    shutil.copytree(two_steps, tmp_path / "run")
    command = words("run", f"model.source={small_model}", "train.batch=2")
    if start == "torchrun":
        torchrun_words = ["torchrun", "--standalone", "--nproc-per-node", "1", "-m", "--"]
        command = [*torchrun_words, "tests.train.dying", "0:4:HANG", *command]
    else:
        command += ["--ranks", "1" if start == "alone" else "2"]
    stops = ["Hanging", "Finishing this step"]
    code, screens = on_a_terminal(nursery, tmp_path, command, tmp_path, ["0:4:HANG"], stops=stops)
    last = "\n".join(screens[-1])
    assert "Finishing this step, then saving. Ctrl-C again stops at once." in last
    assert "25h" not in last  # the sequence that shows the cursor again
    sentence = (
        "Stopped at once. Step 3 was the last to finish; the checkpoint of step 2 is kept: ithaca train --run run "
        "continues from there."
    )
    assert last.count(sentence) == 1, last
    if start != "torchrun":  # which has a code and a traceback of its own
        assert code == 130
        assert "Traceback" not in last
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
