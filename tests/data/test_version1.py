"""Token files of version 1: the same data as in version 2, with checksums that are computed once and kept."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.base.errors import DataError, RunError
from ithaca.data import reader, tokenfile, version1
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import TokenFile, in_memory, open_tokens
from tests.data.old_format import HEADER_BYTES, write_version1


def _all(data: TokenFile) -> tuple[list[int], list[int], list[bool] | None]:
    window = data.read(0, data.tokens)
    learned = None if window.learned is None else window.learned.tolist()
    return window.tokens.tolist(), window.documents.tolist(), learned


@pytest.fixture
def old(tmp_path: Path) -> Path:
    write_version1(tmp_path / "a.tokens", b"abcdefgh", [0, 5, 8], [3, 5])
    return tmp_path / "a.tokens"


def test_the_same_data_as_in_version_2(old: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "abc", "completion": "de"}, {"text": "fgh"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "new.tokens")
    new = open_tokens(tmp_path / "new.tokens")
    for data in (open_tokens(old), open_tokens(old)):  # the second one reads the index
        assert _all(data) == _all(new)
        assert data.identity() == new.identity()
        assert data.header.labels == new.header.labels == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(sum), min_size=1, max_size=12))
def test_over_many_blocks(tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]]) -> None:
    folder = tmp_path_factory.mktemp("old")
    learned = [place >= prompt for prompt, rest in lengths for place in range(prompt + rest)]
    bounds = np.cumsum([0, *(prompt + rest for prompt, rest in lengths)])
    tokens = np.arange(bounds[-1], dtype=np.uint16)
    offsets = [int(start) + prompt for start, (prompt, _) in zip(bounds, lengths, strict=False)]
    write_version1(folder / "a", tokens.tobytes(), bounds.tolist(), offsets, "uint16")
    with pytest.MonkeyPatch.context() as patch:
        for module in (tokenfile, reader, version1):
            patch.setattr(module, "BLOCK", 16)
        wanted = in_memory(tokens, bounds, np.array(learned), "bytes", 65536)
        for data in (open_tokens(folder / "a"), open_tokens(folder / "a")):
            assert _all(data) == _all(wanted)
            assert data.identity() == wanted.identity()


def test_checksums_are_computed_once(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_tokens(old)
    said = capsys.readouterr().err
    assert f"'{old}' is of version 1, without checksums: computing them once (4.05 KiB)" in said
    assert f"Checksums: {old}.index" in said
    assert sorted(os.listdir(old.parent)) == ["a.tokens", "a.tokens.index"]
    open_tokens(old)
    assert capsys.readouterr().err == ""


def test_beside_a_file_that_nobody_may_write(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = version1._keep
    monkeypatch.setattr(version1, "_keep", lambda content, place: place.parent != old.parent and keep(content, place))
    run = tmp_path / "run"
    run.mkdir()
    open_tokens(old, run)
    assert f"Checksums: {run}/a.tokens.index" in capsys.readouterr().err
    open_tokens(old, run)
    assert capsys.readouterr().err == ""
    assert open_tokens(old).read(0, 1).tokens.tolist() == [97]
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_is_gone_keeps_no_index(old: Path) -> None:
    assert not version1._keep(b"", old.parent / "gone" / "a.index")


def test_a_changed_file_does_not_match_its_index(old: Path) -> None:
    data = open_tokens(old)
    raw = bytearray(old.read_bytes())
    raw[HEADER_BYTES] ^= 1
    old.write_bytes(raw)
    for opened in (data, open_tokens(old)):
        with pytest.raises(RunError, match="has changed since it was prepared: its tokens 0 to 7"):
            opened.read(0, 3)


@pytest.mark.parametrize("damage", ["header", "short", "another", "magic", "empty"])
def test_a_damaged_index_is_made_again(old: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = _all(open_tokens(old))
    index = old.with_name("a.tokens.index")
    raw = index.read_bytes()
    if damage == "another":
        write_version1(old, b"abcdefgh", [0, 4, 8], [3, 5])
        wanted = ([*b"abcdefgh"], [0] * 4 + [1] * 4, [False] * 3 + [True, False] + [True] * 3)
    elif damage == "header":
        index.write_bytes(raw.replace(b'"labels": 4', b'"labels": 5'))
    else:
        index.write_bytes({"short": raw[:-1], "magic": b"\0" + raw[1:], "empty": b""}[damage])
    capsys.readouterr()
    assert _all(open_tokens(old)) == wanted
    assert "computing them once" in capsys.readouterr().err


BAD = {
    "crc32": ([0, 5, 8], [3, 5], {"bounds_crc32": 1}, "has damaged document bounds"),
    "falling": ([0, 9, 8], [3, 8], {}, "has damaged document bounds"),
    "empty document": ([0, 8, 8], [3, 8], {}, "has damaged document bounds"),
    "not from 0": ([1, 5, 8], [3, 5], {}, "has damaged document bounds"),
    "beyond the end": ([0, 5, 9], [3, 5], {}, "has damaged document bounds"),
    "learned before": ([0, 5, 8], [3, 4], {}, "has damaged document bounds"),
    "learned behind": ([0, 5, 8], [6, 5], {}, "has damaged document bounds"),
    "type": ([0, 5, 8], [3, 5], {"learned_from": 1}, "has a damaged header"),
    "crc32 type": ([0, 5, 8], [3, 5], {"bounds_crc32": "1"}, "has a damaged header"),
    "ids": ([0, 5, 8], [3, 5], {"vocab": 100}, "has token id 104, but its header says that ids are below 100"),
    "size": ([0, 5, 8], [3, 5], {"learned_from": False}, "has 4144 bytes where its header promises 4128"),
}


@pytest.mark.parametrize("kind", BAD)
def test_damage(tmp_path: Path, kind: str) -> None:
    bounds, learned_from, changes, sentence = BAD[kind]
    write_version1(tmp_path / "a", b"abcdefgh", bounds, learned_from, changes=changes)
    with pytest.raises(DataError, match=sentence):
        open_tokens(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_that_was_replaced_says_which_index_is_of_the_old_one(tmp_path: Path) -> None:
    """Counts and bounds are the same, so nothing but the tokens tells."""
    file = tmp_path / "a.tokens"
    write_version1(file, b"abcd", [0, 2, 4])
    open_tokens(file)
    write_version1(file, b"abcx", [0, 2, 4])
    with pytest.raises(RunError, match=r"if it was replaced on purpose, remove a\.tokens\.index, its checksums"):
        open_tokens(file).read(0, 4)
    (tmp_path / "a.tokens.index").unlink()
    assert open_tokens(file).read(0, 4).tokens.tobytes() == b"abcx"
