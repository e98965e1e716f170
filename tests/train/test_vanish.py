"""Files of a run that vanish, shrink or turn into something else, before a start and while the run trains."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.errors import ConfigError, IthacaError, RunError
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.config import Config
from ithaca.train.folder import run_folder
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.nursery import Ended, Nursery
from tests.train.test_nodes import wait_for_steps
from tests.train.test_survive import words

FILES = ("lock", "config.toml", "metrics.jsonl", "log.txt", "loss.png")
FILES = (*FILES, *(f"{name}.partial" for name in FILES))


def make_folder(file: Path, outside: Path) -> None:  # noqa: ARG001
    file.mkdir()


def make_pipe(file: Path, outside: Path) -> None:  # noqa: ARG001
    os.mkfifo(file)


def make_link(file: Path, outside: Path) -> None:
    file.symlink_to(outside)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [make_folder, make_pipe, make_link])
def test_something_else_where_a_run_writes(tmp_path: Path, name: str, make: Callable[[Path, Path], None]) -> None:
    run, outside = RunFolder(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("not the run's")
    run.path.mkdir()
    run.config.write_text("")
    (run.path / name).unlink(missing_ok=True)
    make(run.path / name, outside)
    run.begun = lambda: True  # pyrefly: ignore
    kind = {make_folder: "a folder", make_pipe: "a device or a pipe", make_link: "a link"}[make]
    with pytest.raises(RunError) as caught:
        run.hold()
    assert f"'{run.path / name}' is {kind}, and the run writes a file there: move it away" in str(caught.value)
    assert outside.read_text() == "not the run's"


def refuse_to_rename(file: Path, _: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left", str(file))


def test_a_disk_that_does_not_answer_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.toml seems to be gone and cannot be written: that is said once, and tried again."""
    run = RunFolder(tmp_path)
    run.hold()
    run.config.write_text("as it was")
    stat = os.stat

    def refuse(path: Path | str, **more: bool) -> os.stat_result:
        if Path(path).name == "config.toml":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert run.mend(Config()) is None
    assert run.config.read_text() == "as it was"
    run.config.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse_to_rename)
        assert "could not be written (No space left" in str(run.mend(Config()))
        assert run.mend(Config()) is None
    assert "it is written again" in str(run.mend(Config()))


def as_a_command(work: Callable[[], object]) -> None:
    """End as the command line does."""
    try:
        work()
    except IthacaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)


def disturbed(config: Config, path: Path, disturb: Callable[[Path], object], step: int) -> None:
    """Train; before the metrics of a step, with all checkpoints complete, something happens to the run folder."""
    publish = TrainingRun._publish

    def publish_disturbed(run: TrainingRun, metrics: dict[str, Any]) -> None:
        if run.first and metrics["step"] == step:
            run.checkpoints.wait()
            disturb(path)
        publish(run, metrics)

    TrainingRun._publish = publish_disturbed
    as_a_command(lambda: train(config, path))


def of(config: Config, steps: int, every: int = 4) -> Config:
    return replace(
        config, train=replace(config.train, steps=steps), run=replace(config.run, checkpoint_every=every, keep=9)
    )


def check(ends: list[Ended], code: int) -> str:
    """Check how all ranks ended, without a traceback. Return what rank 0 printed."""
    for end in ends:
        assert end.code == code, end
        assert "Traceback" not in end.err
    return ends[0].out + ends[0].err


def delete(path: Path) -> None:
    shutil.rmtree(path)


def rename(path: Path) -> None:
    path.rename(path.with_name("renamed"))


def put_another_in_its_place(path: Path) -> None:
    rename(path)
    shutil.copytree(path.with_name("renamed"), path)


@pytest.mark.parametrize("happens", [delete, rename, put_another_in_its_place])
@pytest.mark.parametrize("step", [2, 6, 8])
def test_a_run_folder_that_goes(
    nursery: Nursery, small_config: Config, tmp_path: Path, happens: Callable[[Path], None], step: int
) -> None:
    """Before the first checkpoint, after one, and at the last step."""
    path, config = tmp_path / "run", of(small_config, 8)
    ends = nursery.job(disturbed, config, path, happens, step, ranks=2)
    said = check(ends, 1)
    if happens is put_another_in_its_place:
        assert f"error: '{path}/lock' was deleted or replaced while the run trained" in said
        assert files_of(path) == files_of(tmp_path / "renamed")
    else:
        assert f"error: the run folder '{path}' was deleted or renamed while the run trained" in said
        assert not path.exists()
    assert f"the run stopped at step {step} and could not save it" in said
    assert "fresh" not in said
    if happens is rename and step == 6:
        check(nursery.job(train, config, tmp_path / "renamed", ranks=2), 0)
        check(nursery.job(train, config, tmp_path / "alone", ranks=2), 0)
        assert losses(tmp_path / "renamed") == losses(tmp_path / "alone")


