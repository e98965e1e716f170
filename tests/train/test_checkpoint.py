"""Checkpoints that are damaged, or cannot be written, and what a run does about it."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ithaca.base.errors import RunError
from ithaca.checkpoint import snapshot
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config
from ithaca.data.preparation.prepare import prepare
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def finished(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints of 4 and 8."""
    path = tmp_path_factory.mktemp("finished") / "run"
    short = replace(small_config, train=replace(small_config.train, steps=8))
    assert [end.code for end in nursery.job(train, short, path, ranks=2)] == [0, 0]
    assert [folder.name for folder in sorted((path / "checkpoints").iterdir())] == ["step-00000004", "step-00000008"]
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


IDENTITY = {"tokens": 5, "documents": 1, "sha256": ""}
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit": lambda f: flip(f / "__1_0.distcp"),
    "the end": lambda f: (f / "__0_0.distcp").write_bytes((f / "__0_0.distcp").read_bytes()[:-1]),
    "a file": lambda f: (f / "__1_0.distcp").unlink(),
    "the metadata": lambda f: flip(f / ".metadata"),
    "the manifest": lambda f: (f / "manifest.json").unlink(),
    "half the manifest": lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text()[:-40]),
    "the manifest's sense": lambda f: (f / "manifest.json").write_text('{"files": 5}'),
    "its step": lambda f: edit_manifest(f, step=4),
    "its model": lambda f: edit_manifest(f, tensors={}),
    "a digit of the manifest": lambda f: replace_text(f / "manifest.json", "warmup = 3", "warmup = 4"),
    "the manifest's checksum": lambda f: replace_text(f / "manifest.json", checksum(f), checksum(f)[::-1]),
    "the type of its files": lambda f: edit_manifest(f, files=5),
    "the type of a size": lambda f: edit_manifest(f, files={"__0_0.distcp": ["5", ""]}),
    "its random states": lambda f: edit_manifest(f, random=[5, 5]),
    "a random state": lambda f: edit_manifest(f, random=[["zz"], ["zz"]]),
    "its configuration": lambda f: edit_manifest(f, config=5),
    "its data": lambda f: edit_manifest(f, data={"tokens": 5}),
    "a share of its data": lambda f: edit_manifest(f, data={"mix": [{**IDENTITY, "share": "half"}]}),
    "a source of its data": lambda f: edit_manifest(f, data={"mix": [{"share": 0.5}]}),
    "its updates": lambda f: edit_manifest(f, updates="all"),
    "more updates than steps": lambda f: edit_manifest(f, updates=10**30),
    "its passes": lambda f: edit_manifest(f, passes_without_labels=[]),
    "its model's sizes": lambda f: edit_manifest(f, model=[]),
    "a file elsewhere": lambda f: edit_manifest(f, files={"/dev/zero": [0, ""]}),
    "a device": lambda f: replace_by_a_device(f / "__1_0.distcp"),
}


def checksum(folder: Path) -> str:
    return json.loads((folder / "manifest.json").read_text())["sha256"]


def replace_text(file: Path, old: str, new: str) -> None:
    """Change a text that comes once, and not the size of the file."""
    text = file.read_text()
    assert text.count(old) == 1
    assert len(old) == len(new)
    file.write_text(text.replace(old, new))


def replace_by_a_device(file: Path) -> None:
    """One whose bytes never end."""
    file.unlink()
    file.symlink_to("/dev/zero")
    edit_manifest(file.parent, files={file.name: [0, ""]})


def edit_manifest(folder: Path, **changes: object) -> None:
    """A manifest that is sound in itself, but says something else."""
    from ithaca.checkpoint.files import text_sha256

    manifest = {**json.loads((folder / "manifest.json").read_text()), **changes}
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))


def test_damaged_checkpoints_are_passed_over(nursery, small_config, tmp_path: Path) -> None:
    """All that are newer than the last sound one, each damaged in another way."""
    often = replace(small_config, run=replace(small_config.run, checkpoint_every=1, keep=99))
    steps, run = len(DAMAGE) + 4, tmp_path / "run"
    for end in nursery.job(train, replace(often, train=replace(often.train, steps=steps)), run, ranks=2):
        assert end.code == 0, end.err
    before = RunFolder(run).read_metrics()
    for step, damage in enumerate(DAMAGE.values(), start=5):
        damage(run / "checkpoints" / f"step-{step:08d}")
    ends = nursery.job(train, replace(often, train=replace(often.train, steps=steps + 1)), run, ranks=2)
    assert [end.code for end in ends] == [0, 0], ends[0].err
    for step in range(5, steps + 1):
        assert f"warning: the checkpoint of step {step} is damaged" in ends[0].out
    assert "Continuing from the checkpoint of step 4" in ends[0].out
    after = RunFolder(run).read_metrics()
    assert [line["step"] for line in after] == list(range(1, steps + 2))
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert sum(name.endswith(".damaged") for name in names) == len(DAMAGE)
    assert len(names) == len(DAMAGE) + steps + 1
    # The same numbers again as far as the learning rate, whose schedule is now longer, was the same
    assert after[:4] == before[:4]


