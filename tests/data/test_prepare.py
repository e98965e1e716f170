"""Preparation goes on where it was stopped, to the byte; and what stands in the way of the file is one sentence."""

import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from rich.console import Console

from ithaca.base.errors import DataError, RunError
from ithaca.data.preparation import partial
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.sources import Place
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, JSONL with prompts and empty documents, and Parquet: 3200 documents."""
    top = tmp_path_factory.mktemp("inputs")
    chance = random.Random(0)
    records = [
        {"prompt": "ask " * chance.randrange(3), "completion": "the sea " * chance.randrange(4)} for _ in range(3000)
    ]
    (top / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    for number in range(100):
        (top / f"{number}.txt").write_text("home " * chance.randrange(1, 9))
    texts = [{"text": "island " * chance.randrange(9)} for _ in range(100)]
    parquet.write_table(pa.Table.from_pylist(texts), top / "b.parquet", row_group_size=30)
    return top


@pytest.fixture(scope="module")
def wanted(inputs: Path, bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("wanted") / "out"
    made = prepare([inputs], out, load_tokenizer(bpe))
    assert made.empty > 0
    assert made.header.documents + made.empty == 3200
    return out.read_bytes()


_PROGRAM = """
import sys
from pathlib import Path
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
source, out, tokenizer = map(Path, sys.argv[1:])
prepare([source], out, load_tokenizer(tokenizer), journal_seconds=0, group_bytes=1)
"""


def _start(inputs: Path, out: Path, bpe: Path, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", _PROGRAM, str(inputs), str(out), str(bpe)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def _journaled(out: Path) -> int:
    try:
        content = json.loads(out.with_name(f"{out.name}.partial.journal").read_text())
        return content["documents"] + content["empty"]
    except (OSError, ValueError):
        return 0


def test_killed_and_gone_on(inputs: Path, wanted: bytes, bpe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    reached = []
    chance = random.Random(os.urandom(8))
    for _ in range(3):
        before = _journaled(out)
        job = _start(inputs, out, bpe)
        target = before + chance.randrange(1, 60)
        while _journaled(out) < target and job.poll() is None:
            time.sleep(chance.random() / 1000)
        job.kill()
        job.communicate()
        reached.append(_journaled(out))
    assert not out.exists()
    assert 0 < reached[0] < reached[1] < reached[2] < 3200
    said = io.StringIO()
    prepare([inputs], out, load_tokenizer(bpe), console=Console(file=said))
    assert out.read_bytes() == wanted
    assert said.getvalue().startswith(f"Continuing '{out}' after ")
    assert os.listdir(tmp_path) == ["out"]


class _Stop(BaseException):
    """As a signal would come."""


@pytest.mark.parametrize("journal_seconds", [0.0, 1e9])
@pytest.mark.parametrize("groups", [1, 60, 155])  # in the text, the JSONL, the Parquet file
def test_stopped_between_journals(
    inputs: Path,
    wanted: bytes,
    bpe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    journal_seconds: float,
    groups: int,
) -> None:
    left = groups
    reach = partial.Partial.reach

    def some(self: partial.Partial, place: Place, force: bool = False) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Stop  # the group has been added and not yet journaled
        reach(self, place, force)

    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "reach", some)
        with pytest.raises(_Stop):
            prepare(
                [inputs], tmp_path / "out", load_tokenizer(bpe), journal_seconds=journal_seconds, group_bytes=20 * 1024
            )
    assert (tmp_path / "out.partial").stat().st_size > 4096
    prepare([inputs], tmp_path / "out", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == wanted


@pytest.mark.parametrize("name", ["rename", "_complete"])
def test_stopped_at_the_end(
    inputs: Path, wanted: bytes, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    home = Path if name == "rename" else partial.Partial
    original = getattr(home, name)

    def stop(self, *arguments):
        if name == "_complete":
            original(self, *arguments)
        raise _Stop

    with monkeypatch.context() as patch:
        patch.setattr(home, name, stop)
        with pytest.raises(_Stop):
            prepare([inputs], tmp_path / "out", load_tokenizer(bpe))
    assert not (tmp_path / "out").exists()
    prepare([inputs], tmp_path / "out", load_tokenizer(bpe))
    assert (tmp_path / "out").read_bytes() == wanted


def _stopped(inputs: Path, out: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation that was stopped when all was read."""
    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "finish", lambda *_: (_ for _ in ()).throw(_Stop))
        with pytest.raises(_Stop):
            prepare([inputs], out, load_tokenizer(bpe))


@pytest.mark.parametrize("change", ["nothing", "content", "time", "one more", "tokenizer", "end", "journal", "partial"])
def test_begins_anew_with_anything_else(
    bpe: Path, plain_bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    top, out, tokenizer = tmp_path / "top", tmp_path / "out", bpe
    top.mkdir()
    (top / "a.txt").write_text("the sea")
    os.utime(top / "a.txt", (1, 1))
    _stopped(top, out, bpe, monkeypatch)
    if change == "content":
        (top / "a.txt").write_text("the sea bore us home")
        os.utime(top / "a.txt", (1, 1))
    elif change == "time":
        (top / "a.txt").write_text("thy sea")
    elif change == "one more":
        (top / "b.txt").write_text("home")
    elif change == "journal":
        (tmp_path / "out.partial.journal").write_text("{}")
    elif change == "partial":
        os.truncate(tmp_path / "out.partial", 4097)
    elif change in ("tokenizer", "end"):
        tokenizer = plain_bpe if change == "end" else None
    said = io.StringIO()
    prepare([top], out, load_tokenizer(tokenizer) if tokenizer else None, console=Console(file=said))
    prepare([top], tmp_path / "wanted", load_tokenizer(tokenizer) if tokenizer else None)
    assert out.read_bytes() == (tmp_path / "wanted").read_bytes()
    going_on, anew = "Continuing", "the part on disk is from other inputs or another tokenizer\n"
    assert said.getvalue().startswith(going_on) is (change == "nothing")
    assert said.getvalue().endswith(anew) is (change != "nothing")
    assert said.getvalue().count("\n") == 1


def test_ready_tokens_are_narrowed_again_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000).reshape(100, 10))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(_Stop))
        with pytest.raises(_Stop):
            prepare([tmp_path / "a.npy"], tmp_path / "out")
    assert (tmp_path / "out.partial.copy").exists()
    prepare([tmp_path / "a.npy"], tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    assert data.header.dtype == "uint16"
    assert data.read(0, 1000).tokens.tolist() == list(range(1000))
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "out"]