def files_of(path: Path) -> list[tuple[str, int]]:
    """Return names and sizes, but for files that the run has open, which grow under their new name."""
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    kept = [file for file in files if file.name not in ("metrics.jsonl", "log.txt")]
    return [(str(file.relative_to(path)), file.stat().st_size) for file in kept]


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(path).read_metrics()]


def lost_while_saving(config: Config, path: Path, stage: str) -> None:
    """Train; the run folder is renamed while the first checkpoint is written."""
    whole = getattr(Checkpoints, stage)

    def part(checkpoints: Checkpoints, *args: Any) -> None:
        if stage == "_begin":
            whole(checkpoints, *args)
            rename(path)
        else:
            rename(path)
            whole(checkpoints, *args)

    setattr(Checkpoints, stage, part)
    as_a_command(lambda: train(config, path))


@pytest.mark.parametrize("stage", ["_begin", "_complete"])
def test_a_run_folder_that_goes_while_it_is_written(
    nursery: Nursery, small_config: Config, tmp_path: Path, stage: str
) -> None:
    path = tmp_path / "run"
    said = check(nursery.job(lost_while_saving, of(small_config, 4), path, stage, ranks=2), 1)
    assert "could not be written (No such file or directory" in said or "was deleted or renamed" in said
    assert not path.exists()
    assert not RunFolder(tmp_path / "renamed").has_checkpoints()


def delete_config(path: Path) -> None:
    (path / "config.toml").unlink()


