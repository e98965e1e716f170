"""What `ithaca data`, `plan` and `rehearse` print as commands runs as it is printed, and trains what they said."""

import json
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.shell import setting, train_command
from ithaca.config import Config, read_config
from ithaca.model.presets import PRESETS
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.train.folder.run_folder import RunFolder
from tests.models import make_model, save, save_tokenizer
from tests.nursery import Nursery
from tests.printed import commands, settings

TEXT = "sing, muse, of the man of many turns. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A folder with a model, texts and a token file, whose names need quotes."""
    here = tmp_path_factory.mktemp("printed")
    save_tokenizer(save(make_model("qwen3", vocab_size=256, num_hidden_layers=2), here / "my model"))
    (here / "books").mkdir()
    (here / "books" / "odyssey.txt").write_text(TEXT)
    end = nursery.command("data", "books", "--out", "2026", "--tokenizer", "my model", folder=here)
    assert end.code == 0, end.err
    return here


FEW_STEPS = ("--set", "train.steps=2")  # in the place of the default, 16


def trained(nursery: Nursery, folder: Path, words: list[str], more: tuple[str, ...] = FEW_STEPS) -> Config:
    """Run a printed `train` command, in the folder as its user would, and return what its run folder says it did."""
    before = set((folder / "runs").glob("*"))
    end = nursery.command(*words, *more, folder=folder)
    assert end.code == 0, (words, end.err)
    (run,) = set((folder / "runs").glob("*")) - before
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = RunFolder(run).saved_config()
    assert [line["step"] for line in metrics] == [*range(1, config.train.steps + 1)]  # pyrefly: ignore
    assert metrics[-1]["tokens"] == len(metrics) * config.train.batch * config.train.tokens  # pyrefly: ignore
    wanted = PRESETS.get(config.model.source) or json.loads((folder / config.model.source / "config.json").read_text())
    described = json.loads((run / "model" / "config.json").read_text())
    assert all(described[name] == wanted[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    return config


def test_data(nursery: Nursery, folder: Path) -> None:
    """With the tokenizer of a model folder: that model, at the length it was made for."""
    end = nursery.command("data", "books", "--out", "a b.tokens", "--tokenizer", "my model", folder=folder)
    (stats,), (train,) = commands(end.out, "data"), commands(end.out, "train")
    assert stats == ["data", "a b.tokens", "--stats"]
    assert nursery.command(*stats, folder=folder).code == 0
    config = trained(nursery, folder, train, more=())
    assert (config.model.source, config.data.source, config.train.tokens) == ("my model", "a b.tokens", 256)


def test_data_of_bytes(nursery: Nursery, folder: Path) -> None:
    """Without a tokenizer: a preset with a vocabulary of bytes, at the length of the data."""
    (folder / "short.txt").write_text(TEXT[:50])
    end = nursery.command("data", "short.txt", "--out", "true", folder=folder)
    config = trained(nursery, folder, commands(end.out, "train")[0])
    assert (config.model.source, config.data.source, config.train.tokens) == ("tiny", "true", 50)


def planned(nursery: Nursery, folder: Path, *words: str) -> tuple[list[str], dict[str, Any]]:
    """The printed command, and the same answer as JSON."""
    end, found = (nursery.command(*words, *more, folder=folder) for more in ([], ["--json"]))
    assert (end.code, found.code) == (0, 0), (end.err, found.err)
    (line,) = commands(end.out)
    assert commands(json.loads(found.out)["train"]) == [line]
    return line, json.loads(found.out)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == "sweep" else pytest.mark.full) for name in RECIPES]
)
def test_plan(nursery: Nursery, folder: Path, recipe: str) -> None:
    """For GPUs that are not there: the same Plan on as many CPU ranks."""
    words = ("plan", "my model", "--gpus", "2xH100-80GB", "--tokens", "256", "--recipe", recipe, "--documents", "2026")
    line, found = planned(nursery, folder, *words)
    config = trained(nursery, folder, line)
    assert (config.model.source, config.data.source, config.train.tokens) == ("my model", "2026", 256)
    assert config.plan == Plan(**found["plan"])
    assert (config.mesh.ulysses, config.mesh.ring) == (found["mesh"]["ulysses"], found["mesh"]["ring"])
    assert config.train.batch == found["mesh"]["shard"]


@pytest.mark.parametrize(("batch", "sizes"), [("6", (6, None)), ("1K-tokens", (4, None)), ("max", None)])
def test_plan_of_a_batch(nursery: Nursery, folder: Path, batch: str, sizes: tuple[int, int | None] | None) -> None:
    """As many sequences in a step as were asked for. The most that fit are too many for this machine to train."""
    words = ("plan", "my model", "--gpus", "2xH100-80GB", "--tokens", "256", "--documents", "2026", "--batch", batch)
    line, found = planned(nursery, folder, *words)
    named = dict(text.split("=", 1) for text in settings(line))
    assert int(named["train.batch"]) == found["batch"]["sequences"]
    if sizes:
        config = trained(nursery, folder, line)
        assert (config.train.batch, config.train.micro_batch) == sizes
        assert (found["batch"]["sequences"], found["batch"]["passes"]) == (sizes[0], 1)


