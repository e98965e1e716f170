"""Wrong inputs of every kind, as a user makes them: one sentence, code 2 or 1, no traceback, nothing harmed."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from ithaca.base.errors import ConfigError
from ithaca.data.version1 import INDEX_MAGIC
from ithaca.train.folder.run_folder import RunFolder
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.train.conftest import SMALL

# Options that are wrong by themselves
OPTIONS = [
    "trian.steps=3",
    "train.stepps=3",
    "steps=3",
    "train=3",
    "train.steps",
    "=3",
    "train.steps.more=1",
    "train.steps=many",
    "train.steps=1.5",
    "train.steps=true",
    "train.steps=0",
    "train.steps=-3",
    "train.tokens=0",
    "train.tokens=1",
    "train.tokens=12Q",
    "train.tokens=[1]",
    "train.batch=0",
    "train.micro_batch=3",
    "train.warmup=-1",
    "train.learning_rate=0",
    "train.learning_rate=nan",
    "train.learning_rate=inf",
    "train.learning_rate=fast",
    "train.weight_decay=nan",
    "train.weight_decay=-1",
    "train.schedule=cosin",
    "train.beta1=1",
    "train.weight_decay=inf",
    "train.clip=0",
    "train.device=gpu",
    "train.device=cuda",
    "train.batch=99999999999",
    "plan.recipe=sweeep",
    "plan.checkpoint=ful",
    "plan.zero=4",
    "plan.optimizer=disk",
    "plan.kernel=cudnn",
    "plan.kernel=fa9",
    "plan.loss_tile=0",
    "plan.chunk=64K",
    "plan.tile=0",
    "plan.o=host",
    "plan.x=disk",
    "plan.host_memory=lots",
    "plan.host_memory=" + 400 * "9",
    "mesh.shard=3",
    "mesh.ulysses=2",
    "mesh.replicate=0",
    "model.dtype=float16",
    "model.dtype=int8",
    "model.source=llama9-900b",
    "model.source=",
    "run.keep=0",
    "run.checkpoint_every=-1",
    "run.report=mlflow",
    "run.report=wandb",
    "data.source=missing.tokens",
]


def text(content: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "file").write_text(content)
        return ["--set", "data.source=file"]

    return write


def truncated_tokens(folder: Path) -> list[str]:
    whole = prepared(folder)
    whole.write_bytes(whole.read_bytes()[:-8])
    return ["--set", f"data.source={whole}"]


def large_ids(folder: Path) -> list[str]:
    np.save(folder / "ids.npy", np.arange(1000))
    subprocess.run([sys.executable, "-m", "ithaca", "data", "ids.npy", "--out", "t"], check=True, cwd=folder)
    return ["--set", "data.source=t"]


def prepared(folder: Path) -> Path:
    (folder / "text").write_text("text " * 100)
    subprocess.run([sys.executable, "-m", "ithaca", "data", "text", "--out", "tokens"], check=True, cwd=folder)
    return folder / "tokens"


def toml(content: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "run.toml").write_text(content)
        return ["run.toml"]

    return write


def model(change: Callable[[Path], object]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        save(make_model("llama3", vocab_size=256), folder / "model")
        change(folder / "model")
        return ["--set", "model.source=model"]

    return write


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:9999])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def config(**changes: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


# Files that are wrong: each makes what it needs and gives the words of the command
FILES: dict[str, Callable[[Path], list[str]]] = {
    "no such file": lambda _: ["missing.toml"],
    "a folder for a file": lambda _: ["."],
    "not TOML": toml("[train\nsteps"),
    "binary TOML": lambda f: [(f / "b").write_bytes(b"\xff\x00") and "b"],
    "unknown table": toml("[trane]\nsteps = 3"),
    "a list for a table": toml("train = [1]"),
    "text for data": text("plain text"),
    "empty data": text(""),
    "truncated data": truncated_tokens,
    "ids beyond the vocabulary": large_ids,
    "a model without weights": model(lambda f: (f / "model.safetensors").unlink()),
    "a model with half its weights": model(truncate),
    "a model of pickles": model(pickled),
    "a model of another kind": model(config(model_type="rwkv")),
    "a model of other sizes": model(config(hidden_size=64)),
    "a model with a window": model(config(model_type="mistral", sliding_window=128)),
    "a model without config": model(lambda f: (f / "config.json").unlink()),
}


def assert_one_sentence(end) -> None:
    assert end.code in (1, 2), (end.out, end.err)
    lines = end.err.strip().splitlines()
    assert len(lines) == 1, end.err
    assert lines[0].startswith("error: ")
    assert len(lines[0]) > 20


@pytest.mark.parametrize("option", OPTIONS)
def test_options(nursery: Nursery, tmp_path: Path, option: str) -> None:
    sets = [word for item in (*SMALL, "train.steps=2", "plan.recipe=dense", option) for word in ("--set", item)]
    assert_one_sentence(nursery.command("train", "--ranks", "1", *sets, folder=tmp_path))


@pytest.mark.parametrize("file", FILES)
def test_files(nursery: Nursery, tmp_path: Path, file: str) -> None:
    more = FILES[file](tmp_path)
    sets = [word for item in (*SMALL, "train.steps=2") for word in ("--set", item)]
    assert_one_sentence(nursery.command("train", *more, "--ranks", "1", *sets, folder=tmp_path))


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--ranks", "0"],
        ["train", "--ranks", "-1"],
        ["train", "--ranks", "99999999999999999999"],
        ["train", "--nodes", "2", "--run", "run", "--meet", "x" * 5000],
        ["train", "--ranks", "3", "--run", "run", "--set", "train.batch=1"],
        ["export", "nowhere", "out"],
        ["export", ".", "out"],
        ["data", "nowhere", "--out", "t"],
        ["data", "."],
    ],
)
def test_commands(nursery: Nursery, tmp_path: Path, command: list[str]) -> None:
    assert_one_sentence(nursery.command(*command, folder=tmp_path))
    assert os.listdir(tmp_path) == []


def digest(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in ("lock", "log.txt")]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_mistakes_leave_a_run_as_it_was(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    sets = [word for item in (*SMALL, "train.steps=4", f"model.source={small_model}") for word in ("--set", item)]
    assert nursery.command("train", "--run", "run", "--ranks", "1", *sets, folder=tmp_path).code == 0
    before = digest(tmp_path / "run")
    for wrong in (
        "train.seed=9",
        "train.tokens=32",
        "model.source=tiny",
        "data.source=x",
        "plan.kernel=cudnn",
        "plan.zero=9",
    ):
        more = ["--set", "train.steps=8", "--set", "plan.recipe=dense", "--set", wrong]
        assert_one_sentence(nursery.command("train", "--run", "run", "--ranks", "1", *more, folder=tmp_path))
        assert digest(tmp_path / "run") == before, wrong
    assert nursery.command("export", "run", "run", folder=tmp_path).code == 2
    assert nursery.command("train", "--run", "run", "--ranks", "1", "--set", "train.steps=4", folder=tmp_path).code == 0
    assert digest(tmp_path / "run").keys() == before.keys()


@pytest.mark.parametrize("name", ["model/weights.safetensors", "books.index", "notes.txt", "checkpoints/mine"])
def test_a_users_files_are_no_leftovers_of_a_start(tmp_path: Path, name: str) -> None:
    run, file = RunFolder(tmp_path), tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not a run folder"):
        run.hold()
    assert file.read_text() == "mine"


def test_leftovers_of_a_start_are_taken_over_and_a_failed_start_deletes_its_own_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    (run.path / "model").mkdir(parents=True)
    (run.path / "model" / "dtypes.json").write_text("{}")
    (run.path / "a.tokens.index.1234.partial").write_bytes(INDEX_MAGIC + b"cut short")
    (run.path / "b.tokens.index.5678.partial").touch()
    before = set(os.listdir(run.path))
    run.hold()
    (run.path / "checkpoints").mkdir()
    (run.path / "model.partial").mkdir()
    run.release()
    assert set(os.listdir(run.path)) == before


def test_starts_that_fail_in_turn_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the lock while the files of the first are there."""
    first, second, tries = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run"), list[bool]()
    first.hold()
    (first.path / "model.partial").mkdir()

    def try_lock() -> IO[str] | None:
        tries.append(True)
        if len(tries) == 1:
            assert RunFolder._try_lock(second) is None
            first.release()
            return None
        return RunFolder._try_lock(second)

    monkeypatch.setattr(second, "_try_lock", try_lock)
    second.hold()
    (second.path / "model.partial").mkdir()
    second.release()
    assert os.listdir(second.path) in ([], ["lock"])


