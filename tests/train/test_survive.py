"""Runs that are killed and started again give, bit for bit, the losses of one left alone."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ithaca.base.sizes import format_seconds
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.config import Config
from ithaca.parallel import hangs as lost
from ithaca.parallel.batch import Batch
from ithaca.train import run as whole_run
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.ranks import elastic
from ithaca.train.ranks.stop import SAME_SECONDS, StopRequest
from ithaca.train.run import train
from tests.missing import survive, vanish
from tests.nursery import Nursery, ranks_of
from tests.train.test_nodes import wait_for_steps


def losses(path: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in RunFolder(path).read_metrics()]


@pytest.fixture(scope="module")
def alone(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[list, float]:
    """What a run of two ranks gives when nobody disturbs it, and how long it takes."""
    path = tmp_path_factory.mktemp("alone") / "run"
    began = time.monotonic()
    ends = nursery.job(train, small_config, path, ranks=2)
    assert [end.code for end in ends] == [0, 0]
    assert "Hang timeout: 10 min (run.timeout)" in ends[0].out
    found = losses(path)
    assert [step for step, *_ in found] == list(range(1, small_config.train.steps + 1))
    return found, time.monotonic() - began


def killed_run(nursery: Nursery, config: Config, path: Path, kills: int, longest: float, chance: random.Random) -> None:
    """Killed at random moments, then left to end."""
    for _ in range(kills):
        nursery.job(train, config, path, ranks=2, kill_after=chance.uniform(0.1, longest))
    for end in nursery.job(train, config, path, ranks=2):
        assert end.code == 0, end.err


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_killed_at_random_moments(nursery, small_config, alone, tmp_path: Path, seed: int) -> None:
    wanted, seconds = alone
    killed_run(nursery, small_config, tmp_path / "run", 2, seconds, random.Random(seed))
    assert losses(tmp_path / "run") == wanted


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_twenty_times_over(nursery, small_config, alone, tmp_path: Path, seed: int) -> None:
    wanted, seconds = alone
    killed_run(nursery, small_config, tmp_path / "run", 1 + seed % 3, seconds, random.Random(seed))
    assert losses(tmp_path / "run") == wanted


def test_going_on_with_other_numbers_of_ranks(nursery, small_config, alone, tmp_path: Path) -> None:
    """2, then 4, then 1 rank: the same losses but for the order of sums."""
    wanted, _ = alone
    path = tmp_path / "run"
    for ranks, steps in ((2, 5), (4, 6), (1, 7)):
        for end in nursery.job(train_some, small_config, path, steps, ranks=ranks):
            assert end.code == 0, end.err
    found = losses(path)
    assert [step for step, *_ in found] == [step for step, *_ in wanted]
    for (_, a, _), (_, b, _) in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def train_some(config: Config, path: Path, steps: int) -> None:
    """Stop after some steps as Ctrl-C does."""
    asked = iter(range(1, steps + 1))
    StopRequest.agreed = lambda _: next(asked) == steps
    train(config, path)


def test_ctrl_c_finishes_the_step_and_saves(nursery, small_config, alone, tmp_path: Path) -> None:
    wanted, _ = alone
    path = tmp_path / "run"
    slow = replace(small_config, run=replace(small_config.run, checkpoint_every=0))
    ends = nursery.job(interrupted, slow, path, signal.SIGINT, 1, 7, ranks=2)
    assert [end.code for end in ends] == [0, 0], ends
    assert "Stopped after step 7. Continue with: ithaca train --run" in ends[0].out
    assert [file.name for file in (path / "checkpoints").glob("step-*")] == ["step-00000007"]
    nursery.job(train, small_config, path, ranks=2)
    assert losses(path) == wanted


def interrupted(config: Config, path: Path, number: int, times: int, step: int = 1) -> None:
    """Train, and be sent a signal in the middle of a step, once or again and again."""
    whole = TrainingRun._backward

    def send() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(2 * SAME_SECONDS)

    def part(run: TrainingRun, batches: list[Batch]) -> float:
        if run.done + 1 == step:
            sender = threading.Thread(target=send, daemon=True)
            sender.start()
            while times == 1 and sender.is_alive():  # the signal comes before the step ends
                sender.join(0.1)
        return whole(run, batches)

    TrainingRun._backward = part
    train(config, path)


def test_ctrl_c_twice_stops_at_once(nursery, small_config, tmp_path: Path) -> None:
    endless = replace(small_config, train=replace(small_config.train, steps=100000))
    slow = replace(endless, train=replace(endless.train, tokens=8192, batch=16))  # a step takes many seconds
    (end,) = nursery.job(interrupted, slow, tmp_path / "slow", signal.SIGINT, 1000)
    assert end.code == 130
    assert "Ctrl-C again stops at once" in end.err
    assert not RunFolder(tmp_path / "slow").has_checkpoints()
    (end,) = nursery.job(interrupted, endless, tmp_path / "run", signal.SIGTERM, 1)
    assert end.code == 0
    assert "Stopped after step 1." in end.out


def test_the_expected_step_is_that_of_the_rank_with_the_most_sequences(small_config: Config) -> None:
    run = TrainingRun.__new__(TrainingRun)
    run.config = replace(small_config, train=replace(small_config.train, batch=8, micro_batch=4, tokens=100))
    run.mesh = SimpleNamespace(data_ranks=3, context_ranks=5, device=torch.device("cuda"))  # pyrefly: ignore
    run.model = SimpleNamespace(spec=SimpleNamespace(flops_per_token=lambda tokens: 1e12 * tokens))  # pyrefly: ignore
    # Two passes of four sequences, of which a rank has two; 100 tokens of 1e14 FLOPs each, shared by five
    assert run._step_seconds() == pytest.approx(2 * 2 * 100 * 1e14 / 5 / 200e12)


def vanish_in(place: str, turn: int, config: Config, path: Path, how: str, pid: Path) -> None:
    """Train; when a part of it begins for the so-manieth time, rank 1 is missing."""
    lost.POLL_SECONDS, lost.ANSWER_SECONDS = 0.1, 4.0
    owner = {"_backward": TrainingRun, "_write": Checkpoints}[place]
    whole, seen = getattr(owner, place), []

    def part(*args: Any) -> Any:
        seen.append(None)
        if dist.get_rank() == 1 and len(seen) == turn:
            vanish(how, pid)
        return whole(*args)

    setattr(owner, place, part)
    train(config, path)


@pytest.mark.parametrize(
    ("place", "turn", "how", "timeout"),
    [
        # Longer than a rank is late on a busy machine, and longer than a test may take
        ("_write", 1, "stopped", 8),  # in a step under which a checkpoint is written
        ("_write", 2, "killed", 7200),  # in the last checkpoint, when all steps are done
        pytest.param("_backward", 6, "stopped", 8, marks=pytest.mark.full),
        pytest.param("_backward", 6, "killed", 7200, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_missing_is_named(
    nursery, small_config, tmp_path: Path, place: str, turn: int, how: str, timeout: float
) -> None:
    """By an error that is no user's mistake, and without waiting for a checkpoint that cannot be finished."""
    config = replace(small_config, run=replace(small_config.run, timeout=timeout))
    config = replace(config, train=replace(config.train, steps=6))
    pid, path = tmp_path / "pid", tmp_path / "run"
    first, second, third = nursery.job(survive, vanish_in, 1, pid, place, turn, config, path, how, pid, ranks=3)
    assert second.code == -signal.SIGKILL
    for end in (first, third):
        assert end.code == 7, end
        assert "rank 1 of 3 does not answer any more (it has ended or hangs)" in end.out
    assert f"Hang timeout: {format_seconds(timeout)} (run.timeout)" in first.out
    assert len(losses(path)) >= 4


