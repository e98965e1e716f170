"""A run continues only what it was: its data to the last bit, its seed, batch and optimizer; the rest is said aloud."""

import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.checkpoint.files import CheckpointFolder, text_sha256
from ithaca.config import Config, read_config
from ithaca.data.reader import open_tokens
from ithaca.train import loop
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.data.old_format import write_version1
from tests.nursery import Ended, Nursery
from tests.train.conftest import SMALL

DOCUMENTS = 800


def documents() -> list[dict[str, str]]:
    return [{"prompt": f"question {number} ", "completion": f"the answer is {number * 37}"} for number in range(800)]


class Folder:
    """A folder with data, and commands in it."""

    def __init__(self, nursery: Nursery, model: Path, path: Path):
        self.nursery, self.model, self.path = nursery, model, path

    def data(self, records: list[dict[str, str]], name: str = "d.tokens") -> None:
        (self.path / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
        (self.path / name).unlink(missing_ok=True)
        end = self.nursery.command("data", "d.jsonl", "--out", name, folder=self.path)
        assert end.code == 0, end.err

    def train(self, *sets: str, new: bool = False, ranks: int = 1) -> Ended:
        first = (*SMALL, f"model.source={self.model}", "data.source=d.tokens", "train.steps=4") if new else ()
        words = [word for item in (*first, *sets) for word in ("--set", item)]
        return self.nursery.command("train", "--run", "run", "--ranks", str(ranks), *words, folder=self.path)

    def metrics(self) -> list[dict[str, Any]]:
        return RunFolder(self.path / "run").read_metrics()


@pytest.fixture
def folder(nursery: Nursery, small_model: Path, tmp_path: Path) -> Folder:
    made = Folder(nursery, small_model, tmp_path)
    made.data(documents())
    return made


def refused(end: Ended, sentence: str, code: int = 2) -> None:
    assert end.code == code, end.out + end.err
    assert end.err.count("error:") == 1
    assert "Traceback" not in end.err
    assert re.search(sentence, end.err), end.err


def other_labels() -> list[dict[str, str]]:
    """The same tokens: the border between prompt and completion moves."""
    return [
        {"prompt": record["prompt"][:-4], "completion": record["prompt"][-4:] + record["completion"]}
        for record in documents()
    ]


def other_middle() -> list[dict[str, str]]:
    """200 of 800 documents differ, in their completions alone and by one letter."""
    changed = documents()
    for record in changed[300:500]:
        record["completion"] = record["completion"].replace("answer", "onswer")
    return changed


def moved_bounds() -> list[dict[str, str]]:
    """The same tokens and labels: the first letter of a prompt goes to the end of the document before."""
    records = [{"prompt": "", "completion": record["prompt"] + record["completion"]} for record in documents()]
    records[400]["completion"], moved = records[400]["completion"][1:], records[400]["completion"][0]
    records[399]["completion"] += moved
    return records


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [("rms_norm_eps", 0.5, "norm_eps was 1e-0[56], and now it is 0.5"), ("rope_theta", 77.0, "rope.theta was .*77.0")],
)
def test_another_model_of_the_same_shapes_is_refused(folder: Folder, name: str, value: float, sentence: str) -> None:
    assert folder.train(new=True).code == 0
    file = folder.path / "run" / "model" / "config.json"
    text = file.read_text()
    config = json.loads(text)
    (config["rope_parameters"] if name == "rope_theta" else config)[name] = value
    file.write_text(json.dumps(config))
    refused(folder.train("train.steps=6"), f"config.json .* changed since the checkpoint of step 4: {sentence}")
    refused(folder.nursery.command("export", "run", "out", folder=folder.path), sentence)
    file.write_text(text)
    assert folder.train("train.steps=6").code == 0


def test_other_ranks_are_said(folder: Folder) -> None:
    assert folder.train("train.batch=2", new=True).code == 0
    said = folder.train("train.steps=5", ranks=2).out
    assert "rounding differ from the checkpoint of step 4; losses may differ slightly: ranks 1 -> 2\n" in said
    assert "change rounding" not in folder.train("train.steps=6", ranks=2).out


@pytest.mark.parametrize("change", [other_labels, other_middle, moved_bounds], ids=lambda change: change.__name__)
def test_other_data_are_refused(folder: Folder, change: Any) -> None:
    if change is moved_bounds:
        records = [{"prompt": "", "completion": record["prompt"] + record["completion"]} for record in documents()]
        folder.data(records)
    before = open_tokens(folder.path / "d.tokens")
    assert folder.train(new=True).code == 0
    folder.data(change())
    after = open_tokens(folder.path / "d.tokens")
    assert (before.tokens, before.documents) == (after.tokens, after.documents)
    refused(
        folder.train("train.steps=6"),
        "the data have changed since the checkpoint of step 4: it saw 2[0-9]+ tokens in 800 documents, sha256 .*, now",
    )
    assert len(folder.metrics()) == 4