def test_a_configuration_that_is_deleted(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path, config = tmp_path / "run", of(small_config, 4)
    said = check(nursery.job(disturbed, config, path, delete_config, 2, ranks=2), 0)
    assert f"warning: '{path}/config.toml' was deleted while the run trained: it is written again" in said
    assert RunFolder(path).saved_config().train.steps == 4
    check(nursery.job(train, config, path, ranks=2), 0)


def delete_lock(path: Path) -> None:
    (path / "lock").unlink()


def try_the_lock(path: Path) -> None:
    """Delete the lock. After the next step a second job finds the folder in use as before."""
    delete_lock(path)
    publish = TrainingRun._publish
    run_folder.LOCK_SECONDS = 0

    def publish_then_try(run: TrainingRun, metrics: dict[str, Any]) -> None:
        publish(run, metrics)
        with pytest.raises(RunError, match="in use by another job"):
            RunFolder(path).hold()
        print("the second job was refused", flush=True)
        TrainingRun._publish = publish

    TrainingRun._publish = publish_then_try


def test_a_lock_that_is_deleted_is_held_again(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = check(nursery.job(disturbed, of(small_config, 4), path, try_the_lock, 2), 0)
    assert f"warning: '{path}/lock' was deleted while the run trained: the folder is locked again" in said
    assert "the second job was refused" in said
    RunFolder(path).hold().close()


HELD = []


def take_over(path: Path) -> None:
    """Someone deletes the lock, and a second job begins before the first one looks."""
    delete_lock(path)
    HELD.append(RunFolder(path).hold())


def test_a_lock_that_another_job_has_taken(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = check(nursery.job(disturbed, of(small_config, 8), path, take_over, 6, ranks=2), 1)
    assert f"error: '{path}/lock' was deleted or replaced while the run trained, so the folder may be another" in said
    assert [line["step"] for line in RunFolder(path).read_metrics()] == [1, 2, 3, 4, 5]
    assert RunFolder(path).last_checkpoint() == 4


def test_a_lock_whose_file_is_replaced_while_a_job_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it locks at last is the file that the next job would find, too."""
    run = RunFolder(tmp_path / "run")
    held = run.hold()
    flock = run_folder.fcntl.flock

    def replaced_then_locked(file: Any, how: int) -> None:
        monkeypatch.setattr(run_folder.fcntl, "flock", flock)
        held.close()
        run.lock.unlink()
        flock(file, how)

    monkeypatch.setattr(run_folder.fcntl, "flock", replaced_then_locked)
    with RunFolder(run.path).hold() as second:
        assert os.path.samestat(os.fstat(second.fileno()), run.lock.stat())
        monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0)
        with pytest.raises(RunError, match="in use by another job"):
            RunFolder(run.path).hold()


def test_checkpoints_without_a_configuration(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has checkpoints but no config\.toml: put it back to continue"):
        run.hold()


class Become:
    """Let a file of the run folder become something else."""

    def __init__(self, name: str, make: Callable[[Path, Path], None] | None):
        self.name, self.make = name, make

    def __call__(self, path: Path) -> None:
        file = path / self.name
        if file.exists():
            file.rename(path.parent / f"old-{self.name}")
        if self.make:
            self.make(file, path.parent / "outside")


def test_metrics_that_are_deleted(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = check(nursery.job(disturbed, of(small_config, 5), path, Become("metrics.jsonl", None), 3, ranks=2), 0)
    assert said.count(f"warning: '{path}/metrics.jsonl' was deleted or replaced: a new one begins with step 3") == 1
    assert f"warning: '{path}/metrics.jsonl' has the metrics of 3 of 5 steps" in said
    assert [line["step"] for line in RunFolder(path).read_metrics()] == [3, 4, 5]
    assert "Done: loss" in said


@pytest.mark.parametrize("make", [make_folder, make_pipe, make_link])
def test_metrics_that_become_something_else(
    nursery: Nursery, small_config: Config, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("")
    said = check(nursery.job(disturbed, of(small_config, 5), path, Become("metrics.jsonl", make), 3, ranks=2), 1)
    kind = {make_folder: "a folder", make_pipe: "a device or a pipe", make_link: "a link"}[make]
    assert said.count(f"warning: the metrics of step 3 could not be written (it is {kind}); training continues") == 1
    assert said.count("could not be written") == 1
    assert (
        f"error: '{path}/metrics.jsonl' cannot be read (it is {kind}), but the checkpoint of step 5 is complete" in said
    )
    assert outside.read_text() == ""
    assert RunFolder(path).last_checkpoint() == 5
    assert len((tmp_path / "old-metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("make", [None, make_folder, make_pipe, make_link])
def test_a_log_that_goes(
    nursery: Nursery, small_config: Config, tmp_path: Path, make: Callable[[Path, Path], None] | None
) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("")
    ends = nursery.job(disturbed, of(small_config, 5), path, Become("log.txt", make), 3, ranks=2)
    said = check(ends, 0 if make is None else 1)
    if make is None:
        assert said.count(f"warning: '{path}/log.txt' was deleted or replaced: a new one begins here") == 1
        assert "Done: loss" in (path / "log.txt").read_text()
    else:
        assert said.count(f"warning: '{path}/log.txt' could not be written (it is a") == 1
        assert said.count(f"error: the log '{path}/log.txt' could not be written (it is a") == 1
        assert "but the checkpoint of step 5 is complete" in said
        assert outside.read_text() == ""
    assert "Done: loss" in said


def test_a_picture_that_cannot_be_drawn(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    said = check(nursery.job(disturbed, of(small_config, 5), path, Become("loss.png", make_folder), 3, ranks=2), 1)
    assert f"error: '{path}/loss.png' could not be written (Is a directory" in said
    assert "but the checkpoint of step 5 is complete" in said
    assert "Done: loss" in said
    assert not list(path.glob("*.partial"))


def make_file(file: Path, outside: Path) -> None:  # noqa: ARG001
    file.write_text("")


def test_checkpoints_that_become_a_file(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    happens = Become("checkpoints", make_file)
    said = check(nursery.job(disturbed, of(small_config, 5), path, happens, 3, ranks=2), 1)
    assert "warning: the checkpoint of step 4 could not be written (Not a directory: " in said
    assert "error: the checkpoint of step 5 could not be written (Not a directory: " in said
    assert "there is no checkpoint yet: fix the cause and continue with ithaca train --run" in said
    said = check(nursery.job(as_a_command_trains, of(small_config, 5), path, ranks=2), 1)
    assert f"error: '{path}/checkpoints' cannot be used as the folder of checkpoints" in said


def as_a_command_trains(config: Config, path: Path) -> None:
    as_a_command(lambda: train(config, path))


def test_checkpoints_that_are_deleted(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """The folder with all of them, after the first one was written: the next one is written as before."""
    path = tmp_path / "run"
    check(nursery.job(disturbed, of(small_config, 10), path, Become("checkpoints", None), 6, ranks=2), 0)
    assert [path.name for path in sorted((path / "checkpoints").iterdir())] == ["step-00000008", "step-00000010"]


@dataclass(frozen=True)
class RenameAndWait:
    """Rename the run folder when it has metrics of some steps."""

    path: Path

    def __call__(self, _: list[int]) -> None:
        wait_for_steps(self.path, 2)
        rename(self.path)


def test_a_run_folder_that_goes_is_one_sentence_of_the_command(
    nursery: Nursery, small_model: Path, tmp_path: Path
) -> None:
    """The launcher starts nothing again."""
    path = tmp_path / "run"
    job = (words(path, small_model, "train.steps=1000000"), {})
    (end,) = nursery.commands(job, folder=tmp_path, disturb=RenameAndWait(path))
    assert end.code == 1
    assert len(end.err.splitlines()) == 1
    assert f"error: the run folder '{path}' was deleted or renamed while the run trained" in end.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["renamed"]
