"""Runs on packed and mixed data: killed and continued to the bit, what they say, and what they refuse."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.checkpoint.files import CheckpointFolder, text_sha256
from ithaca.config import Config, read_config
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import open_tokens
from ithaca.train import run as whole_run
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from tests.nursery import Ended, Nursery
from tests.train.conftest import SMALL

STEPS = 9
OPTIONS = {
    "whole": ["data.source=text.tokens", "data.packing=whole"],
    "joined": ["data.source=text.tokens", "data.packing=joined"],
    "mixture": ["data.mix.chats.tokens=0.6", 'data.mix={"text.tokens"=0.4}', "data.long_share=0.5", "data.long=40"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two token files: conversations with a mask, and text."""
    top, chance = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    chats = [{"prompt": f"question {n} ", "completion": "so " * int(chance.integers(1, 40))} for n in range(120)]
    text = [{"text": "sea " * int(chance.integers(1, 60))} for _ in range(90)]
    for name, records in (("chats", chats), ("text", text)):
        (top / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
        prepare([top / f"{name}.jsonl"], top / f"{name}.tokens")
    return top


def train(nursery: Nursery, folder: Path, model: Path, run: str, *sets: str, new: bool = True) -> Ended:
    first = (*SMALL, f"model.source={model}", "model.dtype=float32", f"train.steps={STEPS}") if new else ()
    words = [word for item in (*first, *sets) for word in ("--set", item)]
    return nursery.command("train", "--run", run, "--ranks", "1", *words, folder=folder)


def metrics(path: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "tokens_per_second_per_rank", "host_bytes")
    return [{key: line[key] for key in line if key not in timed} for line in RunFolder(path).read_metrics()]


def refused(end: Ended, sentence: str, code: int = 2) -> None:
    assert end.code == code, end.out + end.err
    assert end.err.count("error:") == 1
    assert "Traceback" not in end.err
    assert re.search(sentence, end.err), end.err


def die(config: Config, path: Path, folder: Path, step: int) -> None:
    """Train in a folder until all ranks are killed in a step."""
    backward = TrainingRun._backward

    def killed(run: TrainingRun, batches: list) -> Any:
        if run.done + 1 == step:
            run.checkpoints.wait()  # that of step 4, which a thread writes
            os.kill(os.getpid(), signal.SIGKILL)
        return backward(run, batches)

    TrainingRun._backward = killed
    os.chdir(folder)
    whole_run.train(config, path)


@pytest.mark.parametrize("name", OPTIONS)
def test_killed_and_continued(nursery: Nursery, folder: Path, small_config: Config, tmp_path: Path, name: str) -> None:
    """Two ranks are killed between checkpoints; the metrics are those of an undisturbed run to the last bit."""
    data = read_config(None, OPTIONS[name]).data
    config = replace(small_config, data=data, train=replace(small_config.train, steps=STEPS))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert [end.code for end in nursery.job(die, config, cut, folder, 7, ranks=2)] == [-signal.SIGKILL] * 2
    assert len(metrics(cut)) == 6
    for path in (cut, whole):
        for end in nursery.job(die, config, path, folder, 99, ranks=2):
            assert end.code == 0, end.err
    found, said = metrics(cut), RunFolder(cut).log.read_text()
    assert "Continuing from the checkpoint of step 4" in said
    assert found == metrics(whole)
    assert len({line["loss"] for line in found}) == STEPS
    assert "Data: " in said
    assert "Data seen: " in said
    if name == "mixture":
        by_source = {key: found[-1][key] for key in found[-1] if key.startswith("tokens/")}
        total = sum(by_source.values())
        assert total + found[-1]["padding"] == STEPS * 4 * 64
        for part, share in (("chats", 0.6), ("more", 0.5)):
            assert sum(by_source[key] for key in by_source if part in key) / total == pytest.approx(share, abs=0.06)


def test_what_a_run_must_not_change(nursery: Nursery, folder: Path, small_model: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    more = ("data.mix.chats.tokens=3", "data.mix.text.tokens=1", "train.steps=3")
    assert train(nursery, folder, small_model, run, *more).code == 0
    again = ("train.steps=4",)
    changes = {
        "data.packing=cut": "data.packing is 'cut', and its checkpoints have 'auto': --set data.packing=auto continues",
        "data.too_long=drop": "data.too_long is 'drop', and its checkpoints have 'truncate'",
        "data.mix.text.tokens=2": r"data have changed .* it saw 75.0% of .* \+ 25.0% of .*, now there are 60.0% of",
        "data.long_share=0.5": r"no document has 32768 tokens",
    }
    for change, sentence in changes.items():
        refused(train(nursery, folder, small_model, run, *again, change, new=False), sentence)
    # The same data under another name, and the same shares by other weights
    (folder / "copy.tokens").write_bytes((folder / "chats.tokens").read_bytes())
    config = tmp_path / "run" / "config.toml"
    config.write_text(re.sub("mix = .*", 'mix = {"text.tokens" = 0.25, "copy.tokens" = 0.75}', config.read_text()))
    end = train(nursery, folder, small_model, run, *again, new=False)
    assert end.code == 0, end.err
    assert "changed since the checkpoint of step 3: data.mix {" in end.out


def test_a_run_from_before_goes_on_cutting(nursery: Nursery, folder: Path, small_model: Path, tmp_path: Path) -> None:
    """Its record and its config.toml know no packing; a configuration that asks for `auto` does not change it."""
    old, new = tmp_path / "old", tmp_path / "new"
    sets = ("data.source=chats.tokens", "data.packing=cut", "run.keep=9")
    for path, steps in ((new, 6), (old, 4)):
        end = train(
            nursery,
            folder,
            small_model,
            str(path),
            *sets,
            f"train.steps={steps}",
            "train.schedule=wsd",
            "train.decay=0",
        )
        assert end.code == 0, end.err
        assert "Data: " not in end.out
    config = old / "config.toml"
    before = re.sub("(packing|too_long) = .*\n", "", config.read_text())
    config.write_text(before)
    files = CheckpointFolder(old / "checkpoints")
    manifest = files.manifest(4)
    assert manifest is not None
    manifest["config"] = re.sub("(packing|too_long) = .*\n", "", manifest["config"])
    (files.path(4) / "manifest.json").write_text(json.dumps({**manifest, "sha256": text_sha256(manifest)}))
    end = train(nursery, folder, small_model, str(old), "train.steps=5", new=False)
    assert end.code == 0, end.err
    assert "changed since" not in end.out.replace("train.steps 4 -> 5", "") or "packing" not in end.out
    (tmp_path / "mine.toml").write_text(before.replace("steps = 4", "steps = 6"))
    end = nursery.command("train", str(tmp_path / "mine.toml"), "--run", str(old), "--ranks", "1", folder=folder)
    assert end.code == 0, end.err
    assert [line["loss"] for line in metrics(old)] == [line["loss"] for line in metrics(new)]


WRONG = {
    "data.packing=hole": "data.packing 'hole' does not exist: did you mean 'whole'",
    "data.packing=": "data.packing '' does not exist",
    "data.packing=3": "data.packing 3 is not text",
    "data.too_long=cut": "data.too_long 'cut' does not exist",
    "data.to_long=drop": "'data.to_long' is not an option: did you mean 'too_long'",
    "data.mix=text.tokens": "data.mix is 'text.tokens', no table of token files and weights: write --set data.mix",
    "data.mix=[1, 2]": r"data.mix is \[1, 2\], no table",
    "data.mix={}": "is a table without options",
    "data.mix.=0.5": "is not of the form key=value",
    "data.mix.text.tokens": "is not of the form key=value",
    "data.mix.text.tokens=0": "the weight of 'text.tokens' is 0: a number above 0 and up to 1e\\+09 is needed",
    "data.mix.text.tokens=-1": "the weight of 'text.tokens' is -1",
    "data.mix.text.tokens=nan": "the weight of 'text.tokens' is nan",
    "data.mix.text.tokens=inf": "the weight of 'text.tokens' is inf",
    "data.mix.text.tokens=1e400": "the weight of 'text.tokens' is inf",
    "data.mix.text.tokens=half": "the weight of 'text.tokens' is 'half'",
    "data.mix.text.tokens=true": "the weight of 'text.tokens' is True",
    "data.long_share=0": "data.long_share is 0: a number above 0 and below 1 is needed",
    "data.long_share=1": "data.long_share is 1: a number above 0 and below 1",
    "data.long_share=nan": "data.long_share is nan",
    "data.long_share=much": "data.long_share 'much' is not a number",
    "data.long=32K": "data.long is 32768, but data.long_share is not set: data.long_share=0.5 uses it",
    "data.long=0": "0",
    "data.long=long": "long",
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_options(nursery: Nursery, tmp_path: Path, option: str) -> None:
    end = nursery.command("train", "--run", "run", "--ranks", "1", "--set", option, folder=tmp_path)
    refused(end, WRONG[option])
    assert list(tmp_path.iterdir()) == []


TOGETHER = {
    "both": (["data.source=text.tokens", "data.mix.text.tokens=1"], "data.source is 'text.tokens' and data.mix has 1"),
    "missing": (["data.mix.text.tokens=1", "data.mix.none.tokens=1"], "'none.tokens' cannot be read as a token file"),
    "no token file": (["data.mix.text.tokens=1", "data.mix.text.jsonl=1"], "'text.jsonl' is not a token file"),
    "twice": (["data.mix.text.tokens=1", "data.mix../text.tokens=1"], "have the same documents: leave one of them out"),
    "other tokenizer": (["data.mix.text.tokens=1", "data.mix.ready.tokens=1"], "was made with another tokenizer"),
    "no long ones": (["data.source=text.tokens", "data.long_share=0.5"], "no document has 32768 tokens .* the longest"),
    "all long": (["data.source=text.tokens", "data.long_share=0.5", "data.long=2"], "can only have a share of 1 in"),
    "all dropped": (
        ["data.source=chats.tokens", "train.tokens=8", "data.too_long=drop"],
        "each of the 120 documents of 'chats.tokens' is longer than train.tokens 8",
    ),
    "no labels": (["data.mix.text.tokens=1", "data.mix.prompts.tokens=1"], "'prompts.tokens' has 0 labels in its"),
    "large ids": (["data.mix.ready.tokens=1"], "the data have token ids below 1001, but the model's vocabulary is"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_wrong_data(nursery: Nursery, folder: Path, tmp_path: Path, name: str) -> None:
    for made, record in (("ready", {"tokens": [5, 1000]}), ("prompts", {"prompt": "abc", "completion": ""})):
        if not (folder / f"{made}.tokens").exists():
            (folder / f"{made}.jsonl").write_text(json.dumps(record))
            prepare([folder / f"{made}.jsonl"], folder / f"{made}.tokens")
    sets, sentence = TOGETHER[name]
    words = [word for item in (*SMALL, *sets) for word in ("--set", item)]
    before = sorted(folder.iterdir())
    end = nursery.command("train", "--run", str(tmp_path / "run"), "--ranks", "1", *words, folder=folder)
    refused(end, sentence)
    assert list(tmp_path.iterdir()) == []
    assert sorted(folder.iterdir()) == before


def test_the_mask_of_the_file_decides(folder: Path) -> None:
    assert open_tokens(folder / "chats.tokens").header.masked
    assert not open_tokens(folder / "text.tokens").header.masked