def test_none_is_sound(nursery, small_config, run: Path) -> None:
    for folder in (run / "checkpoints").iterdir():
        flip(folder / "__0_0.distcp")
    for _ in range(2):  # and a second start does not begin anew either
        for end in nursery.job(raising, small_config, run, ranks=2):
            assert end.code == 1
            damage = "__0_0.distcp is not what was written"
            assert f"no checkpoint in '{run}/checkpoints' is sound (step 4, 8: {damage})" in end.err
            assert "fresh" not in end.err


def raising(config: Config, path: Path) -> None:
    """As the command line does: a user's mistake is a sentence and a code."""
    import sys

    from ithaca.base.errors import IthacaError

    try:
        train(config, path)
    except IthacaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)


def on_a_small_disk(config: Config, path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    raising(config, path)


def test_a_full_disk(nursery, small_config, tmp_path: Path) -> None:
    path = tmp_path / "run"
    short = replace(small_config, train=replace(small_config.train, steps=8))
    ends = nursery.job(on_a_small_disk, short, path, ranks=2)
    assert [end.code for end in ends] == [1, 1]
    assert "warning: the checkpoint of step 4 could not be written" in ends[0].out
    assert re.search(r"\(File too large; it takes \d+ KiB, and [\d.]+ GiB are free on its disk\);", ends[0].out)
    assert "training continues" in ends[0].out
    assert "error: the checkpoint of step 8 could not be written (File too large; it takes" in ends[0].err
    assert ends[0].err == ends[1].err
    assert "Traceback" not in ends[0].err
    assert not list((path / "checkpoints").iterdir())
    assert len(RunFolder(path).read_metrics()) == 8
    # With room again the run begins where it must
    assert [end.code for end in nursery.job(train, short, path, ranks=2)] == [0, 0]
    assert len(RunFolder(path).read_metrics()) == 8


def test_no_room_for_a_copy_on_the_host(nursery, small_config, tmp_path: Path) -> None:
    for end in nursery.job(on_a_small_host, small_config, tmp_path / "run", ranks=2):
        assert end.code == 0, end.err
    ends = nursery.job(train, small_config, tmp_path / "other", ranks=2)
    assert ends[0].code == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "training will wait while checkpoints are written" in log
    assert "training will wait" not in (tmp_path / "other" / "log.txt").read_text()
    found, wanted = (RunFolder(tmp_path / name).read_metrics() for name in ("run", "other"))
    assert [line["loss"] for line in found] == [line["loss"] for line in wanted]


def test_no_copy_on_one_rank(nursery, small_config, tmp_path: Path) -> None:
    """Memory that seemed free is not to be had when it is taken: nothing is lost for that."""
    for end in nursery.job(without_a_copy, small_config, tmp_path / "run", ranks=2):
        assert end.code == 0, end.err
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "no copy of the state for checkpoints (not registered): training waits while they are written" in log
    assert len(RunFolder(tmp_path / "run").read_metrics()) == small_config.train.steps
    assert RunFolder(tmp_path / "run").has_checkpoints()


def without_a_copy(config: Config, path: Path) -> None:
    import os

    def refuse(*_: object) -> None:
        raise RuntimeError("not registered")

    if os.environ["RANK"] == "1":
        snapshot.Slab = refuse
    train(config, path)


def on_a_small_host(config: Config, path: Path) -> None:
    import psutil

    whole = psutil.virtual_memory()
    psutil.virtual_memory = lambda: whole._replace(available=1000)
    train(config, path)


def test_a_loss_that_is_no_number(nursery, small_config, tmp_path: Path) -> None:
    wild = replace(small_config, train=replace(small_config.train, learning_rate=1e38, clip=1e38, warmup=0))
    for end in nursery.job(raising, wild, tmp_path / "run", ranks=2):
        assert end.code == 1
        assert "error: the loss of step 2 is nan" in end.err
        assert "there is no checkpoint yet" in end.err
        assert "Traceback" not in end.err


def test_data_that_have_changed(nursery, small_config, tmp_path: Path) -> None:
    for name, text in (("one", "the wine-dark sea " * 99), ("other", "the rosy-fingered dawn " * 99)):
        (tmp_path / name).write_text(text)
        assert nursery.command("data", name, "--out", f"{name}.tokens", folder=tmp_path).code == 0
    config = replace(small_config, data=replace(small_config.data, source=str(tmp_path / "one.tokens")))
    short = replace(config, train=replace(config.train, steps=4))
    assert nursery.job(train, short, tmp_path / "run")[0].code == 0
    (tmp_path / "other.tokens").rename(tmp_path / "one.tokens")
    (end,) = nursery.job(raising, config, tmp_path / "run")
    assert end.code == 2
    assert "the data have changed since the checkpoint of step 4" in end.err


def test_a_folder_of_checkpoints_that_cannot_be_read_is_no_empty_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    files = CheckpointFolder(run / "checkpoints")
    assert files.steps()
    assert CheckpointFolder(run / "none").steps() == []
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RunError, match=r"cannot be read \(Input/output error"):
        RunFolder(run).has_checkpoints()
    assert "cannot be read" in files.prune(1)[0]  # a run that trains goes on