STEPS = 120  # so many after the tenth that a busy machine sees the tenth before the last


@dataclass(frozen=True)
class KillOneAndStopOne:
    """Kill a rank of the first job, and stop one of the second, each as soon as it has taken some steps."""

    folder: Path

    def __call__(self, launchers: list[int]) -> None:
        with ThreadPoolExecutor() as both:
            killed = both.submit(self._send, launchers[0], "killed", signal.SIGKILL)
            stopped = both.submit(self._send, launchers[1], "stopped", signal.SIGSTOP)
        killed.result()
        (self.folder / "hung").write_text(str(stopped.result()))

    def _send(self, launcher: int, name: str, number: signal.Signals) -> int:
        wait_for_steps(self.folder / name, 10)
        _, rank = ranks_of(launcher)
        rank.send_signal(number)
        return rank.pid


def words(path: Path, model: Path, *sets: str) -> list[str]:
    options = [f"model.source={model}", "train.tokens=64", "train.batch=4", "run.checkpoint_every=4", *sets]
    return ["train", "--run", str(path), "--ranks", "2", *(word for item in options for word in ("--set", item))]


def test_a_rank_that_dies_or_hangs_is_started_again(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    names = ("killed", "stopped", "left")
    jobs = [(words(tmp_path / name, small_model, f"train.steps={STEPS}", "run.timeout=15"), {}) for name in names]
    ends = dict(zip(names, nursery.commands(*jobs, folder=tmp_path, disturb=KillOneAndStopOne(tmp_path)), strict=True))
    for name, end in ends.items():
        assert end.code == 0, end.err
        assert "Traceback" not in end.err
        assert ("Restarting from the last checkpoint (1 of 3)" in end.err) == (name != "left")
        assert "(2 of 3)" not in end.err
        assert losses(tmp_path / name) == losses(tmp_path / "left")
    assert "Rank 1 was killed by signal 9. Restarting" in ends["killed"].err
    assert "rank 1 of 2 does not answer any more (it has ended or hangs)" in ends["stopped"].err
    assert not psutil.pid_exists(int((tmp_path / "hung").read_text()))
    assert len(losses(tmp_path / "left")) == STEPS


def test_ctrl_c_at_a_terminal(small_model: Path, tmp_path: Path) -> None:
    """The real launcher with two real ranks, in a process group of its own as a shell would give it."""
    command = [sys.executable, "-m", "ithaca", *words(tmp_path / "run", small_model, "train.steps=100000")]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    while not losses(tmp_path / "run"):
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=900)
    assert job.returncode == 0, err
    assert "Stopped after step" in out
    assert "Traceback" not in err
    assert RunFolder(tmp_path / "run").has_checkpoints()


