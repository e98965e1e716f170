"""A disk that is full: at the start, at metrics and log, at a checkpoint, at the picture, and in an export."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.sizes import parse_bytes
from ithaca.config import Config
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.nursery import Ended, Nursery
from tests.small_disk import fill, mount_small_disk, skip_without_mount
from tests.train.test_vanish import as_a_command, losses, of

SIZE = 8 << 20  # bytes of the disk: the small model and a few of its checkpoints


def check(end: Ended, code: int) -> str:
    skip_without_mount(end)
    assert end.code == code, end
    assert "Traceback" not in end.err
    return end.out + end.err


def bytes_of(text: str) -> int:
    return 0 if text == "0 B" else int(parse_bytes(text if text[-2:] != " B" else text[:-2]))


def check_figures(said: str, most: int) -> None:
    """Less is free than is needed, and `most` at most: it is counted before anything is cleaned up."""
    found = re.findall(r"No space left on device; it takes ([\d.]+ \w+), and ([\d.]+ \w+) are free on its disk", said)
    assert found, said
    for needed, free in found:
        assert bytes_of(free) < bytes_of(needed)
        assert bytes_of(free) <= most


def at_step(step: int, work: Callable[[], object]) -> None:
    """Do something before the metrics of a step are written."""
    publish = TrainingRun._publish

    def publish_after_work(run: TrainingRun, metrics: dict[str, Any]) -> None:
        if metrics["step"] == step:
            work()
        publish(run, metrics)

    TrainingRun._publish = publish_after_work


def full_at_checkpoints(config: Config, disk: Path) -> None:
    """The disk is full but for 50 KB when the checkpoint of step 4 is written, and has room again at step 7."""
    mount_small_disk(disk, SIZE)
    room = disk / "room"

    def leave_little() -> None:
        room.write_bytes(bytes(50_000))
        fill(disk)
        room.unlink()

    at_step(4, leave_little)
    at_step(7, (disk / "filler").unlink)
    as_a_command(lambda: train(config, disk / "run"))
    print(sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))


def test_a_full_disk_at_a_checkpoint(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    (end,) = nursery.job(full_at_checkpoints, of(small_config, 8), tmp_path / "disk")
    said = check(end, 0)
    assert "warning: the checkpoint of step 4 could not be written (No space left on device; it takes " in said
    assert "enforce" not in said
    check_figures(said, most=4096)
    assert said.splitlines()[-1] == "['step-00000008']"


def full_from_the_start(config: Config, disk: Path, free: int) -> None:
    """The disk is full but for some bytes; a second start finds room."""
    mount_small_disk(disk, SIZE)
    if free:
        (disk / "room").write_bytes(bytes(free))
    filler = fill(disk)
    if free:
        (disk / "room").unlink()
    try:
        as_a_command(lambda: train(config, disk / "run"))
    except SystemExit as end:
        print("code", end.code, *sorted(path.name for path in (disk / "run").rglob("*")), flush=True)
    filler.unlink()
    as_a_command(lambda: train(config, disk / "run"))
    print(len(losses(disk / "run")), "steps")


@pytest.mark.parametrize("free", [0, 1 << 12, 1 << 13])
def test_a_full_disk_at_the_start(nursery: Nursery, small_config: Config, tmp_path: Path, free: int) -> None:
    """Nothing half-made stays, and the same command works when there is room."""
    (end,) = nursery.job(full_from_the_start, of(small_config, 4), tmp_path / "disk", free)
    said = check(end, 0)
    assert re.search(r"error: .*\(No space left on device; [\d.]+ (B|KiB) are free on its disk\)", said)
    left = next(line for line in said.splitlines() if line.startswith("code 1"))
    assert ".partial" not in left
    assert "\n4 steps\n" in said


def full_at_metrics(config: Config, disk: Path) -> None:
    """The disk is full for 58 steps, which is more than the last page of a file and a buffer take."""
    mount_small_disk(disk, SIZE)
    at_step(3, lambda: fill(disk))
    at_step(61, (disk / "filler").unlink)
    as_a_command(lambda: train(config, disk / "run"))
    run = RunFolder(disk / "run")
    print("lines", len(run.metrics.read_text().splitlines()), *(line["step"] for line in run.read_metrics()))


def test_a_full_disk_at_metrics(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """The run goes on. It says once that metrics cannot be written, and once that they can; no line is broken."""
    (end,) = nursery.job(full_at_metrics, of(small_config, 63, every=0), tmp_path / "disk")
    said = check(end, 0)
    fails = (
        r"warning: the metrics of step \d+ could not be written \(No space left on device; 0 B are free on its disk\)"
    )
    assert len(re.findall(fails, said)) == 1
    assert said.count("warning: metrics are written again from step 61 on") == 1
    _, count, *steps = next(line for line in said.splitlines() if line.startswith("lines ")).split()
    assert int(count) == len(steps) < 63
    assert steps[-3:] == ["61", "62", "63"]
    assert [int(step) for step in steps] == sorted({int(step) for step in steps})
    assert f"has the metrics of {count} of 63 steps" in said


def full_at_the_picture(config: Config, disk: Path) -> None:
    mount_small_disk(disk, SIZE)
    conclude = TrainingRun._conclude

    def conclude_without_room(run: TrainingRun, stopped: bool) -> None:
        fill(disk)
        conclude(run, stopped)

    TrainingRun._conclude = conclude_without_room
    try:
        as_a_command(lambda: train(config, disk / "run"))
    finally:
        print(*sorted(path.name for path in (disk / "run").iterdir()), flush=True)


def test_a_full_disk_at_the_picture(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    (end,) = nursery.job(full_at_the_picture, of(small_config, 4), tmp_path / "disk")
    said = check(end, 1)
    assert re.search(r"error: '.*/loss.png' could not be written \(No space left on device; 0 B are free", said)
    assert "but the checkpoint of step 4 is complete" in said
    assert "\ncheckpoints config.toml lock log.txt metrics.jsonl model\n" in said


def export_to_a_small_disk(run: Path, disk: Path) -> None:
    mount_small_disk(disk, 1 << 16)
    try:
        as_a_command(lambda: export(run, disk / "out", None))
    finally:
        print("left:", *disk.iterdir(), flush=True)


def test_a_full_disk_in_an_export(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    assert nursery.job(train, of(small_config, 1), tmp_path / "run")[0].code == 0
    (end,) = nursery.job(export_to_a_small_disk, tmp_path / "run", tmp_path / "disk")
    said = check(end, 1)
    assert f"error: '{tmp_path}/disk/out' could not be written (No space left on device; it takes " in said
    check_figures(said, most=1 << 16)
    assert "\nleft:\n" in f"\n{said}"
