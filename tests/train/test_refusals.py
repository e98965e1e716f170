"""A start that is refused before its first step leaves no file that was not there, whatever is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from ithaca.base.errors import PlanError
from ithaca.config import read_config
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.train import loop
from ithaca.train.run import train
from tests.models import make_model, save, save_tokenizer
from tests.nursery import Nursery
from tests.train.conftest import SMALL

SMALL_RUN = [word for item in (*SMALL, "train.steps=2") for word in ("--set", item)]


def sets(*options: str) -> list[str]:
    return [word for option in options for word in ("--set", option)]


# The words of a start, and what its sentence has
REFUSALS: dict[str, tuple[list[str], str]] = {
    "unknown option": (sets("train.lr=1e-5"), "write train.learning_rate="),
    "unknown flag": (["--lr", "1e-5"], "write --set train.learning_rate=1e-5"),
    "no value": (sets("train.steps="), "train.steps '' is not a whole number"),
    "not a value": (sets("train.steps=many"), "train.steps 'many' is not a whole number"),
    "unknown model": (sets("model.source=llama9"), "is neither a folder nor a preset"),
    "model of a hub": (sets("model.source=org/model"), "hf download org/model"),
    "model without weights": (sets("model.source=bare"), "holds no weights"),
    "micro-batch": (sets("train.batch=4", "train.micro_batch=3"), "does not divide train.batch 4: 1, 2 or 4 would"),
    "options without a recipe": (
        sets("plan.chunk=64K"),
        "plan.chunk=64K needs a recipe, and plan.recipe is not set: 'dense', the default, has no chunk; set "
        "plan.recipe=sweep or fpdt",
    ),
    "no folder": (sets("plan.recipe=sweep", "plan.o=disk"), "--set plan.disk=/scratch"),
    "no data": (sets("data.source=none.tokens"), "data.source: 'none.tokens' cannot be read as a token file"),
    "text for data": (sets("data.source=books.txt"), "books.txt"),
    "large ids": (sets("data.source=large.tokens"), "the data have token ids below 1000"),
    "another tokenizer": (sets("model.source=model", "data.source=other.tokens"), "made with another tokenizer"),
    "nothing to learn": (sets("data.source=single.tokens"), "has 0 labels"),
    "mesh": (sets("mesh.ulysses=2", "plan.recipe=sweep"), "mesh.ulysses=2 needs 2 ranks"),
    "recipe": (sets("plan.recipe=dense", "mesh.ring=3"), "ring"),
    "chunk": (sets("plan.recipe=sweep", "plan.chunk=64K"), "chunk=65536 is longer than"),
    "kernel": (sets("plan.recipe=dense", "plan.kernel=cudnn"), "cudnn"),
    "host memory": (sets("plan.recipe=sweep", "plan.host_memory=1KB"), "plan.host_memory"),
    "disk": (sets("plan.recipe=sweep", "plan.o=disk", "plan.disk=/nowhere"), "plan.disk='/nowhere'"),
    "no such GPU": (sets("train.device=cuda"), "there is no CUDA GPU here"),
    "report": (sets("run.report=wandb"), "pip install 'ithaca[wandb]'"),
    "no configuration": (["missing.toml"], "cannot be read"),
    "model for a configuration": (["model"], "a model is given as --set model.source=model"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the refused starts name."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tokenizer(save(make_model("qwen3", vocab_size=256, num_hidden_layers=1), folder / "model"))
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text((folder / "model" / "config.json").read_text())
    (folder / "books.txt").write_text("sing, muse. " * 40)
    np.save(folder / "large.npy", np.arange(1000))
    prepare([folder / "large.npy"], folder / "large.tokens")
    np.save(folder / "single.npy", np.array([7]))
    prepare([folder / "single.npy"], folder / "single.tokens")
    other = folder / "model" / "tokenizer.json"
    content = json.loads(other.read_text())
    other.write_text(json.dumps(content | {"truncation": None}, indent=1))
    prepare([folder / "books.txt"], folder / "other.tokens", load_tokenizer(other))
    other.write_text(json.dumps(content))
    return folder


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every path of a folder, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", REFUSALS)
def test_nothing_is_left(nursery: Nursery, inputs: Path, kind: str) -> None:
    """Neither of a run folder that is named nor of one in runs/."""
    words, sentence = REFUSALS[kind]
    before = listing(inputs)
    for run in ([], ["--run", "deep/in/run"]):
        end = nursery.command("train", "--ranks", "1", *SMALL_RUN, *words, *run, folder=inputs)
        assert (end.code, end.out) == (2, ""), (end.out, end.err)
        assert end.err.startswith("error: ")
        assert end.err.count("\n") == 1
        assert sentence in end.err
        assert listing(inputs) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (sets("mesh.ulysses=3"), "mesh.ulysses=3 needs 3 ranks, which do not divide the job's 2: 1 or 2 would"),
        (sets("train.batch=1", "plan.recipe=dense"), "the batch has 1 rows for 2 data ranks"),
        (sets("data.source=large.tokens"), "the data have token ids below 1000"),
        (sets("data.source=books.txt"), "books.txt"),
    ],
)
def test_nothing_is_left_by_several_ranks(nursery: Nursery, inputs: Path, words: list[str], sentence: str) -> None:
    """Every rank has the mistake or hears of it: the sentence is about none of them."""
    before = listing(inputs)
    end = nursery.command("train", "--ranks", "2", *SMALL_RUN, *words, folder=inputs)
    assert end.code == 2, end.err
    assert "rank 0: " not in end.err
    assert sentence in end.err
    assert listing(inputs) == before


@pytest.fixture
def old_run(nursery: Nursery, inputs: Path, tmp_path: Path) -> Path:
    """A finished run in a folder of its own, beside links to the inputs."""
    for path in inputs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = sets("model.source=model", "run.checkpoint_every=0")
    end = nursery.command("train", "--ranks", "1", "--run", "run", *SMALL_RUN, *words, folder=tmp_path)
    assert end.code == 0, end.err
    return tmp_path


def state(folder: Path) -> dict[str, bytes | None]:
    """All of a folder, without links and without the log, which a refused start may add lines to."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != "log.txt" and not path.is_symlink()
    }


