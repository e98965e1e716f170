"""Tokenizers: the ids of the package, nothing cut, nothing added but the end; and what is no tokenizer."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import processors

from ithaca.base.errors import DataError
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import Bytes, load_tokenizer
from ithaca.data.reader import open_tokens
from tests.data.conftest import TEXT


def test_bytes() -> None:
    text, raw = Bytes().encode(["aü", np.array([0xFF, 3], np.uint8)])
    assert text.tolist() == list("aü".encode())
    assert raw.tolist() == [0xFF, 3]
    assert (Bytes.fingerprint, Bytes.vocab, Bytes.begin, Bytes.finish) == ("bytes", 256, (), ())


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
    program = (
        "import sys, ithaca.data.preparation.command, ithaca.data.preparation.inputs; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


POST_PROCESSORS = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "begin, as Llama 2": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    "begin, as Llama 3": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])]
    ),
    "begin and end": processors.TemplateProcessing(single="<s> $A <end>", special_tokens=[("<s>", 1), ("<end>", 0)]),
    "end": processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)]),
    "two before": processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 1)]),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
}


@pytest.fixture(scope="module")
def with_begin() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    return inner


def _folder(folder: Path, inner: tokenizers.Tokenizer, name: str, **config: object) -> Path:
    content = json.loads(inner.to_str())
    processor = POST_PROCESSORS[name]
    content["post_processor"] = processor and json.loads(processor.__getstate__())
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", POST_PROCESSORS)
@pytest.mark.parametrize("eos", [None, "<end>"])
def test_special_tokens_are_those_of_transformers(
    tmp_path: Path, with_begin: tokenizers.Tokenizer, name: str, eos: str | None
) -> None:
    """The ids of a document are those of transformers; the end token is added where the post-processor adds none."""
    config = {"eos_token": eos} if eos else {}
    folder = _folder(tmp_path, with_begin, name, **config)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(record) for record in ({"text": TEXT}, {"prompt": "the sea", "completion": " bore"}))
    )
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", load_tokenizer(folder))
    data = open_tokens(tmp_path / "out")
    text, pair = np.split(data.read(0, data.tokens).tokens, data.bounds()[1:-1])
    wanted = oracle(TEXT).input_ids
    plain = oracle(TEXT, add_special_tokens=False).input_ids
    behind = [0] if eos and wanted[-1] == plain[-1] else []
    assert text.tolist() == wanted + behind
    at = next(at for at in range(len(wanted)) if wanted[at : at + len(plain)] == plain)
    begin, finish = wanted[:at], wanted[at + len(plain) :] + behind
    prompt, completion = (oracle(part, add_special_tokens=False).input_ids for part in ("the sea", " bore"))
    assert pair.tolist() == begin + prompt + completion + finish
    learned = data.read(len(text), data.tokens).learned
    assert learned is not None
    assert learned.tolist() == [False] * len(begin + prompt) + [True] * len(completion + finish)


def test_special_tokens_in_the_text_are_not_doubled(tmp_path: Path, with_begin: tokenizers.Tokenizer) -> None:
    folder = _folder(tmp_path, with_begin, "begin and end")
    lines = [{"text": text} for text in ("<s>sea", "sea<end>", "<s>sea<end>", "<s>", "<end>")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", load_tokenizer(folder))
    data = open_tokens(tmp_path / "out")
    found = [ids.tolist() for ids in np.split(data.read(0, data.tokens).tokens, data.bounds()[1:-1])]
    sea = load_tokenizer(folder).encode(["sea"])[0].tolist()
    assert found == [[1, *sea, 0]] * 3 + [[1, 0], [1, 0]]


def test_special_tokens_where_a_cannot_be_encoded(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "sea": 1}, unk_token="<none>"))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).begin == (0,)


def test_a_post_processor_that_does_more_is_refused(tmp_path: Path, with_begin: tokenizers.Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(with_begin.to_str())
    inner.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"post-processor that changes the tokens of a text: only adding is supported"):
        load_tokenizer(tmp_path)
