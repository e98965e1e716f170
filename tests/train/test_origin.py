"""`ithaca train --from RUN`: a new run from another run's checkpoint, with AdamW's state or without."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ithaca.checkpoint.files import CheckpointFolder, text_sha256
from ithaca.config import Config
from ithaca.optimizer.host_adamw import MOMENTS
from ithaca.train.folder.export import export
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loader import Loader
from ithaca.train.loop import TrainingRun
from ithaca.train.ranks.stop import StopRequest
from ithaca.train.run import train
from ithaca.train.setup.origin import Origin
from tests.nursery import Ended, Nursery
from tests.train.test_unlearned import same, state


@pytest.fixture(scope="module")
def config(small_config: Config) -> Config:
    """Eight steps at one rate, in float64."""
    options = replace(small_config.train, steps=8, learning_rate=0.01, warmup=0, schedule="wsd", decay=0.0)
    often = replace(small_config.run, checkpoint_every=4, keep=99)
    return replace(small_config, model=replace(small_config.model, dtype="float64"), train=options, run=often)


@pytest.fixture(scope="module")
def whole(nursery: Nursery, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, undisturbed."""
    path = tmp_path_factory.mktemp("origin") / "whole"
    (end,) = nursery.job(train, config, path)
    assert end.code == 0, end.err
    return path


@pytest.fixture
def half(whole: Path, tmp_path: Path) -> Path:
    """The same run as it was after four steps."""
    path = Path(shutil.copytree(whole, tmp_path / "half"))
    shutil.rmtree(path / "checkpoints" / "step-00000008")
    return path


def shifted(config: Config, path: Path, origin: Origin | None, stop_after: int = 0) -> None:
    """Train on the data from the fifth step on. Stop after some steps as Ctrl-C does."""
    draw = Loader._draw
    Loader._draw = lambda loader, step: draw(loader, step + 4)
    if stop_after:
        asked = iter(range(1, 9))
        StopRequest.agreed = lambda _: next(asked) == stop_after
    train(config, path, origin=origin)


def four(config: Config, every: int = 0) -> Config:
    return replace(config, train=replace(config.train, steps=4), run=replace(config.run, checkpoint_every=every))


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(path).read_metrics()]