def test_plan_of_several_passes(nursery: Nursery, folder: Path) -> None:
    """On a GPU with little memory."""
    (folder / "small.toml").write_text('["RTX4090-24GB"]\nmemory = [1.65e9, "cut down"]\n')
    words = ("plan", "my model", "--gpus", "RTX4090", "--tokens", "256", "--documents", "2026", "--host", "1MB")
    line, found = planned(nursery, folder, *words, "--batch", "64", "--hardware", "small.toml")
    batch = found["batch"]
    assert batch["passes"] > 1
    config = trained(nursery, folder, line)
    assert (config.train.batch, config.train.micro_batch) == (64, batch["sequences_per_pass"])


def test_plan_with_the_least_memory(nursery: Nursery, folder: Path) -> None:
    words = ("plan", "my model", "--gpus", "2xH100-80GB", "--tokens", "256", "--documents", "2026", "--lean")
    line, found = planned(nursery, folder, *words)
    assert found["memory"]["total"] <= found["lean"]["fastest_memory_total"]
    assert trained(nursery, folder, line).plan == Plan(**found["plan"])


def test_plan_without_data(nursery: Nursery, folder: Path) -> None:
    """It trains on the default data, and says how to name others."""
    line, _ = planned(nursery, folder, "plan", "my model", "--gpus", "RTX4090", "--tokens", "512")
    assert {"plan.cuda_graph=true", "plan.kernel=flash"} <= {*line}  # which need a GPU, and there is none here
    config = trained(nursery, folder, [*line, "--set", "plan.cuda_graph=false", "--set", "plan.kernel=auto"])
    assert (config.data.source, config.train.tokens, config.train.batch) == ("", 512, 1)
    assert config.model.rope == "auto"  # the model is made for 256


def test_rehearse(nursery: Nursery, folder: Path) -> None:
    """Every option that was rehearsed, also those that the planner never chooses."""
    options = {
        "plan.chunk": "128",
        "plan.x": "host, rebuild",
        "plan.zero": "2",
        "plan.kernel": "naive",
        "plan.loss_tile": "64",
        "plan.host_memory": "1GB",
    }
    sets = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    words = ("rehearse", "my model", "--ranks", "2", "--tokens", "256", "--documents", "2026", *sets)
    line, _ = planned(nursery, folder, *words)
    config = trained(nursery, folder, line)
    assert (config.model.source, config.data.source, config.train.tokens) == ("my model", "2026", 256)
    wanted = read_config(None, ["plan.recipe=sweep", *(f"{name}={value}" for name, value in options.items())])
    assert config.plan == wanted.plan
    assert (config.mesh.ulysses, config.mesh.ring) == (2, 1)


# What cannot be run is not printed
def test_no_command_for_data_that_the_model_cannot_learn(nursery: Nursery, folder: Path) -> None:
    save(make_model("llama3", num_hidden_layers=1), folder / "small")  # with a vocabulary of 97
    words = ("plan", "small", "--gpus", "RTX4090", "--tokens", "128")
    for more, why in (
        ((), "the default data have 256 ids, and the model's vocabulary is 97"),
        (("--documents", "2026"), "the data have token ids below 256, but the model's vocabulary is 97"),
    ):
        end = nursery.command(*words, *more, folder=folder)
        assert end.code == 0
        assert commands(end.out) == []
        assert end.out.splitlines()[-1].startswith("To train: ")
        assert why in end.out.splitlines()[-1]
        assert json.loads(nursery.command(*words, *more, "--json", folder=folder).out)["train"] is None


def test_no_command_for_a_model_that_cannot_be_trained(nursery: Nursery, folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    save_tokenizer(other)
    (other / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    end = nursery.command("data", "books", "--out", "other.tokens", "--tokenizer", "other", folder=folder)
    assert end.code == 0
    assert commands(end.out, "train") == []
    assert "The model that 'other' belongs to cannot be trained: " in end.out
    (other / "config.json").write_text(json.dumps(PRESETS["tiny"]))
    end = nursery.command("data", "books", "--out", "more.tokens", "--tokenizer", "other", folder=folder)
    assert "Once 'other' has its weights: ithaca train --set model.source=other" in end.out


def test_ids_of_a_tokenizer_alone(nursery: Nursery, folder: Path) -> None:
    """The smallest preset whose vocabulary covers them."""
    (folder / "alone").mkdir()
    tokenizer = save_tokenizer(folder / "alone") / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["model"]["vocab"]["<far>"] = 40000
    tokenizer.write_text(json.dumps(content))
    end = nursery.command("data", "books", "--out", "alone.tokens", "--tokenizer", str(tokenizer), folder=folder)
    assert end.code == 0, end.err
    (train,) = commands(end.out, "train")
    assert "model.source=smollm2-135m" in settings(train)


@pytest.mark.parametrize(
    "value", ["a b", "12", "true", " x ", "[1]", "it's", "'q'", "1e-5", "a#b", "", "2026-01-01", " \U0001f3d6\x7f "]
)
def test_a_text_comes_back(value: str) -> None:
    assert read_config(None, [setting("data.source", value)]).data.source == value
    (copied,) = commands(train_command({"data.source": value}))
    assert read_config(None, settings(copied)).data.source == value
