"""Reading a checkpoint of a run that trains: the run deletes none that is read, and the reader loses no race."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ithaca.base.errors import RunError
from ithaca.checkpoint import lease as leasing
from ithaca.checkpoint.files import PARTIAL, CheckpointFolder, describe, rank_digests
from ithaca.checkpoint.lease import GoneError, Lease
from ithaca.config import Config
from ithaca.model.source import describe_model, load_model
from ithaca.train.folder import export as exporting
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from tests.nursery import Nursery


@pytest.fixture
def run(small_config: Config, tmp_path: Path) -> RunFolder:
    """A run folder without checkpoints."""
    run = RunFolder(tmp_path / "run")
    with run.hold():
        run.begin(small_config, load_model(small_config.model.source), torch.float32)
    run.checkpoints.mkdir()
    return RunFolder(run.path)


def save(run: RunFolder, step: int, keep: int = 1, value: float | None = None) -> None:
    """Save a checkpoint as a run of one rank does. All weights have one value: the step, unless another is given."""
    files = CheckpointFolder(run.checkpoints)
    shapes = describe_model(run.model).spec.shapes()
    fill = float(step) if value is None else value
    state = {f"weight/{name}": torch.full(tuple(shape), fill) for name, shape in shapes}
    partial = files.path(step).with_name(files.path(step).name + PARTIAL)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as no_dist=True asks for
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial, sync_files=False), no_dist=True)
    manifest = {"step": step, "files": rank_digests(partial, 0), "tensors": describe(state), "random": []}
    manifest |= {"config": "", "data": [1, 1, "bytes", 0]}
    files.complete(partial, step, json.loads(json.dumps(manifest)))
    assert files.prune(keep) == []


def check_export(run: RunFolder, folder: Path, value: float | None = None) -> int:
    """Export, and check that all weights are of the step that is named, or have the value."""
    step = export(run.path, folder, None)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, torch.full_like(tensor, float(step) if value is None else value)), (name, step)
    return step


def save_or_export(run: RunFolder, folder: Path, exports: int) -> None:
    """Rank 0 saves one checkpoint after the other. Rank 1 exports, until it has done so often enough."""
    ended = folder / "ended"
    if os.environ["RANK"] == "1":
        readings, read = [], CheckpointFolder.read

        def count(files: CheckpointFolder, step: int, wanted: dict) -> object:
            readings.append(step)
            return read(files, step, wanted)

        CheckpointFolder.read = count
        steps = list[int]()
        try:
            while len(steps) < exports or steps[0] == steps[-1]:  # the other saves meanwhile
                steps.append(check_export(run, folder / f"out{len(steps)}"))
            print(*steps, flush=True)
            assert readings == steps  # what was leased stayed: none was read twice
        finally:
            ended.touch()
        return
    step = 1
    while not ended.exists():
        step += 1
        save(run, step)
    print(step, flush=True)


def test_exports_beside_a_run_that_keeps_one_checkpoint(nursery: Nursery, run: RunFolder, tmp_path: Path) -> None:
    save(run, 1)
    saver, exporter = nursery.job(save_or_export, run, tmp_path, 12, ranks=2)
    assert (exporter.code, exporter.err) == (0, "")
    assert (saver.code, saver.err) == (0, "")
    steps = [int(word) for word in exporter.out.split()]
    assert len(steps) >= 12
    assert steps == sorted(steps)
    assert steps[-1] <= int(saver.out)
    assert "damaged" not in exporter.out


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_leased_checkpoint_stays_until_a_later_save(run: RunFolder) -> None:
    files = CheckpointFolder(run.checkpoints)
    save(run, 1)
    with files.lease(1) as lease:
        save(run, 2)
        lease.check()
        assert files.steps() == [1, 2]  # still a checkpoint, which a start may use
        assert files.damage(1, {}) is None
    save(run, 3)
    assert names(run) == ["step-00000003"]


def test_a_lease_needs_no_permission_to_write(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may write everything; so look at how the file is opened."""
    save(run, 1)
    opened = []
    true_open = os.open
    monkeypatch.setattr(leasing.os, "open", lambda path, flags: opened.append(flags) or true_open(path, flags))
    with Lease(run.checkpoints / "step-00000001"):
        assert [flags & os.O_ACCMODE for flags in opened] == [os.O_RDONLY]


