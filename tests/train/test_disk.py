"""A run with tapes on disk: what it measures and warns of before its first step, and what a kill leaves."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ithaca.config import Config
from ithaca.planner.hardware import read_gpus
from ithaca.plans.plan import PLACED, Plan
from ithaca.train import disk
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.nursery import Nursery
from tests.small_disk import mount_small_disk, skip_without_mount


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "one", tmp_path / "two"]
    for folder in found:
        folder.mkdir()
    return found


def on_disk(config: Config, folders: list[Path], **places: str) -> Config:
    plan = Plan(recipe="sweep", chunk=16, disk=", ".join(map(str, folders)), **({"o": "disk"} | places))
    return replace(config, plan=plan, train=replace(config.train, steps=2))


def train_with(config: Config, path: Path, gpu: str | None, rate: float | None) -> None:
    """Train as if on that GPU, with disks of that many bytes a second; None: without direct access."""
    disk.known_gpu = lambda _: read_gpus()[gpu] if gpu else None
    rates = {"read": 0.0, "write": 0.0} if rate is None else {"read": rate, "write": rate}
    disk._measure = lambda *_: rates
    train(config, path)


WARNING = (
    r"warning: plan.disk='\S+/one, \S+/two' is too slow for this Plan: the (for|back)ward pass needs \S+ .B/s of each "
    r"node's disk, which gives 0.02 MB/s, so a step takes about .+ instead of .+; put less on disk \(plan.o=disk\), "
    r"or name folders on \d+ such disks"
)


@pytest.mark.parametrize(
    ("gpu", "rate", "warned"),
    [("H100-80GB", 1e4, True), ("H100-80GB", 1e15, False), ("H100-80GB", None, False), (None, 1e4, False)],
)
def test_a_disk_too_slow_for_the_step(
    nursery: Nursery, small_config: Config, folders, tmp_path: Path, gpu: str | None, rate: float | None, warned: bool
) -> None:
    """Without a speed of computing, as on a CPU, nothing is predicted, and nothing is said."""
    config = on_disk(small_config, folders)
    ends = nursery.job(train_with, config, tmp_path / "run", gpu, rate, ranks=2)
    assert [end.code for end in ends] == [0, 0], ends[0].err
    log = RunFolder(tmp_path / "run").log.read_text(encoding="utf-8")
    assert bool(re.search(WARNING, log)) == warned
    assert ("is too slow" in log) == warned
    (minutes,) = re.findall(r"Hang timeout: (\S+ \w+) \(run.timeout\)", log)
    assert (minutes != "10 min") == (rate == 1e4)  # a slow disk is no rank that hangs
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_a_run_measures_its_own_folders(nursery: Nursery, small_config: Config, folders, tmp_path: Path) -> None:
    """For real, with every tape in both folders: the losses are those of tapes in memory, and nothing is left."""
    config = on_disk(small_config, folders, **dict.fromkeys(PLACED, "disk"))
    hosted = replace(config, plan=Plan(recipe="sweep", chunk=16))
    losses = []
    for number, each in enumerate((config, hosted)):
        ends = nursery.job(train, each, tmp_path / f"run{number}", ranks=2)
        assert [end.code for end in ends] == [0, 0], ends[0].err
        losses.append([line["loss"] for line in RunFolder(tmp_path / f"run{number}").read_metrics()])
    assert losses[0] == losses[1]
    log = RunFolder(tmp_path / "run0").log.read_text(encoding="utf-8")
    assert f"Tapes on disk are striped over 2 folders, {folders[0]}, {folders[1]}" in log
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_measuring_takes_what_the_tapes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stripe in each folder at least, 256 MiB of a node at most, and never more than is free."""
    free = {"one": 10**15, "two": 10**15}
    monkeypatch.setattr(disk, "free_space", free.__getitem__)
    both, stripe = ("one", "two"), 8 * 2**20
    assert disk.measured_bytes(both, 1, 2) == 2 * stripe
    assert disk.measured_bytes(both, 3 * stripe + 4095, 2) == 3 * stripe
    assert disk.measured_bytes(both, 10**12, 2) == 128 * 2**20
    assert disk.measured_bytes(both, 10**12, 64) == 4 * 2**20
    free["two"] = 6 * stripe
    assert disk.measured_bytes(both, 10**12, 2) == 3 * stripe
    free["two"] = 4 * stripe - 1
    assert disk.measured_bytes(both, 10**12, 2) == 0


def train_on_a_small_disk(config: Config, folder: Path, path: Path, size: int) -> None:
    mount_small_disk(folder, size)
    train(config, path)


@pytest.mark.parametrize("size", [2, 40])
def test_a_disk_with_room_for_the_tapes_alone(
    nursery: Nursery, small_config: Config, tmp_path: Path, size: int
) -> None:
    """MiB that are free: too few to measure in, and fewer than measuring takes at most. The tapes take far less."""
    config = on_disk(small_config, [tmp_path / "disk"])
    (end,) = nursery.job(train_on_a_small_disk, config, tmp_path / "disk", tmp_path / "run", size * 2**20)
    skip_without_mount(end)
    assert end.code == 0, end.err
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 2


def test_space_that_others_took_meanwhile(tmp_path: Path) -> None:
    """Nothing is measured; the tapes themselves are checked elsewhere."""
    assert disk._measure((str(tmp_path),), 2**60) == {"read": 0.0, "write": 0.0}


def die_in_the_second_step(config: Config, path: Path) -> None:
    """Killed in the backward pass, when tiles are on their way to the disk and back."""
    whole = TrainingRun._backward

    def part(run: TrainingRun, *given):
        if run.done == 1:
            os.kill(os.getpid(), 9)
        return whole(run, *given)

    TrainingRun._backward = part
    train(config, path)


def test_a_kill_leaves_no_file(nursery: Nursery, small_config: Config, folders, tmp_path: Path) -> None:
    config = on_disk(small_config, folders, kv="disk", lse="disk", residual="disk")
    ends = nursery.job(die_in_the_second_step, config, tmp_path / "run", ranks=2)
    assert [end.code for end in ends] == [-9, -9]
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_a_folder_that_vanishes_is_a_sentence(nursery: Nursery, small_config: Config, folders, tmp_path: Path) -> None:
    """Between two starts."""
    folders[1].rmdir()
    (end, _) = nursery.job(train, on_disk(small_config, folders), tmp_path / "run", ranks=2)
    assert end.code != 0
    assert f"plan.disk='{folders[1]}' is not a folder that a file can be made in" in end.out + end.err
