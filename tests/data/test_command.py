"""`ithaca data`: what it prints, and which options do not go together."""

from pathlib import Path

import pytest

from ithaca.base.errors import DataError
from ithaca.data.preparation.command import run
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens


def _run(paths: list[Path], out=None, tokenizer=None, stats=False, picture=None, bin_dtype=None) -> None:
    run(paths, out, tokenizer, stats, picture, bin_dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Named so that rich would see markup in it."""
    top = tmp_path / "[bold]:car:"
    top.mkdir()
    (top / "a.txt").write_text("the sea")
    (top / "b.txt").write_text("")
    (top / "c.png").write_bytes(b"\0")
    return top


def test_prepare_then_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.tokens"
    _run([folder], out)
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 7 tokens, 1 document, 4.04 KiB",
        "Each byte is a token; --tokenizer uses a model's tokenizer instead",
        "Skipped: 1 file of other kinds (c.png)",
        "Skipped: 1 empty document",
        f"Next: ithaca data '{out}' --stats",
        f"      ithaca train --set model.source=tiny --set 'data.source={out}' --set train.tokens=7",
    ]
    _run([out], stats=True)
    said = capsys.readouterr().out
    assert "longest" in said
    assert said.splitlines()[-1] == f"Picture: {out}.png"
    assert Path(f"{out}.png").exists()
    _run([out], stats=True, picture=folder / "p")
    assert (folder / "p").read_bytes().startswith(b"\x89PNG")


def test_tokenizer(folder: Path, bpe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run([folder / "a.txt"], folder / "out", bpe)
    assert "bytes;" not in capsys.readouterr().out
    assert open_tokens(folder / "out").tokenizer == load_tokenizer(bpe).fingerprint


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "--out is missing: name the token file to write"),
        ({"out": "o", "picture": "p.png"}, "--picture needs --stats"),
        ({"stats": True, "out": "o"}, "--stats reads an existing token file: leave out --out"),
        ({"stats": True, "tokenizer": "t"}, "leave out --tokenizer"),
        ({"stats": True, "bin_dtype": "uint8"}, "leave out --bin-dtype"),
        ({"stats": True}, "a.txt' is not a token file: make one with `ithaca data"),
        ({"stats": True, "paths": []}, "--stats was given 0 paths: name 1 token file"),
        ({"paths": [], "out": "o"}, "no path is given"),
        ({"out": "o", "tokenizer": "none"}, "--tokenizer 'none' does not exist"),
    ],
)
def test_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict, sentence: str) -> None:
    monkeypatch.chdir(folder)
    options = {name: Path(value) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(DataError, match=sentence) as error:
        _run(**{"paths": [folder / "a.txt"], **options})
    assert "\n" not in str(error.value)