def test_a_checkpoint_that_goes_between_listing_and_leasing(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted before it is opened, and between opening and locking."""
    save(run, 1)
    newer = iter((2, 3))
    steps, flock = CheckpointFolder.steps, fcntl.flock

    def listed_then_gone(files: CheckpointFolder) -> list[int]:
        found = steps(files)
        monkeypatch.setattr(CheckpointFolder, "steps", steps)
        save(run, next(newer))
        return found

    def gone_then_locked(file: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            monkeypatch.setattr(leasing.fcntl, "flock", flock)
            save(run, next(newer))
        flock(file, how)

    monkeypatch.setattr(exporting.RunFolder, "has_checkpoints", lambda _: True)
    monkeypatch.setattr(CheckpointFolder, "steps", listed_then_gone)
    monkeypatch.setattr(leasing.fcntl, "flock", gone_then_locked)
    assert check_export(run, tmp_path / "out") == 3
    assert "damaged" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.parametrize("when", ["checked", "read"])
def test_a_checkpoint_that_someone_takes_away(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
    when: str,
) -> None:
    """A lease binds the run alone; what someone else does is noticed, and the newest checkpoint read instead."""
    save(run, 1)
    read, damage, newer = CheckpointFolder.read, CheckpointFolder.damage, 2 if how == "deleted" else 1

    def take_away(moment: str) -> None:
        nonlocal when
        if when == moment:
            when = "never again"
            shutil.rmtree(run.checkpoints / "step-00000001")
            save(run, newer, value=7.0)

    def read_then_lose(files: CheckpointFolder, step: int, wanted: dict) -> object:
        weights = read(files, step, wanted)
        yield next(weights)
        take_away("read")
        yield from weights

    def lose_then_check(files: CheckpointFolder, step: int, wanted: dict) -> str | None:
        take_away("checked")
        return damage(files, step, wanted)

    monkeypatch.setattr(CheckpointFolder, "read", read_then_lose)
    monkeypatch.setattr(CheckpointFolder, "damage", lose_then_check)
    assert check_export(run, tmp_path / "out", 7.0) == newer
    assert when == "never again"
    assert "damaged" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_lease_on_what_is_gone(run: RunFolder) -> None:
    with pytest.raises(GoneError), CheckpointFolder(run.checkpoints).lease(1):
        pass
    (run.checkpoints / "step-00000001").mkdir()
    with CheckpointFolder(run.checkpoints).lease(1):
        pass  # its damage is told by whoever reads it


def test_a_disk_without_locks(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    save(run, 1)
    monkeypatch.setattr(leasing.fcntl, "flock", refuse)
    assert check_export(run, tmp_path / "out") == 1
    assert "has no locks (Function not implemented): do not train in this run meanwhile" in capsys.readouterr().out
    save(run, 2)
    assert names(run) == ["step-00000002"]


def test_a_checkpoint_of_a_step_that_is_there_already(run: RunFolder) -> None:
    """It is neither deleted nor changed under a reader."""
    files = CheckpointFolder(run.checkpoints)
    save(run, 4)
    before = (files.path(4) / "manifest.json").stat().st_ino
    for number in (1, 2):
        with files.lease(4) as lease:
            save(run, 4)
            with pytest.raises(GoneError):
                lease.check()
        assert len(names(run)) == number + 1
    assert names(run) == ["step-00000004", "step-00000004.replaced", "step-00000004.replaced2"]
    assert (run.checkpoints / "step-00000004.replaced" / "manifest.json").stat().st_ino == before


KILLED = """
import os, shutil, sys
from pathlib import Path
from ithaca.checkpoint.files import CheckpointFolder
shutil.rmtree = lambda path: os._exit(9)  # killed in the middle of deleting
CheckpointFolder(Path(sys.argv[1])).prune(1)
"""


def test_a_deletion_that_is_killed(run: RunFolder) -> None:
    files = CheckpointFolder(run.checkpoints)
    for step in (1, 2):
        save(run, step, keep=2)
    assert subprocess.run([sys.executable, "-c", KILLED, str(run.checkpoints)], check=False).returncode == 9
    assert files.steps() == [2]
    assert run.last_checkpoint() == 2
    assert names(run) == ["step-00000001.deleted", "step-00000002"]
    files.clean()
    assert names(run) == ["step-00000002"]


def test_names_that_are_no_checkpoints(run: RunFolder) -> None:
    save(run, 4)
    for name in ("step-5", "step-00000006.partial", "step-²", "step-", "step-0000000007", "other"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-00000008").write_text("")
    assert CheckpointFolder(run.checkpoints).steps() == [4]
    assert run.last_checkpoint() == 4


def test_what_is_wrong_with_each_damaged_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    for step in range(1, 7):
        save(run, step, keep=9)
    paths = [CheckpointFolder(run.checkpoints).path(step) for step in range(1, 7)]
    (paths[0] / "manifest.json").unlink()
    (paths[1] / "manifest.json").write_text("{}")
    with (paths[2] / "__0_0.distcp").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.truncate(size - 5)
    (paths[3] / "__0_0.distcp").write_bytes(bytes(size))
    (paths[4] / "__0_0.distcp").unlink()
    shutil.rmtree(paths[5])
    shutil.copytree(paths[3], paths[5])
    with pytest.raises(RunError) as caught:
        export(run.path, tmp_path / "out", None)
    for words in (
        f"no checkpoint in '{run.checkpoints}' is sound",
        "step 1: manifest.json: No such file or directory;",
        "step 2: manifest.json is not what was written;",
        f"step 3: __0_0.distcp has {size - 5:,} bytes, not {size:,};",
        "step 4: __0_0.distcp is not what was written;",
        "step 5: __0_0.distcp: No such file or directory;",
        "step 6: manifest.json is of step 4)",
        "copy one again from a backup",
    ):
        assert words in str(caught.value)
    assert "fresh" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_deleted_yet_does_not_stop_a_start(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where a file that someone has open keeps its folder."""
    files, kept = CheckpointFolder(run.checkpoints), run.checkpoints / "step-00000001.deleted" / ".nfs01"
    kept.parent.mkdir()
    kept.touch()
    rmdir = os.rmdir

    def refuse(path: str, **more: int) -> None:
        if str(path).endswith(".deleted"):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        files.clean()
    assert kept.parent.exists()
    files.clean()
    assert not kept.parent.exists()