@dataclass(frozen=True)
class InterruptTwice:
    """Signal the launcher's whole group twice, when one of its ranks hangs."""

    folder: Path

    def __call__(self, launchers: list[int]) -> None:
        wait_for_steps(self.folder / "run", 1)
        hung, _ = ranks_of(launchers[0])
        hung.suspend()
        (self.folder / "hung").write_text(str(hung.pid))
        for _ in range(2):
            os.killpg(launchers[0], signal.SIGINT)
            time.sleep(4 * SAME_SECONDS)


def test_ctrl_c_twice_at_a_terminal(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    job = (words(tmp_path / "run", small_model, "train.steps=100000"), {})
    (end,) = nursery.commands(job, folder=tmp_path, disturb=InterruptTwice(tmp_path))
    assert end.code == 130, end
    assert "Traceback" not in end.err
    assert not psutil.pid_exists(int((tmp_path / "hung").read_text()))


def stuck(config: Config, path: Path, how: str, pid: Path) -> None:
    """Train as over NCCL, where no error comes: in step 3 rank 1 is missing, and the others wait for the GPU.

    Or it is stopped after step 2, before ranks agree on a checkpoint.
    """
    lost.POLL_SECONDS, lost.ANSWER_SECONDS, lost.LATE_SECONDS, lost.END_SECONDS = 0.1, 2.0, 0.1, 0.5
    whole, take = TrainingRun._backward, Checkpoints._take

    def part(run: TrainingRun, batches: list[Batch]) -> torch.Tensor:
        if run.done + 1 == 3:
            if dist.get_rank() == 1 and how != "together":
                vanish(how, pid)
            threading.Event().wait()
        return whole(run, batches)

    def stopped(checkpoints: Checkpoints) -> bool:
        if dist.get_rank() == 1:
            vanish("stopped", pid)
        return take(checkpoints)

    if how == "saving":
        Checkpoints._take = stopped

    def leave_and_kill(text: str) -> None:
        """The missing rank as well, which would be there for ever."""
        if pid.exists():
            threading.Timer(2.0, os.kill, (int(pid.read_text()), signal.SIGKILL)).start()
            time.sleep(3.0)  # the others leave meanwhile
        elastic.leave(text)

    TrainingRun._backward, whole_run.leave = part, leave_and_kill
    train(config, path)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stopped", "rank 1 of 3 does not answer any more (it has ended or hangs)"),
        ("saving", "rank 1 of 3 does not answer any more (it has ended or hangs)"),
        ("hangs", "rank 1 of 3 answers, but has not come to where the others wait: rank 1 is at missing.py:"),
        ("together", "all 3 ranks answer, but a step takes longer than run.timeout: ranks 0, 1 and 2 at threading.py:"),
    ],
)
def test_a_collective_that_never_completes(nursery, small_config, tmp_path: Path, how: str, said: str) -> None:
    """A thread ends each rank, with the sentence, after the timeout."""
    config = replace(small_config, run=replace(small_config.run, timeout=8, checkpoint_every=2))
    pid = tmp_path / "pid"
    ends = nursery.job(stuck, config, tmp_path / "run", how, pid, ranks=3)
    for end in (ends[0], ends[2]):
        assert f"error: {said}" in end.err, end
        assert "continue from the last checkpoint with ithaca train --run" in end.err
    assert len(losses(tmp_path / "run")) == 2
