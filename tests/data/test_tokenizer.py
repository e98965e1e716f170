"""Tokenizers: the ids of the package, nothing cut, nothing added but the end; and what is no tokenizer."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from ithaca.base.errors import DataError
from ithaca.data.tokenizer import Bytes, load_tokenizer
from tests.data.conftest import TEXT


def test_bytes() -> None:
    text, raw = Bytes().encode(["aü", np.array([0xFF, 3], np.uint8)])
    assert text.tolist() == list("aü".encode())
    assert raw.tolist() == [0xFF, 3]
    assert (Bytes.fingerprint, Bytes.vocab, Bytes.end) == ("bytes", 256, None)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_json(bpe: Path, name: str) -> None:
    tokenizer = load_tokenizer(bpe / name)
    content = (bpe / "tokenizer.json").read_bytes()
    inner = tokenizers.Tokenizer.from_str(content.decode())
    assert tokenizer.fingerprint == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert tokenizer.vocab == inner.get_vocab_size() == 300
    assert tokenizer.end == inner.token_to_id("<end>") == 0
    long, short = tokenizer.encode([TEXT, "sea"])
    assert inner.decode(long.tolist()) == TEXT  # more than the 5 tokens that the file would truncate to
    assert inner.decode(short.tolist(), skip_special_tokens=False) == "sea"  # not padded to 9


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}])
def test_no_end(plain_bpe: Path, tmp_path: Path, config: dict | None) -> None:
    (tmp_path / "tokenizer.json").write_bytes(plain_bpe.read_bytes())
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).end is None


def test_end_as_a_string(plain_bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(plain_bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert load_tokenizer(tmp_path).end == 0


def test_ids_with_holes(plain_bpe: Path, tmp_path: Path) -> None:
    content = json.loads(plain_bpe.read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["hole"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).vocab == 70_001


@pytest.mark.parametrize(
    ("files", "name", "sentence"),
    [
        ({}, "none", "none' does not exist: name a tokenizer.json"),
        ({}, "", "holds no tokenizer.json: transformers writes one"),
        ({"tokenizer.json": "{}"}, "", "tokenizer.json' is not a tokenizer.json"),
        ({"tokenizer.json": "text"}, "tokenizer.json", "tokenizer.json' is not a tokenizer.json"),
        ({"tokenizer_config.json": "["}, "bpe", "tokenizer_config.json' is not a JSON object"),
        ({"tokenizer_config.json": "[]"}, "bpe", "tokenizer_config.json' is not a JSON object"),
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, "bpe", "names the eos_token '</s>', which the"),
    ],
)
def test_refused(plain_bpe: Path, tmp_path: Path, files: dict[str, str], name: str, sentence: str) -> None:
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    if name == "bpe":
        (tmp_path / "tokenizer.json").write_bytes(plain_bpe.read_bytes())
    with pytest.raises(DataError, match=sentence) as error:
        load_tokenizer(tmp_path / name if name != "bpe" else tmp_path)
    assert "\n" not in str(error.value)


def test_text_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="<unknown>"))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="the tokenizer cannot encode a text"):
        load_tokenizer(tmp_path).encode(["b"])


def test_no_torch() -> None:
    program = "import sys, ithaca.data.command, ithaca.data.inputs; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_special_tokens_are_not_added(plain_bpe: Path, tmp_path: Path) -> None:
    """As many a tokenizer.json would to every text: a document has one end, and a completion no beginning."""
    inner = tokenizers.Tokenizer.from_file(str(plain_bpe))
    inner.post_processor = processors.TemplateProcessing(single="<end> $A <end>", special_tokens=[("<end>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (wanted,), (found,) = (load_tokenizer(file).encode(["the sea"]) for file in (plain_bpe, tmp_path))
    assert found.tolist() == wanted.tolist()
    assert 0 not in found