def fine(ends: list[Ended]) -> str:
    for end in ends:
        assert end.code == 0, end.out + end.err
    return ends[0].out


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_optimizer_it_is_the_run_undisturbed(
    nursery: Nursery, config: Config, whole: Path, half: Path, tmp_path: Path, ranks: int
) -> None:
    new = tmp_path / "new"
    said = fine(nursery.job(shifted, four(config), new, Origin(half, optimizer=True), ranks=ranks))
    wanted = losses(whole)[4:]
    assert losses(new) == (wanted if ranks == 1 else pytest.approx(wanted, rel=1e-9))
    assert f"Started from the checkpoint of step 4 of {half.resolve()}: weights and AdamW's state\n" in said
    assert f"parameters, weights of {half.resolve()}, in float64" in said.splitlines()[0]
    if ranks == 1:
        assert same(state(new, 4), state(whole, 8))
    assert [line["step"] for line in RunFolder(new).read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_it_the_weights_alone(
    nursery: Nursery, config: Config, whole: Path, half: Path, tmp_path: Path, ranks: int
) -> None:
    new = tmp_path / "new"
    said = fine(nursery.job(shifted, four(config), new, Origin(half), ranks=ranks))
    found, wanted = losses(new), losses(whole)[4:]
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    assert found[1] != pytest.approx(wanted[1], rel=1e-6)
    assert "weights alone, so AdamW starts at zero\n" in said


def show_state(config: Config, path: Path, origin: Origin) -> None:
    """Start a run, and print what the optimizer has instead of the first step."""

    def steps(run: TrainingRun, _: object) -> bool:
        states = run.optimizer.state.values()
        moments = sum(float(found[name].to_local().abs().sum()) for found in states for name in MOMENTS)
        print("has", moments > 0, {float(found["step"]) for found in states}, flush=True)
        raise SystemExit(0)

    TrainingRun._steps = steps
    train(config, path, origin=origin)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_adamw_has_at_the_start(nursery: Nursery, config: Config, half: Path, tmp_path: Path, ranks: int) -> None:
    for number, (optimizer, wanted) in enumerate(((False, "has False {0.0}"), (True, "has True {4.0}"))):
        ends = nursery.job(show_state, config, tmp_path / f"{number}", Origin(half, optimizer), ranks=ranks)
        assert all(wanted in end.out for end in ends), ends


def test_after_a_kill_the_other_run_is_not_needed(
    nursery: Nursery, config: Config, whole: Path, half: Path, tmp_path: Path
) -> None:
    """AdamW's updates are counted on, over both runs; from there, a third run takes them all."""
    new, third = tmp_path / "new", tmp_path / "third"
    fine(nursery.job(shifted, four(config, 1), new, Origin(half, optimizer=True), 2))
    half.rename(tmp_path / "gone")
    for origin in (None, Origin(half, optimizer=True)):  # named again, it is not opened
        copy = Path(shutil.copytree(new, tmp_path / f"copy of {origin is None}"))
        said = fine(nursery.job(shifted, four(config, 1), copy, origin))
        assert losses(copy) == losses(whole)[4:]
        assert "Started from" not in said
        assert "Continuing from the checkpoint of step 2" in said
    ends = nursery.job(show_state, config, third, Origin(copy, optimizer=True))
    assert "has True {8.0}" in ends[0].out


def test_a_start_that_was_killed_before_its_first_checkpoint(
    nursery: Nursery, config: Config, whole: Path, half: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    fine(nursery.job(show_state, four(config), new, Origin(half, optimizer=True)))
    assert RunFolder(new).begun()
    assert not RunFolder(new).has_checkpoints()
    half.rename(tmp_path / "gone")
    end = nursery.command("train", "--run", "new", "--ranks", "1", folder=tmp_path)
    assert (end.code, len(end.err.splitlines())) == (2, 1)
    assert "'new' has no checkpoint of its own yet and needs the run it began from: --from " in end.err
    (tmp_path / "gone").rename(half)
    said = fine(nursery.job(shifted, four(config), new, None))
    assert "weights and AdamW's state\n" in said
    assert losses(new) == losses(whole)[4:]


def test_started_again_it_starts_from_there_again(nursery: Nursery, half: Path, tmp_path: Path) -> None:
    words, new = ["train", "--run", "new", "--ranks", "1"], tmp_path / "new"
    end = nursery.command(*words, "--from", "half", "--with-optimizer", "--set", "train.steps=4", folder=tmp_path)
    assert end.code == 0, end.err
    before = losses(new)
    end = nursery.command(*words, "--fresh", folder=tmp_path)
    assert end.code == 0, end.err
    assert f"Started from the checkpoint of step 4 of {half.resolve()}: weights and AdamW's state\n" in end.out
    assert losses(new) == before
    shutil.rmtree(half)
    end = nursery.command(*words, "--fresh", folder=tmp_path)
    assert (end.code, losses(new)) == (2, before)
    assert f"--from {half.resolve()} is not a run folder" in end.err


def test_what_the_new_run_records(nursery: Nursery, config: Config, half: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    fine(nursery.job(shifted, four(config), new, Origin(half, optimizer=True)))
    wanted = {"run": str(half.resolve()), "step": 4, "optimizer": True, "updates": 4}
    assert json.loads((new / "model" / "origin.json").read_text()) == wanted
    manifest = CheckpointFolder(new / "checkpoints").manifest(4)
    assert manifest is not None
    assert (manifest["origin"], manifest["updates"], manifest["step"]) == (wanted, 4, 4)
    for name in ("config.json", "dtypes.json"):
        assert (new / "model" / name).read_bytes() == (half / "model" / name).read_bytes()
    export(new, tmp_path / "out", None)
    assert "origin.json" not in {file.name for file in (tmp_path / "out").iterdir()}


def damage(path: Path, step: int) -> None:
    file = next((path / "checkpoints" / f"step-{step:08d}").glob("__0_*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_of_the_other_run(nursery: Nursery, config: Config, whole: Path, tmp_path: Path) -> None:
    """The one before is used and nothing there is renamed; if all are damaged, one sentence and no folder."""
    other, new = Path(shutil.copytree(whole, tmp_path / "other")), tmp_path / "new"
    damage(other, 8)
    said = fine(nursery.job(shifted, four(config), new, Origin(other, optimizer=True), ranks=2))
    assert losses(new) == pytest.approx(losses(whole)[4:], rel=1e-9)
    assert "warning: the checkpoint of step 8 in " in said
    assert "is damaged (__0_0.distcp is not what was written): trying the previous one" in said
    assert CheckpointFolder(other / "checkpoints").steps() == [4, 8]
    damage(other, 4)
    (end,) = nursery.job(train_from, config, tmp_path / "none", Origin(other))
    assert re.search(r"no checkpoint in '.*' is sound \(step 4, 8: __0_0.distcp is not what was written\)", end.err)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"origin": None},
        {"origin": {"run": "a", "step": 4}},
        {"origin": {"run": "a", "step": -1, "optimizer": True, "updates": 4}},
        {"origin": {"run": "a", "step": 4, "optimizer": True, "updates": True}},
        {"history": {}},
        {"history": [[4, "train.steps", 4]]},
        {"history": [[4, 5, 4, 6]]},
    ],
    ids=str,
)
def test_a_manifest_that_no_run_writes(half: Path, wrong: dict[str, Any]) -> None:
    files = CheckpointFolder(half / "checkpoints")
    manifest = files.manifest(4)
    assert manifest is not None
    manifest |= wrong
    (files.path(4) / "manifest.json").write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))
    assert files.damage(4, {}) == "manifest.json is not what was written"


