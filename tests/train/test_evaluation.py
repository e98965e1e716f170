"""`ithaca evaluate`: the loss of runs and folders, by position, samples, and what it refuses."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

from ithaca.base.errors import ConfigError, ModelError
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import open_tokens
from ithaca.evaluate.long_context import TaskOptions
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel import hangs
from ithaca.train.evaluation import command, sample
from ithaca.train.evaluation.command import Options, lines
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Ended, Nursery
from tests.test_docs import quoted, shows
from tests.train.conftest import small_config, small_model  # noqa: F401
from tests.train.test_nodes import nobody
from tests.train.test_validation import done, scripted

ROOT = Path(__file__).parents[2]
SETS = ["--set", "train.device=cpu"]


@pytest.fixture(scope="module")
def place(nursery: Nursery, small_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A folder with a token file, a model in float64, and a run with a best checkpoint, step 2, and a last one, 4."""
    top = tmp_path_factory.mktemp("evaluate")
    texts = top / "texts"
    texts.mkdir()
    for number, words in enumerate((100, 2, 20)):
        (texts / f"{number}.txt").write_text("tell me, muse " * words)
    prepare([texts], top / "t.tokens")
    sizes = {"vocab_size": 256, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    save(make_model("qwen3", torch.float64, **sizes), top / "model")
    config = replace(
        small_config,
        data=replace(small_config.data, validation=str(top / "t.tokens")),
        train=replace(small_config.train, steps=4, batch=2),
        run=replace(small_config.run, validate_every=2, checkpoint_every=0, validation_tokens=700),
    )
    done(nursery.job(scripted, config, top / "run", {0: 9.0, 2: 1.0, 4: 2.0}))
    return top


def evaluated(nursery: Nursery, place: Path, *words: str) -> dict[str, Any]:
    end = nursery.command("evaluate", *words, *SETS, "--json", folder=place)
    assert end.code == 0, end.err
    assert end.err == ""
    return json.loads(end.out)


def oracle(folder: Path, data: Path, length: int) -> tuple[float, int]:
    """Float64 cross-entropy by `transformers`, document by document, cut with one token in common."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    file, total, labels = open_tokens(data), 0.0, 0
    for start, stop in pairwise(file.bounds().tolist()):
        for first in range(start, stop - 1, length - 1):
            ids = torch.from_numpy(file.read(first, min(first + length, stop)).tokens.astype(np.int64))[None]
            with torch.no_grad():
                total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
            labels += ids.shape[1] - 1
    return total / labels, labels


def test_a_folder(nursery: Nursery, place: Path) -> None:
    wanted, labels = oracle(place / "model", place / "t.tokens", 1100)
    shared = ("--set", "plan.recipe=sweep", "--set", "plan.chunk=700", "--set", "mesh.ulysses=2")
    for words in (("--ranks", "1"), ("--ranks", "2", *shared)):
        exact = ("--set", "model.dtype=float64", "--tokens", "1100")
        found = evaluated(nursery, place, "model", "t.tokens", *words, *exact)
        assert abs(found["loss"] - wanted) < 1e-6
        assert (found["labels"], found["documents"], found["step"]) == (labels, 3, None)
        assert found["perplexity"] == pytest.approx(np.exp(wanted))
        buckets = found["positions"]
        assert [(row["from"], row["to"]) for row in buckets] == [(0, 1024), (1024, 1100)]
        assert sum(row["labels"] for row in buckets) == labels
        assert sum(row["loss_sum"] for row in buckets) / labels == found["loss"]
        assert [row["loss_sum"] / row["labels"] for row in buckets] == [row["loss"] for row in buckets]


def test_what_the_loss_may_not_be_about(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """Tokens and lengths that are not the model's, as in training; on stderr, once, whatever the ranks."""
    model = tmp_path / "short"
    save(make_model("qwen3", vocab_size=256, num_hidden_layers=1, max_position_embeddings=512), model)
    (model / "tokenizer.json").write_text("{}")
    data, words = str(place / "t.tokens"), (*SETS, "--json", "--ranks", "2")
    end = nursery.command("evaluate", "short", data, *words, folder=tmp_path)
    assert end.code == 0, end.err
    assert json.loads(end.out)["context"] == 8192
    assert end.err.splitlines() == [
        "warning: the data have one token a byte, not the tokens of the tokenizer in 'short': unless it was trained on "
        "bytes, measure it on your documents, prepared with ithaca data --tokenizer short",
        "warning: the longest document has 1,400 tokens, but the model's rope is made for 512 "
        "(max_position_embeddings in config.json), and later positions are new to it: --tokens 512 stays within it",
    ]
    end = nursery.command("evaluate", "short", data, *words, "--tokens", "512", folder=tmp_path)
    assert end.err.count("warning: ") == 1


def test_a_run(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """The last checkpoint and the best one, at the run's length; the loss is that of the exported folder."""
    steps, found = {"last": 4, "best": 2}, {}
    for which, more in (("last", ()), ("best", ("--best",))):
        found[which] = evaluated(nursery, place, "run", "t.tokens", "--limit", "700", *more)
        assert (found[which]["step"], found[which]["context"]) == (steps[which], 64)
        assert found[which]["left_out_tokens"] == open_tokens(place / "t.tokens").tokens - 700
        folder = tmp_path / which
        assert nursery.command("export", str(place / "run"), str(folder), *more, folder=tmp_path).code == 0
        again = evaluated(nursery, place, str(folder), "t.tokens", "--limit", "700", "--tokens", "64", "--ranks", "1")
        assert again["loss"] == pytest.approx(found[which]["loss"], rel=1e-6)
    assert found["last"]["loss"] != found["best"]["loss"]


def test_it_is_the_loss_of_a_validation(nursery: Nursery, small_config: Config, place: Path, tmp_path: Path) -> None:  # noqa: F811
    config = replace(
        small_config,
        data=replace(small_config.data, validation=str(place / "t.tokens")),
        train=replace(small_config.train, steps=2),
    )
    done(nursery.job(train, config, tmp_path / "run", ranks=2))
    (_, last) = RunFolder(tmp_path / "run").read_validations()
    found = evaluated(nursery, place, str(tmp_path / "run"), "t.tokens")
    assert found["loss"] == pytest.approx(last["validation_loss"], rel=1e-6)
    assert found["labels"] == last["validation_labels"]


def test_a_damaged_checkpoint(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """The one before it is used; where only the best is asked for, nothing else is."""
    shutil.copytree(place / "run", tmp_path / "run")
    files = CheckpointFolder(tmp_path / "run" / "checkpoints")
    (part,) = files.path(4).glob("__0_*")
    part.write_bytes(b"x" + part.read_bytes()[1:])
    words = ("evaluate", str(tmp_path / "run"), "t.tokens", "--limit", "300", "--ranks", "2", "--json", *SETS)
    end = nursery.command(*words, folder=place)
    assert (json.loads(end.out)["step"], files.steps()) == (2, [2, 4])
    (warning,) = end.err.splitlines()
    assert warning.startswith("warning: the checkpoint of step 4 in ")
    assert warning.endswith(": trying the previous one")
    (part,) = files.path(2).glob("__0_*")
    part.write_bytes(b"x" + part.read_bytes()[1:])
    end = nursery.command("evaluate", str(tmp_path / "run"), "t.tokens", "--best", "--ranks", "1", *SETS, folder=place)
    assert end.code == 1
    assert "no checkpoint in" in end.err
    assert "step 2: __0_0.distcp is not what was written" in end.err


def test_the_table(nursery: Nursery, place: Path) -> None:
    end = nursery.command("evaluate", "run", "t.tokens", "--tokens", "2K", "--sample", "tell me", *SETS, folder=place)
    assert end.code == 0, end.err
    said = end.out.splitlines()
    assert said[0] == "run after step 4 on t.tokens, context 2K"
    assert said[1].startswith("Loss ")
    assert said[3].split() == ["position", "labels", "loss", "perplexity"]
    assert [line.split()[0] for line in said[4:6]] == ["0-1K", "1K-2K"]
    assert said[7] == "Prompt: tell me"
    assert len(said[8:]) >= 1


def test_what_the_page_shows(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    ((words, shown),) = quoted("evaluate")
    shutil.copytree(place / "run", tmp_path / "runs" / "mine")
    shutil.copy(place / "t.tokens", tmp_path / "held.tokens")
    end = nursery.command("evaluate", *words.split(), *SETS, "--ranks", "1", folder=tmp_path)
    assert shows(shown, end.out), end.out


def test_a_bucket_without_labels() -> None:
    row = {"from": 0, "to": 1024, "labels": 0, "loss": None, "perplexity": None}
    found = {"model": "m", "step": None, "data": "d", "context": 8, "loss": 800.0, "perplexity": None, "labels": 1}
    said = lines({**found, "documents": 1, "left_out_tokens": 3, "positions": [row], "samples": []})
    assert said[-1].split() == ["0-1K", "0", "–", "–"]
    assert "--limit leaves out 3 tokens" in said[1]


def test_samples(nursery: Nursery, place: Path) -> None:
    """What `transformers` continues each prompt by, greedily; of a run, nothing of the folder that it takes stays."""
    import transformers

    prompts = ("--sample", "tell", "--sample", "me", "--limit", "99", "--tokens", "99", "--ranks", "1")
    found = evaluated(nursery, place, "model", "t.tokens", *prompts, "--set", "model.dtype=float64")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    for prompt, shown in zip(("tell", "me"), found["samples"], strict=True):
        ids = list(prompt.encode())
        for _ in range(sample.NEW_TOKENS):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert shown == {"prompt": prompt, "text": bytes(ids[len(prompt) :]).decode(errors="replace")}
    before = {path.name for path in Path("/tmp").glob("ithaca-evaluate-*")}
    assert len(evaluated(nursery, place, "run", "t.tokens", *prompts[:2])["samples"]) == 1
    assert {path.name for path in Path("/tmp").glob("ithaca-evaluate-*")} == before


def note_order(options: Options) -> None:
    """Evaluate; print when tasks are measured, when ranks stop waiting for each other, and when text is generated."""

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **more: Any) -> Any:
            print("then", name, flush=True)
            return work(*args, **more)

        return inner

    @contextmanager
    def answering(*args: Any) -> Iterator[Any]:
        with hangs.answering(*args) as roll:
            yield roll
        print("then alone", flush=True)

    with (
        mock.patch.object(command, "answering", answering),
        mock.patch.object(command, "measure_tasks", noted("tasks", command.measure_tasks)),
        mock.patch.object(command, "generate", noted("generate", command.generate)),
    ):
        command.evaluate_ranks(options)


def test_no_rank_waits_for_samples(nursery: Nursery, place: Path) -> None:
    """The first rank generates on the CPU for minutes; the others gave up waiting in the tasks, and all was lost."""
    options = Options(
        model=place / "run",
        data=place / "t.tokens",
        samples=("tell",),
        tokens=512,
        tasks=TaskOptions(tasks=("needle",), lengths=(256, 512), count=2, out=place / "out"),
        overrides=("train.device=cpu",),
        as_json=True,
    )
    ends = nursery.job(note_order, options, ranks=2)
    done(ends)
    orders = [[line.split()[1] for line in end.out.splitlines() if line.startswith("then ")] for end in ends]
    assert orders == [["tasks", "alone", "generate"], ["tasks", "alone"]]
    found = json.loads(ends[0].out[ends[0].out.index("{") :])
    assert found["samples"][0]["prompt"] == "tell"
    assert found["tasks"][0]["task"] == "needle"


def test_samples_need_transformers_and_a_tokenizer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(PRESETS["tiny"])
    with pytest.raises(ModelError, match=r"needs a tokenizer, and '.*' holds no tokenizer\.json"):
        sample.check_samples(["a"], spec, place / "model", "unknown")
    with pytest.raises(ModelError, match=r"models of up to 8B parameters, and this one has 70\.6B"):
        sample.check_samples(["a"], read_spec(PRESETS["llama3-70b"]), place / "model", "bytes")
    with pytest.raises(ConfigError, match="has a prompt of 5,000 tokens: 1 to 4096 are needed"):
        sample.check_samples([5000 * "a"], spec, place / "model", "bytes")
    monkeypatch.setattr(sample.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--sample needs a package: pip install 'transformers"):
        sample.check_samples(["a"], spec, place / "model", "bytes")


def test_prompts_begin_as_documents_do(tmp_path: Path) -> None:
    """With the begin token, once, without the end, and not truncated."""
    vocab = {"<s>": 0, "</s>": 1, "tell": 2, "me": 3}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "me"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.enable_truncation(3)
    inner.save(str(tmp_path / "tokenizer.json"))
    encode, _ = sample._coder(tmp_path, "unknown")
    assert encode("tell me tell me") == [0, 2, 3, 2, 3]
    assert encode("<s> tell me") == [0, 2, 3]


@pytest.mark.full
def test_under_torchrun(nursery: Nursery, place: Path) -> None:
    words = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "--",
        "ithaca",
        "evaluate",
        "run",
        "t.tokens",
        "--json",
        *SETS,
    ]
    (end,) = nursery.commands((["torchrun", *words], {"PYTHONPATH": str(ROOT)}), folder=place, disturb=nobody)
    assert end.code == 0, end.err
    assert json.loads(end.out)["ranks"] == 2


def folder_without_weights(place: Path) -> list[str]:
    (place / "model" / "model.safetensors").unlink()
    return ["model", "t.tokens"]


def unvalidated(place: Path) -> list[str]:
    for manifest in (place / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    return ["run", "t.tokens", "--best"]


def no_checkpoints(place: Path) -> list[str]:
    for step in (place / "run" / "checkpoints").iterdir():
        step.rename(step.with_name(f"{step.name}.damaged"))
    return ["run", "t.tokens"]


def other_ids(place: Path) -> list[str]:
    np.save(place / "ids.npy", np.arange(1000))
    prepare([place / "ids.npy"], place / "ids.tokens")
    return ["run", "ids.tokens"]


def one_token_documents(place: Path) -> list[str]:
    np.save(place / "ids.npy", np.array([[1]] * 5))
    prepare([place / "ids.npy"], place / "ids.tokens")
    return ["run", "ids.tokens"]


def cut_short(place: Path) -> list[str]:
    (place / "t.tokens").write_bytes((place / "t.tokens").read_bytes()[:-8])
    return ["run", "t.tokens"]


def given(*words: str) -> Callable[[Path], list[str]]:
    return lambda _: list(words)


# Each changes a copy of the place, and gives the words of the command and a part of the sentence
WRONG: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such model": (given("missing", "t.tokens"), "'missing' is neither a run folder"),
    "a preset": (given("tiny", "t.tokens"), "'tiny' is a preset, whose weights are random"),
    "a folder of texts": (given("texts", "t.tokens"), "'texts' is neither a run folder"),
    "no such data": (given("run", "missing.tokens"), "'missing.tokens' cannot be read as a token file"),
    "text for data": (given("run", "texts/0.txt"), "texts/0.txt' is"),
    "the wrong order": (given("t.tokens", "run"), "'t.tokens' is neither a run folder"),
    "truncated data": (cut_short, "bytes where its header promises"),
    "ids beyond the vocabulary": (other_ids, "token ids below 1000, but the model's vocabulary is 256"),
    "no labels": (one_token_documents, "has 0 labels in its 5 tokens"),
    "no weights": (folder_without_weights, "holds no weights"),
    "no checkpoints": (no_checkpoints, "'run' has no checkpoint yet"),
    "best of an unvalidated run": (unvalidated, "has no checkpoint with a validation loss"),
    "best of a folder": (given("model", "t.tokens", "--best"), "--best needs a run folder"),
    "tokens": (given("run", "t.tokens", "--tokens", "many"), "'many' is not a number of tokens"),
    "one token": (given("run", "t.tokens", "--tokens", "1"), "--tokens is 1: 2 or more are needed"),
    "limit": (given("run", "t.tokens", "--limit", "1"), "--limit is 1: 2 or more are needed"),
    "ranks": (given("run", "t.tokens", "--ranks", "0"), "--ranks is 0: 1 or more is needed"),
    "a mesh that does not fit": (given("run", "t.tokens", "--ranks", "2", "--set", "mesh.ring=3"), "ring"),
    "an option of training": (given("run", "t.tokens", "--set", "train.steps=3"), "changes nothing in an evaluation"),
    "no such option": (given("run", "t.tokens", "--set", "plan.chunkz=3"), "'plan.chunkz' is not an option"),
    "a chunk without sweep": (given("run", "t.tokens", "--set", "plan.chunk=8"), "chunk"),
    "samples of no task": (
        given("run", "t.tokens", "--count", "50"),
        "--count 50 is about tasks, and none is named: add --task needle",
    ),
    "tables of no task": (given("run", "t.tokens", "--out", "tables"), "--out tables is about tasks"),
    "an empty prompt": (given("run", "t.tokens", "--sample", ""), "has a prompt of 0 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(nursery: Nursery, place: Path, tmp_path: Path, name: str) -> None:
    """One sentence, code 2, and nothing is left behind."""
    copy = Path(shutil.copytree(place, tmp_path / "copy"))
    make, sentence = WRONG[name]
    words = make(copy)
    before = sorted(copy.rglob("*"))
    end = nursery.command("evaluate", *words, *SETS, folder=copy)
    check_refused(end, sentence)
    assert sorted(copy.rglob("*")) == before


def check_refused(end: Ended, sentence: str) -> None:
    assert end.code == 2, (end.out, end.err)
    assert end.out == ""
    (line,) = end.err.strip().splitlines()
    assert line.startswith("error: ")
    assert sentence in line, line


TRAIN_WRONG = {
    "data.validation=0": "'0' is not a share of the documents",
    "data.validation=150%": "'150%' is not a share of the documents",
    "data.validation=true": "'True' is not a share of the documents",
    "data.validation=missing.tokens": "'missing.tokens' cannot be read as a token file",
    "data.validation=texts/0.txt": "texts/0.txt' is",
    "data.validation=ids.tokens": "token ids below 1000, but the model's vocabulary is 256",
    "data.validation=ones.tokens": "'ones.tokens' has 0 labels in its 5 tokens",
    "data.validation=0.99": "which leaves none to train on: 0.33 holds out one",
    "run.validate_every=-1": "run.validate_every is -1: 0 or more is needed",
    "run.validate_every=often": "run.validate_every 'often' is not a whole number",
    "run.validation_tokens=1": "run.validation_tokens is 1: 2 or more are needed",
    "run.validation_tokens=some": "'some' is not a number of tokens",
}


@pytest.mark.parametrize("option", TRAIN_WRONG)
def test_wrong_options_of_training(nursery: Nursery, place: Path, tmp_path: Path, option: str) -> None:
    for name in ("t.tokens", "texts", "model"):
        source = place / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    other_ids(tmp_path)
    np.save(tmp_path / "ones.npy", np.array([[1]] * 5))
    prepare([tmp_path / "ones.npy"], tmp_path / "ones.tokens")
    before = sorted(tmp_path.rglob("*"))
    sets = ["data.source=t.tokens", "model.source=model", "model.dtype=float64", "train.device=cpu", option]
    words = [word for item in sets for word in ("--set", item)]
    end = nursery.command("train", "--ranks", "1", "--run", "new", *words, folder=tmp_path)
    check_refused(end, TRAIN_WRONG[option])
    assert sorted(tmp_path.rglob("*")) == before


def test_export_best_without_validation(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    unvalidated(tmp_path)
    end = nursery.command("export", "run", "out", "--best", folder=tmp_path)
    check_refused(end, "'run' has no checkpoint with a validation loss, so --best names none")
    assert not (tmp_path / "out").exists()