def test_long_documents_are_written_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PIECE", 8)
    tokens = np.arange(100) % 50
    np.save(tmp_path / "a.npy", np.stack([tokens, tokens]))
    prepare([tmp_path / "a.npy"], tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    assert data.read(0, 200).tokens.tolist() == tokens.tolist() * 2
    assert data.bounds().tolist() == [0, 100, 200]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), min_size=1, max_size=12))
def test_a_mask_made_by_pieces_is_that_of_the_prompts(lengths: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial, "PIECE", 16)
        source, out = Path(folder, "a.jsonl"), Path(folder, "out")
        lines = [{"prompt": "p" * prompt, "completion": "c" * rest} for prompt, rest in lengths]
        source.write_text("\n".join(map(json.dumps, lines)))
        prepare([source], out)
        window = open_tokens(out).read(0, open_tokens(out).tokens)
        assert (window.learned is None) == all(prompt == 0 for prompt, _ in lengths)
        if window.learned is not None:
            assert window.learned.tolist() == [token == ord("c") for token in window.tokens.tolist()]


def _no_more_than_5000_bytes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_full_disk(inputs: Path, wanted: bytes, bpe: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands in for a full disk: the same error, from the same call."""
    out = tmp_path / "out"
    job = _start(inputs, out, bpe, preexec_fn=_no_more_than_5000_bytes)
    _, errors = job.communicate()
    assert job.returncode == 1
    last = errors.splitlines()[-1]
    assert f"RunError: '{out}.partial' cannot be written (File too large; " in last
    assert "are free on its disk): fix that and run the same command again" in last
    assert _journaled(out) > 0
    prepare([inputs], out, load_tokenizer(bpe))
    assert out.read_bytes() == wanted


def test_two_at_once(inputs: Path, tmp_path: Path) -> None:
    with (
        partial.Partial(tmp_path / "out", "another", "uint8", 0),
        pytest.raises(DataError, match="out' is being written by another process: wait, or name another --out"),
    ):
        prepare([inputs], tmp_path / "out")


def test_out_refused(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DataError, match="out' exists already: name another file, nothing is overwritten"):
        prepare([inputs], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(DataError, match="link' exists already"):
        prepare([inputs], tmp_path / "link")
    with pytest.raises(
        DataError, match=r"--out .*/f/out' lies in .*/f', which is not a folder: make it with `mkdir -p"
    ):
        prepare([inputs], tmp_path / "f" / "out")


def test_a_bar_on_a_terminal_and_nothing_short_elsewhere(inputs: Path, tmp_path: Path) -> None:
    for terminal in (True, False):
        said = io.StringIO()
        console = Console(file=said, force_terminal=terminal, width=100)
        made = prepare([inputs], tmp_path / f"out-{terminal}", console=console)
        assert (f"{made.header.tokens:,} tokens" in said.getvalue()) is terminal


def test_lines_now_and_then_elsewhere(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.data.preparation.meter._EVERY", 0.0)
    said = io.StringIO()
    made = prepare([inputs], tmp_path / "out", console=Console(file=said), group_bytes=50 * 1024)
    lines = said.getvalue().splitlines()
    assert len(lines) > 5
    assert lines[-1].startswith("100 % of ")
    assert lines[-1].endswith(f", {made.header.tokens:,} tokens")


@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.npy"])
def test_an_input_that_shrinks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A mapping would end the process with SIGBUS."""
    np.save(tmp_path / "a.npy", np.ones((2, 5000), np.uint16))
    for other in ("a.txt", "a.bin"):
        (tmp_path / other).write_bytes(b"a" * 20000)
    add = partial.Partial.add

    def shrink(*args: Any) -> None:
        os.truncate(tmp_path / name, 6000)
        add(*args)

    monkeypatch.setattr(partial.Partial, "add", shrink)
    with pytest.raises(RunError, match=rf"{name}' ends at byte 6000 where byte \d+ was reached before: it has shrunk"):
        prepare([tmp_path / name], tmp_path / "out", bin_dtype="uint16")
    assert not (tmp_path / "out").exists()


def test_an_input_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"a" * 20000)
    add = partial.Partial.add

    def grow(*args: Any) -> None:
        add(*args)
        source.write_bytes(b"b" * 20001)

    monkeypatch.setattr(partial.Partial, "add", grow)
    with pytest.raises(DataError, match=r"has changed while it was read \(20000 bytes before, 20001 now\)"):
        prepare([source], tmp_path / "out")
    monkeypatch.undo()
    prepare([source], tmp_path / "out")
    assert open_tokens(tmp_path / "out").read(0, 20001).tokens.tobytes() == b"b" * 20001