def test_a_refused_start_deletes_no_checkpoint(nursery, small_config, run: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(before) > 1
    (tmp_path / "other.txt").write_text("other data " * 500)
    prepare([tmp_path / "other.txt"], tmp_path / "other.tokens")
    data = replace(small_config.data, source=str(tmp_path / "other.tokens"))
    (end, _) = nursery.job(train, replace(small_config, data=data, run=replace(small_config.run, keep=1)), run, ranks=2)
    assert "the data have changed since the checkpoint of step 8" in end.err
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def test_old_checkpoints_go_at_a_start(nursery, small_config, run: Path) -> None:
    """One that was leased at the last save is deleted now, but only after a newer one has proved to be sound."""
    last = replace(small_config, train=replace(small_config.train, steps=8), run=replace(small_config.run, keep=1))
    damaged = Path(shutil.copytree(run, run.with_name("damaged")))
    flip(damaged / "checkpoints" / "step-00000008" / "__1_0.distcp")
    assert nursery.job(train, last, run, ranks=2)[0].code == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000008"]
    (end, _) = nursery.job(train, last, damaged, ranks=2)
    assert "Continuing from the checkpoint of step 4" in end.out
    assert [line["loss"] for line in RunFolder(damaged).read_metrics()] == [
        line["loss"] for line in RunFolder(run).read_metrics()
    ]


def test_a_run_that_is_complete(nursery, small_config, run: Path) -> None:
    short = replace(small_config, train=replace(small_config.train, steps=8))
    assert nursery.job(train, short, run, ranks=2)[0].code == 0
    fewer = replace(small_config, train=replace(small_config.train, steps=5))
    ends = nursery.job(raising, fewer, run, ranks=2)
    assert "error: the run has done 8 steps already, and train.steps is 5" in ends[0].err
    (run / "metrics.jsonl").unlink()
    assert nursery.job(train, short, run, ranks=2)[0].code == 0


def test_export_leaves_a_running_job_alone(nursery, run: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "step-00000012.partial").mkdir()
    flip(run / "checkpoints" / "step-00000008" / "__0_0.distcp")
    (end,) = nursery.job(export, run, tmp_path / "out", None)
    assert end.code == 0, end.err
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000008", "step-00000012.partial"]


def test_export_keeps_each_dtype(nursery, small_config, tmp_path: Path) -> None:
    source = make_model("qwen3", torch.bfloat16, vocab_size=256, num_hidden_layers=1)
    source.model.norm.float()
    config = replace(small_config, model=replace(small_config.model, source=str(save(source, tmp_path / "in"))))
    short = replace(config, train=replace(config.train, steps=1))
    assert nursery.job(train, short, tmp_path / "run")[0].code == 0
    assert nursery.job(export, tmp_path / "run", tmp_path / "out", None)[0].code == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert {name: tensor.dtype for name, tensor in before.items()} == {name: t.dtype for name, t in after.items()}
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def losing_metrics(config: Config, path: Path) -> None:
    """The disk of the metrics is full from the third step on."""
    from ithaca.train.report.sinks import JsonLines

    write = JsonLines.write

    def fail(self: JsonLines, metrics: dict) -> None:
        if metrics["step"] >= 3:
            raise OSError(28, "No space left on device")
        write(self, metrics)

    JsonLines.write = fail
    train(config, path)


def test_metrics_that_cannot_be_written(nursery, small_config, tmp_path: Path) -> None:
    short = replace(small_config, train=replace(small_config.train, steps=4))
    ends = nursery.job(losing_metrics, short, tmp_path / "run", ranks=2)
    assert [end.code for end in ends] == [0, 0], ends[0].err
    assert "warning: the metrics of step 3 could not be written" in ends[0].out
    assert RunFolder(tmp_path / "run").has_checkpoints()


def test_export(nursery, small_config, run: Path, tmp_path: Path) -> None:
    (end,) = nursery.job(export, run, tmp_path / "out", None)
    assert end.code == 0, end.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    before = transformers.AutoModelForCausalLM.from_pretrained(small_config.model.source)
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert all(changed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "qwen3"


def test_what_a_run_reports(nursery, small_config, tmp_path: Path) -> None:
    reporting = replace(small_config, run=replace(small_config.run, report="tensorboard"))
    (end,) = nursery.job(train, reporting, tmp_path / "run")
    assert end.code == 0, end.err
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    (line, *_) = RunFolder(tmp_path / "run").read_metrics()
    assert {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second_per_rank", "host_bytes"} <= line.keys()
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_damaged_checkpoint_takes_no_other_s_place(tmp_path: Path) -> None:
    files = CheckpointFolder(tmp_path)
    for number in range(3):
        files.path(4).mkdir()
        (files.path(4) / str(number)).touch()
        files.set_aside(4)
    found = {path.parent.name: path.name for path in tmp_path.glob("*/*")}
    assert found == {f"step-00000004.damaged{ending}": number for ending, number in (("", "0"), ("2", "1"), ("3", "2"))}