def test_the_same_data_under_another_name(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    (folder.path / "d.tokens").rename(folder.path / "moved.tokens")
    end = folder.train("train.steps=6", "data.source=moved.tokens")
    assert end.code == 0, end.err
    assert "changed since the checkpoint of step 4: data.source d.tokens -> moved.tokens, train.steps 4 -> 6" in end.out


HARMLESS = {
    "seed = 0": "seed = 7",
    "batch = 4": "batch = 8",
    "tokens = 64": "tokens = 32",
    "beta2 = 0.95": "beta2 = 0.9",
    "weight_decay = 0.1": "weight_decay = 0.0",
    "clip = 1.0": "clip = 9.0",
}


@pytest.mark.parametrize("before", HARMLESS)
def test_a_configuration_edited_by_hand_is_compared_with_the_checkpoint(folder: Folder, before: str) -> None:
    assert folder.train(new=True).code == 0
    config = folder.path / "run" / "config.toml"
    text = config.read_text()
    head, found, tail = text.partition("[train]")
    assert before in tail
    config.write_text(head + found + tail.replace(before, HARMLESS[before]))
    name, _, old = before.partition(" = ")
    new = HARMLESS[before].partition(" = ")[2]
    refused(
        folder.train("train.steps=6"),
        rf"train.{name} is {new}, and its checkpoints have {old}: --set train.{name}={old} continues it",
    )
    end = folder.train("train.steps=6", f"train.{name}={old}")
    assert end.code == 0, end.err


def test_an_edited_rate_is_taken_and_said(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    config = folder.path / "run" / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.003", "learning_rate = 0.5"))
    end = folder.train("train.steps=6", "train.schedule=wsd", "plan.recipe=alst")
    assert end.code == 0, end.err
    said = next(line for line in end.out.splitlines() if "changed since" in line)
    assert said.startswith("warning: changed since the checkpoint of step 4: ")
    for change in (
        "plan.recipe auto -> alst",
        "train.steps 4 -> 6",
        "train.learning_rate 0.003 -> 0.5",
        "train.schedule cosine -> wsd",
    ):
        assert change in said
    assert [line["learning_rate"] > 0.01 for line in folder.metrics()] == [False] * 4 + [True] * 2
    again = folder.train("train.steps=7")  # the next checkpoint has the new values: nothing but the steps is new
    assert "changed since the checkpoint of step 6: train.steps 6 -> 7\n" in again.out


def test_nothing_changed_is_nothing_said(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    end = folder.train()
    assert end.code == 0
    assert "changed" not in end.out


def test_another_mesh_is_said(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    end = folder.train("train.steps=6", "mesh.ulysses=2", "plan.recipe=sweep", ranks=2)
    assert end.code == 0, end.err
    said = next(line for line in end.out.splitlines() if "changed since" in line)
    assert said == (
        "warning: changed since the checkpoint of step 4: plan.recipe auto -> sweep, mesh.ulysses 1 -> 2, "
        "train.steps 4 -> 6"
    )


def computed(folder: Folder, step: int, **changes: str | None) -> dict[str, str]:
    """What a checkpoint's manifest has under "computed", with changes written to it; None takes an entry out."""
    files = CheckpointFolder(folder.path / "run" / "checkpoints")
    manifest = files.manifest(step)
    assert manifest is not None
    found = {**manifest["computed"], **changes}
    manifest["computed"] = {name: value for name, value in found.items() if value is not None}
    text = json.dumps({**manifest, "sha256": text_sha256(manifest)})
    (files.path(step) / "manifest.json").write_text(text)
    return manifest["computed"]


def test_another_tile_is_said(folder: Folder) -> None:
    """An old checkpoint has none: its tile was 8K, and the tokens of a pass go into one as they do now."""
    assert folder.train("plan.recipe=alst", new=True).code == 0
    assert "tile" not in computed(folder, 4, tile=None)
    end = folder.train("train.steps=5")
    assert end.code == 0, end.err
    assert "change rounding" not in end.out
    assert computed(folder, 5, tile="24")
    said = folder.train("train.steps=6").out
    assert "rounding differ from the checkpoint of step 5; losses may differ slightly: tile 24 -> 256" in said


def test_a_named_tile_goes_on(folder: Folder) -> None:
    assert folder.train("plan.recipe=alst", "plan.tile=24", new=True).code == 0
    end = folder.train("train.steps=5")
    assert end.code == 0, end.err
    assert "change rounding" not in end.out
    assert computed(folder, 5)["tile"] == "24"


def test_open_options_come_from_the_checkpoint(folder: Folder) -> None:
    """A configuration that leaves tokens and batch open continues with the checkpoint's."""
    assert folder.train(new=True).code == 0
    config = folder.path / "run" / "config.toml"
    config.write_text(re.sub("(tokens|batch) = .*\n", "", config.read_text()))
    end = folder.train("train.steps=5")
    assert end.code == 0, end.err
    assert "Each step: 4 sequences of 64 tokens" in end.out


def as_an_old_run(run: Path, data: Path) -> None:
    """Give a checkpoint the record of the data that it had before version 2 of the token file."""
    files = CheckpointFolder(run / "checkpoints")
    step = files.steps()[-1]
    manifest = files.manifest(step)
    assert manifest is not None
    opened = open_tokens(data)
    tokens = opened.read(0, opened.tokens).tokens
    ends = np.concatenate((tokens[:65536], tokens[-65536:]))
    manifest["data"] = [opened.tokens, opened.documents, opened.tokenizer, zlib.crc32(ends.data)]
    file = files.path(step) / "manifest.json"
    file.write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))


def test_a_checkpoint_of_an_older_version_continues_with_a_notice(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    as_an_old_run(folder.path / "run", folder.path / "d.tokens")
    end = folder.train("train.steps=6")
    assert end.code == 0, end.err
    assert "an older Ithaca wrote the checkpoint of step 4: it recorded only the counts and both ends" in end.out
    assert "older Ithaca" not in folder.train("train.steps=7").out


def test_a_checkpoint_of_an_older_version_still_compares_both_ends(folder: Folder) -> None:
    assert folder.train(new=True).code == 0
    as_an_old_run(folder.path / "run", folder.path / "d.tokens")
    changed = documents()
    changed[-1]["completion"] = changed[-1]["completion"].replace("answer", "onswer")
    folder.data(changed)
    refused(folder.train("train.steps=6"), "the data have changed since the checkpoint of step 4")


def test_an_old_token_file_and_the_same_one_prepared_again(folder: Folder) -> None:
    """A run that begins with a file of version 1 continues with the same data in version 2."""
    new = open_tokens(folder.path / "d.tokens")
    window = new.read(0, new.tokens)
    assert window.learned is not None
    learned_from = [
        int(start) + len(record["prompt"]) for start, record in zip(new.bounds(), documents(), strict=False)
    ]
    shutil.copy(folder.path / "d.tokens", folder.path / "new.tokens")
    write_version1(folder.path / "d.tokens", window.tokens.tobytes(), new.bounds().tolist(), learned_from)
    end = folder.train(new=True, ranks=2)
    assert end.code == 0, end.err
    assert end.err.count("is of version 1, without checksums: computing them once") == 1
    assert (folder.path / "d.tokens.index").exists()
    end = folder.train("train.steps=6", "data.source=new.tokens")
    assert end.code == 0, end.err
    assert len(folder.metrics()) == 6


@pytest.mark.parametrize("prompt", [True, False], ids=["prompts alone", "single tokens"])
def test_data_without_labels_are_refused(folder: Folder, prompt: bool) -> None:
    record = {"prompt": "question", "completion": ""} if prompt else {"prompt": "", "completion": "x"}
    folder.data([record] * 100)
    refused(folder.train(new=True), "'d.tokens' has 0 labels in its [0-9]+ tokens")
    assert not (folder.path / "run" / "config.toml").exists()


def changing(config: Config, path: Path, change: str) -> None:
    """Train; after the second step, change the data in place."""
    step, data = TrainingRun._step, Path(config.data.source)

    def changed(run: TrainingRun) -> dict[str, Any]:
        if run.done == 2:
            if change == "truncate":
                os.truncate(data, 5000)
            elif change == "delete":
                data.unlink()
            else:
                with data.open("r+b") as file:  # a run reads the whole block, so any token is noticed
                    file.seek(9000)
                    file.write(b"\x01")
        return step(run)

    loop.TrainingRun._step = changed
    train(config, path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "truncate",
            r"d.tokens' ends at byte 5000 where byte \d+ was reached before: it has shrunk",
        ),
        ("overwrite", r"d.tokens' has changed since it was prepared: its tokens 0 to \d+, their document bounds or"),
        ("delete", ""),
    ],
)
def test_data_that_change_under_a_run(
    folder: Folder, nursery: Nursery, small_config: Config, change: str, sentence: str
) -> None:
    """One sentence and code 1; a file that is only deleted stays open until the end."""
    config = replace(small_config, data=replace(small_config.data, source=str(folder.path / "d.tokens")))
    config = replace(config, train=replace(config.train, steps=8))
    path = folder.path / "run"
    end = nursery.job(changing, config, path, change)[0]
    if not sentence:
        assert end.code == 0, end.err
        return
    assert end.code != 0
    assert re.search(sentence, end.err), end.err
    assert "Fatal Python error" not in end.err  # SIGBUS
    assert 2 <= len(RunFolder(path).read_metrics()) < 8


def test_the_class_of_each_option_is_decided() -> None:
    """An option that somebody adds is refused on resume until it is named among those that may change."""
    record = Config()
    for option in ("train.seed=1", "train.beta1=0.5", "model.seed=1", "model.dtype=float64"):
        assert read_config(None, [option]).conflict(record)
    for option in ("train.steps=1", "mesh.ring=2", "run.keep=9", "plan.recipe=sweep", "data.source=x"):
        config = read_config(None, [option])
        assert config.conflict(record) is None
        assert config.changes(record)
    assert record.changes(record) == []