def train_from(config: Config, path: Path, origin: Origin) -> None:
    train(config, path, origin=origin)


def pruned(config: Config, path: Path, origin: Origin) -> None:
    """Start while the other run deletes its newest checkpoint, on a disk without locks, before it is read."""
    find = CheckpointFolder.damage

    def found(files: CheckpointFolder, step: int, *more: Any) -> str | None:
        result = find(files, step, *more)
        dist.barrier()
        if step == 8 and dist.get_rank() == 0:
            shutil.rmtree(files.path(8))
        dist.barrier()
        return result

    CheckpointFolder.damage = found
    shifted(config, path, origin)


def test_a_checkpoint_that_goes_while_it_is_read(nursery: Nursery, config: Config, whole: Path, tmp_path: Path) -> None:
    other, new = Path(shutil.copytree(whole, tmp_path / "other")), tmp_path / "new"
    said = fine(nursery.job(pruned, four(config), new, Origin(other, optimizer=True), ranks=2))
    assert "Started from the checkpoint of step 4" in said
    assert losses(new) == pytest.approx(losses(whole)[4:], rel=1e-9)


# As a user types it
@pytest.fixture(scope="module")
def place(nursery: Nursery, config: Config, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: `a`, `b` from the weights of `a`, `begun` without a checkpoint, others that are broken."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("a", "c", "garbage", "edited", "weights"):
        shutil.copytree(whole, folder / name)
    fine(nursery.job(train_from, four(config), folder / "b", Origin(folder / "a")))
    shutil.copytree(folder / "a", folder / "begun")
    shutil.rmtree(folder / "begun" / "checkpoints")
    (folder / "garbage" / "config.toml").write_text("[train")
    description = folder / "edited" / "model" / "config.json"
    description.write_text(description.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.5'))
    files = CheckpointFolder(folder / "weights" / "checkpoints")
    for step in files.steps():
        manifest = files.manifest(step)
        assert manifest is not None
        manifest["tensors"] = {name: kind for name, kind in manifest["tensors"].items() if name.startswith("weight")}
        text = json.dumps({**manifest, "sha256": text_sha256(manifest)})
        (files.path(step) / "manifest.json").write_text(text)
    (folder / "file").write_text("text")
    (folder / "empty").mkdir()
    (folder / "run.toml").write_text('[model]\nsource = "tiny"\n')
    return folder


WRONG = {
    "--from missing": "--from missing is not a run folder: it has no config.toml",
    "--from file": "--from file is not a run folder",
    "--from empty": "--from empty is not a run folder: it has no config.toml",
    "--from garbage": "'garbage/config.toml' is not TOML",
    "--from begun": "'begun' has 0 checkpoints to start from: train it further, ithaca train --run begun",
    "--from a --run a": "'a' has checkpoints and did not start from another run: leave out --from a to continue it",
    "--from a --run a --fresh": "--from and --run both name 'a': ithaca train --run a alone continues it",
    "--from a --run c --fresh --set model.source=tiny": "model.source is 'tiny', but --from a starts from the weights",
    "--from a --set model.source=tiny": "model.source is 'tiny', but --from a starts from the weights of '",
    "run.toml --from a": "model.source is 'tiny', but --from a starts from the weights of '",
    "--from a --set model.dtype=float32": "model.dtype is float32, but 'a' was trained with float64, and its check",
    "--with-optimizer": "--with-optimizer needs --from RUN: name the run whose optimizer state to take",
    "--with-optimizer --run b": "--with-optimizer needs --from RUN: name the run whose optimizer state to take",
    "--from weights --with-optimizer": "the checkpoint of step 8 in 'weights' has no AdamW state: leave out --with-",
    "--from edited": "model/config.json in the run folder has changed since the checkpoint of step 8: norm_eps was",
    "--from a --run c": "'c' has checkpoints and did not start from another run: leave out --from a to continue it",
    "--from c --run b": "not from 'c': leave out --from to continue it, or name another --run to start from there",
    "--from a --with-optimizer --run b": "'b' started from the weights of 'a' alone: leave out --with-optimizer",
    "--from a --set train.epochs=1 --set train.steps=1": "train.steps=1 and train.epochs=1 both say how long the run",
    "--from a --set train.epochs=0": "train.epochs is 0.0: a number above 0 is needed",
    "--from a --set train.learning_rate=0": "train.learning_rate is 0.0: a number above 0 is needed",
    "--from a --set train.warmup=-1": "train.warmup is -1: 0 or more is needed",
    "--run b --set train.steps=2": "the run has done 4 steps already, and train.steps is 2: 4 or more continues it",
}


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words(nursery: Nursery, place: Path, words: str) -> None:
    before = listing(place)
    run = () if "--run" in words else ("--run", "new")
    end = nursery.command("train", *words.split(), *run, "--ranks", "1", folder=place)
    assert end.code == 2, end.out + end.err
    assert end.err.startswith("error: ")
    assert len(end.err.splitlines()) == 1
    assert WRONG[words] in end.err
    assert listing(place) == before


def test_on_two_ranks_the_sentence_is_the_same(nursery: Nursery, place: Path) -> None:
    before = listing(place)
    words = ("train", "--from", "edited", "--run", "new", "--ranks", "2")
    end = nursery.command(*words, folder=place)
    assert (end.code, len(end.err.splitlines())) == (2, 1)
    assert WRONG["--from edited"] in end.err
    assert listing(place) == before


def test_the_configuration_of_the_other_run(nursery: Nursery, place: Path) -> None:
    """Without a file, it is that of the other run; with one, only the model is. Named again, the run continues."""
    words = ("--ranks", "1", "--set", "train.steps=1", "--set", "train.learning_rate=1e-4")
    end = nursery.command("train", "--from", "a", "--run", "d", *words, folder=place)
    assert end.code == 0, end.err
    theirs, ours = (RunFolder(place / name).saved_config() for name in ("a", "d"))
    assert ours == replace(theirs, train=replace(theirs.train, steps=1, learning_rate=1e-4))
    again = nursery.command("train", "--run", "d", "--ranks", "1", folder=place)
    assert "The only step is done, nothing was trained: --set train.steps=2 trains further\n" in again.out
    end = nursery.command("train", "--from", "./a", "--run", "d", *words, "--set", "train.steps=2", folder=place)
    assert end.code == 0, end.err
    assert "Continuing from the checkpoint of step 1" in end.out
    (place / "short.toml").write_text("[train]\ntokens = 16\nbatch = 1\nsteps = 1\ndevice = 'cpu'\n")
    end = nursery.command("train", "short.toml", "--from", "a", "--run", "e", "--ranks", "1", folder=place)
    assert end.code == 0, end.err
    ours = RunFolder(place / "e").saved_config()
    assert (ours.model, ours.train.tokens, ours.train.learning_rate) == (theirs.model, 16, 1e-5)
    assert "Learning rate: at most 1e-05 (the default for trained weights)" in end.out
    assert torch.isfinite(torch.tensor(losses(place / "e"))).all()


@pytest.mark.parametrize(("share", "warned"), [("0.2", True), ("", False)])
def test_documents_that_the_other_run_may_have_seen(
    nursery: Nursery, config: Config, whole: Path, tmp_path: Path, share: str, warned: bool
) -> None:
    config = replace(four(config), data=replace(config.data, validation=share))
    few = replace(config.run, validation_tokens=64)  # the loss of a fifth of the standard library takes minutes
    config = replace(config, train=replace(config.train, steps=1), run=few)
    said = fine(nursery.job(train, config, tmp_path / "new", False, Origin(whole)))
    assert warned == ("holds out documents that" in said)
