"""A long text in pieces has the tokens of the whole text, for several kinds of tokenizers; else the cut is counted."""

import gzip
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ithaca.base.errors import DataError
from ithaca.data.preparation import pieces
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.reader import open_tokens

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = ("word " * 9 + " " * 3000 + "\n") * 20  # no window has 16 tokens on each side of a cut
KINDS = ("gpt2", "llama3", "llama2", "mistral", "unigram", "whitespace", "wordpiece")


@pytest.fixture(scope="module")
def code() -> str:
    """Python's standard library, some of it, with letters of other scripts."""
    top = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="replace") for path in sorted(top.glob("*.py")))
    return (text[:150_000] + "ünïcödé, 雪月花 🜚 " * 99 + text[150_000:])[:6_000_000]


def _train(kind: str, text: str) -> tokenizers.Tokenizer:
    if kind == "unigram":
        inner = tokenizers.Tokenizer(models.Unigram())
        inner.normalizer, inner.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=500, show_progress=False, unk_token="<u>", special_tokens=["<u>"])
    elif kind == "whitespace":
        inner = tokenizers.Tokenizer(models.WordLevel(unk_token="<u>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=900, special_tokens=["<u>"], show_progress=False)
    elif kind == "wordpiece":
        inner = tokenizers.Tokenizer(models.WordPiece(unk_token="<u>"))
        inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["<u>"], show_progress=False)
    elif kind in ("gpt2", "llama3"):
        inner = tokenizers.Tokenizer(models.BPE())
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        inner.pre_tokenizer = whole if kind == "gpt2" else pre_tokenizers.Sequence([split, whole])
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
        )
    else:  # as sentencepiece: the whole text is one word, and no token spans two
        inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<u>", fuse_unk=True))
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only
        special = ["<u>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    inner.train_from_iterator([text[at : at + 3000] for at in range(0, 120_000, 3000)], trainer)
    if kind == "llama2":
        inner.pre_tokenizer = None
    elif kind == "mistral":
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    return inner


@pytest.fixture(scope="module")
def trained(code: str) -> dict[str, tokenizers.Tokenizer]:
    return {kind: _train(kind, code) for kind in KINDS}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 8 Ki characters instead of 256 Ki, so that short texts have many cuts."""
    for name, value in {"PIECE": 1 << 13, "LONG": 12 << 10, "MARGIN": 1 << 9, "SEARCH": 1 << 10, "_WORDS": 8}.items():
        monkeypatch.setattr(pieces, name, value)


def _encode(inner: tokenizers.Tokenizer) -> pieces.Encode:
    return lambda texts: [
        np.array(found.ids, np.uint32) for found in inner.encode_batch_fast(list(texts), add_special_tokens=False)
    ]


def _joined(text: str, encode: pieces.Encode) -> tuple[np.ndarray, int, int]:
    """The tokens, the number of pieces, and the cuts that were forced."""
    joiner = pieces.Joiner(encode)
    parts = [joiner.add(piece, *piece.encode(encode)) for piece in pieces.split(pieces.slices(text))]
    return np.concatenate([*parts, joiner.end()]), len(parts), joiner.forced


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_the_whole(trained: dict[str, tokenizers.Tokenizer], code: str, kind: str) -> None:
    encode, text = _encode(trained[kind]), code[:400_000]
    found, count, forced = _joined(text, encode)
    assert count > 40
    assert forced == 0
    assert np.array_equal(found, encode([text])[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_the_whole_at_the_true_size(
    trained: dict[str, tokenizers.Tokenizer], code: str, kind: str
) -> None:
    encode = _encode(trained[kind])
    found, count, forced = _joined(code, encode)
    assert (count > 15, forced) == (True, 0)
    assert np.array_equal(found, encode([code])[0])


def _hostile(chance: random.Random) -> dict[str, str]:
    """Texts whose tokens depend on what is far away, or nearly."""
    return {
        "one letter": "x y z " * 3000 + "a" * 50_000 + " the end " * 3000,
        "spaces": SPACES,
        "newlines": "w" * 15_000 + "\n" * 30_000 + "w " * 9000,
        "letters without a space": "".join(chance.choices("ACGT", k=60_000)),
        "digits": "".join(chance.choices("0123456789", k=60_000)),
        "no ASCII": "".join(chr(chance.randrange(0x4E00, 0x4F00)) for _ in range(50_000)),
        "characters of many tokens": "".join(chance.choices("🜚é a\n😀", k=50_000)),
        "special tokens": "<end>".join("sea" * chance.randrange(9) for _ in range(5000)),
        "lines of one sign": ("=" * 700 + "\n") * 90,
    }


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2"])
def test_other_tokens_are_counted(trained: dict[str, tokenizers.Tokenizer], kind: str) -> None:
    """Either the tokens are those of the whole, or a cut was forced; nothing of the text is lost."""
    encode = _encode(trained[kind])
    forced = {}
    for name, text in _hostile(random.Random(0)).items():
        found, _, forced[name] = _joined(text, encode)
        assert forced[name] or np.array_equal(found, encode([text])[0]), name
        if kind != "llama2":
            assert trained[kind].decode(found.tolist(), skip_special_tokens=False) == text, name
    assert forced["special tokens"] == 0
    assert max(forced.values()) > 0 or kind == "llama2"


@pytest.mark.usefixtures("small")
def test_a_run_of_one_token() -> None:
    """A run that is longer than a window: both pieces have its tokens, and yet the whole can have others."""
    vocab = [("<u>", -9.0), ("w", -2.0), (" ", -2.0), ("a", -3.383), ("aa", -3.917)]
    encode = _encode(tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0)))
    for start in (6000, 6001):
        for length in (9000, 9001):
            text = "w " * (start // 2) + "w" * (start % 2) + "a" * length + " w" * 4000
            found, _, forced = _joined(text, encode)
            assert forced or np.array_equal(found, encode([text])[0]), (start, length)


@pytest.mark.usefixtures("small")
def test_pieces_depend_on_the_text_alone(code: str) -> None:
    text, chance = code[:99_000], random.Random(0)
    wanted = list(pieces.split(iter([text])))
    for _ in range(3):
        cuts = sorted(chance.sample(range(len(text)), 50))
        parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(pieces.split(iter(parts))) == wanted
    assert "".join(piece.text[piece.before : len(piece.text) - piece.behind] for piece in wanted) == text


@pytest.mark.usefixtures("small")
def test_a_tokenizer_joins_or_encodes_the_whole(
    trained: dict[str, tokenizers.Tokenizer], code: str, tmp_path: Path
) -> None:
    trained["gpt2"].save(str(tmp_path / "tokenizer.json"))
    texts = ["short", code[:50_000], SPACES, "x y " * 9000]
    wanted = _encode(trained["gpt2"])(texts)
    assert _joined(texts[2], _encode(trained["gpt2"]))[2] > 0
    found = load_tokenizer(tmp_path).encode(texts)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def long_inputs(
    tmp_path: Path,
    trained: dict[str, tokenizers.Tokenizer],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    small: None,  # noqa: ARG001
) -> Path:
    """Texts above and below 20,000 bytes, which count as long here, with a tokenizer that adds <end> on both sides."""
    for name in ("ithaca.data.preparation.sources.LONG", "ithaca.data.preparation.tasks.LONG"):
        monkeypatch.setattr(name, 20_000)
    monkeypatch.setattr("ithaca.data.preparation.streams.CHUNK", 5000)
    top = tmp_path / "inputs"
    top.mkdir()
    (top / "a.txt").write_text("\ufeff" + code[100_000:180_000])
    (top / "b.txt").write_text("short")
    (top / "c.txt.gz").write_bytes(gzip.compress(code[:60_000].encode()))
    records = [{"text": code[:70_000]}, {"text": "<end>" + code[:30_000] + "<end>"}, {"text": "sea"}]
    records.append({"prompt": code[:30_000], "completion": code[:25_000]})
    (top / "d.jsonl").write_text("\n".join(map(json.dumps, records)))
    inner = tokenizers.Tokenizer.from_str(trained["gpt2"].to_str())
    inner.post_processor = processors.TemplateProcessing(single="<end> $A <end>", special_tokens=[("<end>", 0)])
    inner.save(str(tmp_path / "tokenizer.json"))
    return top


def test_long_documents_begin_and_end_once(
    long_inputs: Path, tmp_path: Path, trained: dict[str, tokenizers.Tokenizer], code: str
) -> None:
    prepare([long_inputs], tmp_path / "out", load_tokenizer(tmp_path / "tokenizer.json"), workers=2)
    data = open_tokens(tmp_path / "out")
    found = [ids.tolist() for ids in np.split(data.read(0, data.tokens).tokens, data.bounds()[1:-1])]
    assert data.documents == 7
    texts = (code[100_000:180_000], "short", code[:60_000], code[:70_000], code[:30_000], "sea")
    encode = _encode(trained["gpt2"])
    wanted = [[0, *encode([text])[0].tolist(), 0] for text in texts]
    prompt, completion = (encode([code[:size]])[0].tolist() for size in (30_000, 25_000))
    assert found == [*wanted, [0, *prompt, *completion, 0]]


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_any_number_of_processes_gives_the_same_bytes(long_inputs: Path, tmp_path: Path, with_tokenizer: bool) -> None:
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json") if with_tokenizer else None
    for workers in (1, 2, 5):
        prepare([long_inputs], tmp_path / str(workers), tokenizer, workers=workers, group_bytes=10_000)
    prepare([long_inputs], tmp_path / "none", tokenizer, group_bytes=1 << 30)
    assert len({(tmp_path / name).read_bytes() for name in ("1", "2", "5", "none")}) == 1
    if not with_tokenizer:  # each byte is a token
        data = open_tokens(tmp_path / "1")
        assert data.read(0, 80_000).tokens.tobytes().startswith((long_inputs / "a.txt").read_bytes()[3:80_000])


def test_a_long_text_that_is_not_utf8(long_inputs: Path, tmp_path: Path) -> None:
    content = (long_inputs / "a.txt").read_bytes()[3:]
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    for bad in (content[:70_000] + b"\xff" + content[70_000:], content + "ü".encode()[:1]):
        (long_inputs / "a.txt").write_bytes(bad)
        at = 70_000 if b"\xff" in bad else len(content)
        with pytest.raises(DataError, match=rf"a.txt' is not UTF-8 at byte offset {at} \(0x..\).*; --skip-bad"):
            prepare([long_inputs], tmp_path / "out", tokenizer)
        assert not list(tmp_path.glob("out*"))
    made = prepare([long_inputs], tmp_path / "out", tokenizer, skip_bad=True)
    assert (made.bad, made.header.documents) == (1, 6)


def test_a_long_text_that_cannot_be_encoded_to_its_end(long_inputs: Path, tmp_path: Path) -> None:
    """Its first pieces are written already, and are removed."""
    inner = tokenizers.Tokenizer(models.WordLevel({"sea": 0}, unk_token="<none>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    for path in long_inputs.iterdir():
        path.unlink()
    (long_inputs / "a.txt").write_text("sea " * 9000 + "home")
    (long_inputs / "b.txt").write_text("sea sea")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"the tokenizer cannot encode a text .*, in .*a.txt'; --skip-bad"):
        prepare([long_inputs], tmp_path / "out", tokenizer)
    made = prepare([long_inputs], tmp_path / "out", tokenizer, skip_bad=True)
    assert (made.bad, made.header.documents, made.header.tokens) == (1, 1, 2)


def test_forced_cuts_are_reported(long_inputs: Path, tmp_path: Path) -> None:
    (long_inputs / "a.txt").write_text(SPACES)
    made = prepare([long_inputs], tmp_path / "out", load_tokenizer(tmp_path / "tokenizer.json"))
    assert made.forced > 0
