"""Runs that extend the context: the exported model, what is said, what a resumed run keeps, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ithaca
from ithaca.checkpoint.files import text_sha256
from ithaca.data.reader import open_tokens
from ithaca.data.sample import sequences
from tests.models import make_model, save
from tests.nursery import Ended, Nursery
from tests.train.conftest import SMALL

OLD, NEW = 32, 160


class Folder:
    """A folder with a model and one long document, and commands in it."""

    def __init__(self, nursery: Nursery, path: Path):
        self.nursery, self.path = nursery, path

    def model(self, family: str, **keys: Any) -> None:
        save(
            make_model(family, vocab_size=256, num_hidden_layers=2, max_position_embeddings=OLD, **keys),
            self.path / "in",
        )

    def data(self, *lengths: int) -> None:
        (self.path / "texts").mkdir()
        for number, length in enumerate(lengths):
            (self.path / "texts" / f"{number}.txt").write_text("".join(chr(97 + at * at % 23) for at in range(length)))
        assert self("data", "texts", "--out", "d.tokens").code == 0

    def train(self, *sets: str, ranks: int = 1, new: bool = True) -> Ended:
        first = (
            *SMALL,
            "model.source=in",
            "data.source=d.tokens",
            "train.batch=2",
            "train.steps=2",
            "train.warmup=1",
            f"train.tokens={NEW}",
        )
        words = [word for item in (*(first if new else ()), *sets) for word in ("--set", item)]
        return self("train", "--run", "run", "--ranks", str(ranks), *words)

    def __call__(self, *words: str) -> Ended:
        return self.nursery.command(*words, folder=self.path)

    def made(self) -> set[str]:
        return {file.name for file in self.path.iterdir()} - {"in", "texts", "d.tokens"}


@pytest.fixture
def folder(nursery: Nursery, tmp_path: Path) -> Folder:
    return Folder(nursery, tmp_path)


def theirs(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize(
    ("family", "rope", "ranks", "said"),
    [
        ("llama3", "yarn", 2, "Rope: yarn: factor 5 = 160 / 32 tokens, attention factor 1.16094; "),
        ("smollm2", "auto", 1, "Rope: theta (auto: a factor of 5 is at most 8): rope_theta "),
        pytest.param("qwen3", "llama3, factor=8", 1, "Rope: llama3: factor 8 (given); ", marks=pytest.mark.full),
        pytest.param("qwen2", "linear", 1, "Rope: linear: factor 5 = 160 / 32 tokens; ", marks=pytest.mark.full),
        pytest.param("mistral", "theta", 2, "Rope: theta: rope_theta ", marks=pytest.mark.full),
    ],
)
def test_from_the_run_to_transformers(folder: Folder, family: str, rope: str, ranks: int, said: str) -> None:
    """Train, stop, resume, export: transformers computes our logits at positions beyond the model's old length."""
    folder.model(family)
    folder.data(20_000)
    end = folder.train(f"model.rope={rope}", ranks=ranks)
    assert end.code == 0, end.err
    assert end.out.count(said) == 1
    assert "warning" not in end.out
    if ranks == 2:
        again = folder.train("train.steps=3", new=False, ranks=ranks)
        assert again.code == 0, again.err
        assert "Rope:" not in again.out
    assert folder("export", "run", "out").code == 0

    loaded, tokens = theirs(folder.path / "out"), torch.randint(0, 256, (1, NEW))
    assert loaded.config.max_position_embeddings == (8 * OLD if "factor=8" in rope else NEW)
    assert loaded.config.rope_parameters != theirs(folder.path / "in").config.rope_parameters
    wanted = loaded(tokens).logits
    ours = ithaca.apply(ithaca.load_model(folder.path / "out", "float32"), ithaca.Plan())
    assert (ours.logits(tokens) - wanted).abs().max() <= 2e-5
    ithaca.save_model(ours, folder.path / "again")
    assert torch.equal(theirs(folder.path / "again")(tokens).logits, wanted)
    # The run computed with this rope, too: its first loss is theirs before any training
    assert abs(first_loss(folder) - their_loss(folder, rope)) <= 1e-5