def test_an_old_run_stays_as_it_was(nursery: Nursery, old_run: Path) -> None:
    """Continued with a mistake, or replaced by a run that does not start: its folder has its name and its files."""
    before = state(old_run)
    for kind in ("large ids", "kernel", "report", "unknown option", "host memory"):
        more = ["--set", "train.steps=9", *REFUSALS[kind][0]]
        end = nursery.command("train", "--ranks", "1", "--run", "run", *more, folder=old_run)
        assert end.code in (1, 2), (kind, end.err)
        assert state(old_run) == before, kind
        end = nursery.command("train", "--ranks", "1", "--run", "run", "--fresh", *SMALL_RUN, *more, folder=old_run)
        assert end.code == 2, (kind, end.err)
        assert end.err.count("\n") == 1
        assert state(old_run) == before, kind


def test_a_fresh_run_takes_the_place(nursery: Nursery, old_run: Path) -> None:
    before = state(old_run / "run")
    words = ["--run", "run", "--fresh", *SMALL_RUN, "--set", "train.seed=5"]
    end = nursery.command("train", "--ranks", "1", *words, folder=old_run)
    assert end.code == 0, end.err
    assert "Moved the old run to run.old1\n" in end.out
    assert state(old_run / "run.old1") == before
    assert read_config(old_run / "run" / "config.toml", []).train.seed == 5


def train_refused(call: str, folder: Path) -> None:
    """In a process of its own: a start that is refused where it calls a function, after it has written its files."""

    def refuse(*_: object, **__: object) -> None:
        raise PlanError("that does not fit")

    setattr(loop.TrainingRun if call.startswith("_") else loop, call, refuse)
    with pytest.raises(PlanError, match="that does not fit"):
        train(read_config(None, [*SMALL, "train.steps=3", "train.batch=1"]), folder / "run")


@pytest.mark.parametrize("call", ["open_sinks", "_announce", "_allocate", "_step"])
def test_late_refusals(nursery: Nursery, tmp_path: Path, call: str) -> None:
    """Until the first step begins nothing stays; from then on the folder does, with its log."""
    end = nursery.job(train_refused, call, tmp_path)[0]
    assert end.code == 0, end.err
    left = {path.name for path in tmp_path.glob("run/*")}
    assert ("config.toml" in left) == (call == "_step"), left
    assert (tmp_path / "run").exists() == (call == "_step")
