"""Synthetic documents as a source: how they are packed, and a file that has their name."""

from pathlib import Path

import numpy as np
import pytest

from ithaca.base.errors import DataError
from ithaca.config import DataSection
from ithaca.data.holdout import hold_out
from ithaca.data.packing import Rows
from ithaca.data.reader import in_memory, save_tokens
from ithaca.data.synthetic import LENGTH, needles
from ithaca.planner.documents import file_documents
from ithaca.train.setup.start import read_data
from tests.nursery import Nursery

LINE = "sequences an epoch, cut from documents laid end to end (data.packing=auto: any part of such a document is a shorter one)"  # noqa: E501  # fmt: skip


def test_auto_cuts_them() -> None:
    """All tokens are learned from at every length, also of a part that is held out, and it is said."""
    rows, cut = Rows(needles(), 256, 0, "auto"), Rows(needles(), 256, 0, "cut")
    assert rows.per_epoch * 256 == needles().tokens
    assert all(np.array_equal(*both) for both in zip(rows.draw(3, 5), cut.draw(3, 5), strict=True))
    assert rows.describe() == [f"Data: synthetic needles: {rows.per_epoch:,} {LINE}"]
    assert cut.describe() == []
    assert rows.metrics(9) == {}
    for part in hold_out(needles(), 0.1):
        assert Rows(part, 256, 0, "auto").per_epoch * 256 == part.tokens
    assert file_documents(needles()).lengths(256) == (256,)  # as the planner has it


def test_other_packings_are_what_they_are() -> None:
    assert "truncated, without 11904000 tokens, 96.9% (data.too_long)" in Rows(needles(), 256, 0, "whole").describe()[0]
    tokens, bounds = np.arange(900), np.array([0, 900])
    prompts = in_memory(tokens, bounds, tokens % 2 == 0)
    assert "truncated" in Rows(prompts, 256, 0, "auto").describe()[0]


def test_in_a_mixture(tmp_path: Path) -> None:
    """Each source is packed in its own way."""
    tokens = np.arange(3000) % 100
    save_tokens(tmp_path / "prompts", tokens, np.arange(0, 3001, 100), tokens % 2 == 0, vocab=128)
    data, _ = read_data(DataSection(mix={str(tmp_path / "prompts"): 1.0, "needles": 3.0}), tmp_path)
    first, second = Rows(data, 256, 0, "auto").describe()
    assert first == f"Data: needles: 75.0% of tokens, {needles().tokens // 256:,} {LINE}"
    assert second.endswith("30 documents in 15 sequences an epoch, 21.9% padding")


def test_a_file_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("needles").mkdir()
    assert read_data(DataSection(source="needles"), tmp_path)[0] is needles()  # a folder holds no tokens
    Path("needles").rmdir()
    save_tokens(Path("needles"), np.arange(64) % 9, np.array([0, 64]), None, vocab=9)
    for options in (DataSection(source="needles"), DataSection(mix={"needles": 1.0})):
        with pytest.raises(DataError, match=r"write \./needles for the file, or synthetic:needles for the documents"):
            read_data(options, tmp_path)
    assert read_data(DataSection(source="./needles"), tmp_path)[0].tokens == 64
    assert read_data(DataSection(source="synthetic:needles"), tmp_path)[0].tokens == 1500 * LENGTH


def test_a_run_beside_such_a_file(nursery: Nursery, tmp_path: Path) -> None:
    """One sentence, and nothing stays; each name that it gives is what it says."""
    (tmp_path / "needles").write_bytes(b"notes")
    words = ["train", "--ranks", "1", "--run", "run"]
    for option in ("model.source=needles", "train.device=cpu", "train.tokens=64", "train.batch=2", "train.steps=2"):
        words += ["--set", option]
    end = nursery.command(*words, "--set", "data.source=needles", folder=tmp_path)
    assert (end.code, end.err.count("\n")) == (2, 1)
    assert "there is a file 'needles' in this folder" in end.err
    assert not (tmp_path / "run").exists()
    end = nursery.command(*words, "--set", "data.source=./needles", folder=tmp_path)
    assert "'needles'" in end.err  # it is no token file
    assert "synthetic" not in end.err
    end = nursery.command(*words, "--set", "data.source=synthetic:needles", folder=tmp_path)
    assert end.code == 0, end.err
    assert LINE in end.out