def first_loss(folder: Folder) -> float:
    return json.loads((folder.path / "run" / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def their_loss(folder: Folder, rope: str) -> float:
    """The loss of transformers on the first step's sequences, with the weights from before the run."""
    source = ithaca.load_model(folder.path / "in", "float32", rope=rope, tokens=NEW)
    ithaca.save_model(ithaca.apply(source, ithaca.Plan()), folder.path / "untrained")
    tokens, labels, documents = sequences(open_tokens(folder.path / "d.tokens"), 2, NEW, seed=0, step=0)
    assert documents.unique().tolist() == [0]
    return theirs(folder.path / "untrained")(tokens, labels=labels).loss.item()


# What is said
WARNING = "the context has 160 tokens, but the model's rope is made for 32 .*--set model.rope=auto extends it"


def test_positions_within_the_models_are_not_said(folder: Folder) -> None:
    """Positions count within documents: those of 30 bytes end before the model's length, whatever the sequence has."""
    folder.model("smollm2")
    folder.data(*[30] * 20)
    end = folder.train("train.steps=1")
    assert end.code == 0
    assert "made for" not in end.out


def test_auto_within_the_length_changes_nothing(folder: Folder) -> None:
    folder.model("smollm2")
    folder.data(400)
    end = folder.train(f"train.tokens={OLD}", "model.rope=auto", "train.steps=1")
    assert "Rope: unchanged, 32 tokens are within the model's 32\n" in end.out
    before, after = (json.loads((folder.path / name / "config.json").read_text()) for name in ("in", "run/model"))
    assert before == after


# What a run keeps
def refused(end: Ended, sentence: str) -> None:
    assert end.code == 2, end.out + end.err
    assert end.err.count("error:") == 1
    assert len(end.err.strip().splitlines()) == 1, end.err
    assert re.search(sentence, end.err), end.err


def test_a_run_keeps_its_rope(folder: Folder) -> None:
    folder.model("smollm2")
    folder.data(400)
    assert folder.train("model.rope=yarn, factor=6").code == 0
    refused(
        folder.train("model.rope=auto", new=False),
        "'run' holds a different run: model.rope is 'auto', and its checkpoints have 'yarn, factor=6': "
        "--set 'model.rope=yarn, factor=6' continues it, another --run starts a new one",
    )
    refused(folder.train("model.rope=", new=False), "model.rope is '', and its checkpoints have 'yarn, factor=6'")
    file = folder.path / "run" / "model" / "config.json"
    text, config = file.read_text(), json.loads(file.read_text())
    for name, value, sentence in [
        ("rope_scaling", config["rope_scaling"] | {"factor": 7.0}, "rope.factor was 6.0, and now it is 7.0"),
        ("max_position_embeddings", 999, "max_position_embeddings was 192, and now it is 999"),
    ]:
        file.write_text(json.dumps(config | {name: value}))
        refused(folder("export", "run", "out"), sentence)
    refused(folder.train("train.steps=3", new=False), "max_position_embeddings was 192, and now it is 999")
    file.write_text(text)
    assert folder.train("model.rope=yarn, factor=6", "train.steps=3", new=False).code == 0


def test_without_the_option(folder: Folder) -> None:
    """A context beyond the model's is said. A run from before the option goes on: nothing in it knows model.rope."""
    folder.model("smollm2")
    folder.data(400)
    end = folder.train()
    assert end.code == 0
    assert len(re.findall(f"warning: {WARNING}", end.out)) == 1
    assert re.search(WARNING, (folder.path / "run" / "log.txt").read_text())
    (folder.path / "run" / "config.toml").write_text(without_rope((folder.path / "run" / "config.toml").read_text()))
    (file,) = (folder.path / "run" / "checkpoints").glob("*/manifest.json")
    manifest = json.loads(file.read_text())
    manifest["config"] = without_rope(manifest["config"])
    del manifest["model"]["max_position_embeddings"]
    del manifest["sha256"]
    file.write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))
    end = folder.train("train.steps=3", new=False)
    assert end.code == 0, end.err
    assert "made for" not in end.out  # the run cannot take the advice any more
    refused(folder.train("model.rope=auto", new=False), "model.rope is 'auto', and its checkpoints have ''")


def without_rope(text: str) -> str:
    assert 'rope = ""\n' in text
    return text.replace('rope = ""\n', "")


def test_from_another_run(folder: Folder) -> None:
    """A new run takes the other's model as it is by then; model.rope, if it is given, extends that."""
    folder.model("qwen3")
    folder.data(20_000)
    assert folder.train("model.rope=yarn", "train.tokens=64").code == 0

    def start(run: str, *sets: str) -> Ended:
        words = [word for item in (*SMALL, "data.source=d.tokens", "train.steps=1", *sets) for word in ("--set", item)]
        return folder("train", "--from", "run", "--run", run, "--ranks", "1", *words)

    end = start("far", f"train.tokens={NEW}", "model.rope=auto")
    assert end.code == 0, end.err
    assert "factor 5 = 160 / 32 tokens, attention factor 1.16094; max_position_embeddings 64 -> 160\n" in end.out
    assert folder("export", "far", "out").code == 0
    tokens = torch.randint(0, 256, (1, NEW))
    ours = ithaca.apply(ithaca.load_model(folder.path / "out", "float32"), ithaca.Plan())
    assert (ours.logits(tokens) - theirs(folder.path / "out")(tokens).logits).abs().max() <= 2e-5
    assert theirs(folder.path / "out").config.rope_parameters["factor"] == 5

    end = start("same", f"train.tokens={NEW}")
    assert end.code == 0, end.err
    assert "Rope:" not in end.out
    assert "has 160 tokens, but the model's rope is made for 64 " in end.out
    before, after = (json.loads((folder.path / name / "model/config.json").read_text()) for name in ("run", "same"))
    assert before == after
    refused(start("other", f"train.tokens={NEW}", "model.rope=theta"), "has rope type 'yarn' with factor 2")
    refused(start("other", "train.tokens=64", "model.rope=yarn"), "nothing to extend: 64 tokens are within the 64")
    assert not (folder.path / "other").exists()