def test_a_place_where_no_folder_can_be_made() -> None:
    """/proc refuses with the words that a folder has which another start deletes right now."""
    with pytest.raises(ConfigError, match=r"^'/proc/foo' cannot be made a run folder \(No such file or directory"):
        RunFolder(Path("/proc/foo")).hold()


def test_the_lock_is_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the lock's file another job could begin, and what it makes would be deleted, too."""
    run, gone = RunFolder(tmp_path / "run"), list[str]()
    run.hold()
    for name in ("config.toml.partial", "zz.index"):
        (run.path / name).touch()
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **_: (gone.append(self.name), unlink(self)))
    run.release()
    assert gone[-1] == "lock"
    assert len(gone) == 3
    assert not run.path.exists()


def test_a_start_that_came_to_nothing_can_be_repeated(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    sets = [word for item in (*SMALL, "train.steps=2", f"model.source={small_model}") for word in ("--set", item)]
    more = ["--set", "plan.recipe=dense", "--set", "plan.kernel=cudnn"]
    (tmp_path / "mine").mkdir()
    for run in ("run", "a/b/run", "mine"):
        wrong = nursery.command("train", "--run", run, "--ranks", "1", *sets, *more, folder=tmp_path)
        assert_one_sentence(wrong)
    assert os.listdir(tmp_path) == ["mine"]  # nothing is left of what the starts made
    assert os.listdir(tmp_path / "mine") == []
    assert nursery.command("train", "--run", "run", "--ranks", "1", *sets, folder=tmp_path).code == 0


def test_the_launcher_says_it_once(nursery: Nursery, tmp_path: Path) -> None:
    """Where each rank could speak."""
    end = nursery.command(
        "train", "--ranks", "2", "--set", "mesh.ulysses=2", "--set", "plan.recipe=dense", folder=tmp_path
    )
    assert end.code == 2
    assert_one_sentence(end)
    assert "recipe 'dense' has no context parallelism" in end.err