# Mistakes
MISTAKES = {
    "model.rope=yarm": "did you mean 'yarn'",
    "model.rope=8": "model.rope 8 is not text",
    "model.rope=true": "model.rope true is not text",
    'model.rope={type="yarn"}': "is not text",
    "model.ropes=yarn": "did you mean 'rope'",
    "model.rope=yarn, 5": "write 'yarn, factor=8'",
    "model.rope=yarn, factor=x": "gives factor as 'x': a number is needed",
    "model.rope=yarn, betafast=8": "did you mean 'beta_fast'",
    "model.rope=auto, factor=8": "'auto' has no parameters",
    "model.rope=linear, factor=2": r"reaches 64 tokens \(32 × 2\), but the context has 160: factor=5 works",
    "model.rope=yarn, factor=1e300": "at most 2147483647 are possible: factor=5 works",
    "model.rope=theta, rope_theta=1": "rope_theta as 1, and the model has 100000",
    "model.rope=theta, rope_theta=1e99": "it gives rope_theta as 1e\\+99",
    "model.rope=llama3, low_freq_factor=9": "the second must be larger",
    "model.rope=yarn, attention_factor=-1": "it gives attention_factor as -1.0",
    "model.rope=yarn, original_max_position_embeddings=0": "as original_max_position_embeddings=8K",
}


@pytest.mark.parametrize(("option", "sentence"), MISTAKES.items())
def test_mistakes(shared: Folder, option: str, sentence: str) -> None:
    refused(shared.train(option), sentence)
    assert shared.made() == set()


def test_within_the_length(shared: Folder) -> None:
    refused(shared.train("model.rope=yarn", f"train.tokens={OLD}"), "nothing to extend: 32 tokens are within the 32")
    assert shared.made() == set()


def test_a_second_scaling(folder: Folder) -> None:
    """With the default length the ranks find the mistake, which the launcher cannot: one sentence from all of them."""
    folder.model("qwen2.5-yarn")
    folder.data(400)
    words = ["--set", "model.rope=theta", "--set", "model.source=in", "--set", "data.source=d.tokens"]
    for ranks in ("1", "2"):
        end = folder("train", "--run", "run", "--ranks", ranks, "--set", "train.device=cpu", *words)
        refused(
            end, "does not fit a model that has rope type 'yarn' with factor 4: .*; model.rope=yarn, or auto, raises"
        )
        assert folder.made() == set()


@pytest.fixture(scope="module")
def shared(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made = Folder(nursery, tmp_path_factory.mktemp("mistakes"))
    made.model("smollm2")
    made.data(400)
    return made


def test_a_run_from_another_extends_what_that_one_has_extended(nursery: Nursery, tmp_path: Path) -> None:
    """Stage by stage: the second run's rope comes on top of the first one's, once, and not again when it resumes."""
    here = Folder(nursery, tmp_path)
    here.model("llama2")
    here.data(3 * NEW)
    assert here.train("model.rope=theta", f"train.tokens={2 * OLD}").code == 0
    again = ("--set", "model.rope=theta", "--set", f"train.tokens={4 * OLD}")
    ended = here("train", "--run", "next", "--from", "run", "--ranks", "2", *again)
    assert ended.code == 0, ended.err
    assert f"max_position_embeddings {2 * OLD} -> {4 * OLD}" in ended.out
    assert here("train", "--run", "next", "--ranks", "1", "--set", "train.steps=3").code == 0
    assert here("train", "--run", "same", "--from", "run", "--ranks", "1").code == 0
    thetas = {}
    for run in ("run", "next", "same"):
        assert here("export", run, f"out-{run}").code == 0
        thetas[run] = json.loads((tmp_path / f"out-{run}" / "config.json").read_text())["rope_theta"]
    size = ithaca.load_model(tmp_path / "in").spec.head_size
    assert thetas["run"] == pytest.approx(10000 * 2 ** (size / (size - 2)))
    assert thetas["next"] == pytest.approx(10000 * 4 ** (size / (size - 2)))
    assert thetas["same"] == thetas["run"]
