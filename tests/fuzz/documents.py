"""Documents for `ithaca data`: text, JSONL, Parquet, .npy, .bin, folders and tokenizers, damaged or lying."""

import io
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, writes

BYTES = ("--out", "out.tokens")
BPE = (*BYTES, "--tokenizer", "tokenizer")
TOKENIZER = copies("tokenizer")


def data(name: str, path: str, build: Build, expect: Expected = "either", more: tuple[str, ...] = BYTES) -> Input:
    return Input(name, ("data", path, *more), build if more == BYTES else all_of(TOKENIZER, build), expect)


def texts(chance: random.Random) -> list[Input]:
    found = []
    wrong = {"empty": b"", "a zero byte": b"abc\0def", "zeros": b"\0" * 9000}
    only_bpe = {"invalid UTF-8": b"abc\xff\xfe", "a cut character": "雪".encode()[:2], "a surrogate": b"\xed\xa0\x80"}
    fine = {"BOM": b"\xef\xbb\xbfabc", "one byte": b"a", "no line ends": b"a" * 100_000, "special": b"<end><end> <end>"}
    fine |= {"line ends": b"\r\n\r\r\n\n", "marks": "e\u0301\u200d\ufeff\U000e0001".encode(), "long word": b"z" * 300_000}
    for more in (BYTES, BPE):
        found += [data(name, "a.txt", writes("a.txt", text), "error", more) for name, text in wrong.items()]
        found += [data(name, "a.txt", writes("a.txt", text), "ok", more) for name, text in fine.items()]
        for name, text in only_bpe.items():
            found.append(data(name, "a.txt", writes("a.txt", text), "error" if more == BPE else "ok", more))
    for number in range(6):
        text = bytes(chance.randrange(1, 256) for _ in range(500))
        found.append(data(f"random bytes {number}", "a.txt", writes("a.txt", text), more=BPE))
    for name in ("a.tokens", "a", "a.JSONL", ".hidden", "a.npy.txt", "-a", "a b.txt", "\udcff.txt", "a.jsonl.gz"):
        path = f"./{name}" if name.startswith("-") else name
        found.append(data(f"a file called {shown(name)}", path, writes(name, b"words of text")))
    return numbered("text", found)


LINES: list[tuple[str, Expected]] = [
    ("{", "error"),
    ("[]", "error"),
    ("3", "error"),
    ("null", "error"),
    ('"text"', "error"),
    ("{}", "error"),
    ('{"other": "x"}', "error"),
    ('{"text": 3}', "error"),
    ('{"text": null}', "error"),
    ('{"text": ["a"]}', "error"),
    ('{"text": {"a": 1}}', "error"),
    ('{"text": "a"} {"text": "b"}', "error"),
    ('{"text": "a",}', "error"),
    ("{'text': 'a'}", "error"),
    ('{"text": "a"', "error"),
    ('{"text": NaN}', "error"),
    ('{"prompt": "a"}', "error"),
    ('{"completion": "a"}', "error"),
    ('{"prompt": 1, "completion": "a"}', "error"),
    ('{"prompt": "a", "completion": null}', "error"),
    ('{"tokens": "abc"}', "error"),
    ('{"tokens": 3}', "error"),
    ('{"tokens": [1.5]}', "error"),
    ('{"tokens": ["1"]}', "error"),
    ('{"tokens": [null]}', "error"),
    ('{"tokens": [-1]}', "error"),
    ('{"tokens": [4294967296]}', "error"),
    ('{"tokens": [1e400]}', "error"),
    ('{"tokens": [[1]]}', "error"),
    ('{"tokens": [true]}', "error"),
    ('{"tokens": {"0": 1}}', "error"),
    ('{"tokens": [' + "9" * 5000 + "]}", "error"),
    ('{"tokens": [NaN]}', "error"),
    ('{"tokens": [1, 2], "text": "a"}', "either"),
    ('{"text": "a", "prompt": "b", "completion": "c"}', "either"),
    ('{"text": "a", "text": "b"}', "either"),
    ('{"text": "\\ud800"}', "either"),
    ('{"text": "\\u0000"}', "either"),
    ('{"text": ""}', "either"),
    ('{"tokens": []}', "either"),
    ('{"tokens": [1.0]}', "either"),
    ('{"prompt": "", "completion": ""}', "either"),
    ('{"prompt": "all", "completion": ""}', "either"),
    ("[" * 100_000, "error"),
    ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "error"),
    ('{"a": ' * 50_000 + "1" + "}" * 50_000, "error"),
    ("\ufeff" + '{"text": "a"}', "either"),
    ('{"text": "a"}\r', "ok"),
    ('{"text": "a\x01b"}', "either"),
    ("\0" * 100, "error"),
    ("\udcff", "error"),
    ('{"text": "\udcff"}', "either"),
]


def jsonl(chance: random.Random) -> list[Input]:
    """One line, alone and between sound ones."""
    found = []
    for line, expect in LINES:
        more = chance.choice([BYTES, BPE])
        found.append(data(f"alone {shown(line)}", "a.jsonl", writes("a.jsonl", line), expect, more))
        kind = '{"tokens": [1, 2]}\n' if '"tokens"' in line else '{"text": "sound"}\n'
        found.append(data(f"between {shown(line)}", "a.jsonl", writes("a.jsonl", f"{kind}\n{line}\n{kind}"), expect))
    mixed = '{"text": "a"}\n{"tokens": [1]}\n'
    found.append(data("text and tokens", "a.jsonl", writes("a.jsonl", mixed), "error"))
    found.append(data("text and tokens, a tokenizer", "a.jsonl", writes("a.jsonl", mixed), "ok", BPE))
    outside = '{"tokens": [1, 300]}\n'
    found.append(data("a token outside the tokenizer", "a.jsonl", writes("a.jsonl", outside), "error", BPE))
    found.append(data("blank lines alone", "a.jsonl", writes("a.jsonl", "\n\n \n"), "error"))
    return numbered("jsonl", found)


def npy_header(text: str, version: bytes = b"\x01\x00", length: int | None = None) -> bytes:
    head = text.encode("latin-1", "replace") + b"\n"
    pack = "<H" if version[:1] == b"\x01" else "<I"
    limit = 0xFFFF if pack == "<H" else 0xFFFFFFFF
    return b"\x93NUMPY" + version + struct.pack(pack, min(len(head) if length is None else length, limit)) + head


def saved(array: Any, pickled: bool = False) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=pickled)
    return out.getvalue()


def npy(chance: random.Random) -> list[Input]:
    good = saved(np.arange(40, dtype=np.int64))
    told = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }"
    files: dict[str, tuple[bytes, Expected]] = {
        "floats": (saved(np.ones(4)), "error"),
        "objects": (saved(np.array([{}, 1], dtype=object), pickled=True), "error"),
        "texts": (saved(np.array(["a", "b"])), "error"),
        "booleans": (saved(np.array([True])), "error"),
        "dates": (saved(np.array(["2020-01-01"], dtype="M8[D]")), "error"),
        "records": (saved(np.zeros(3, dtype=[("a", "i4"), ("b", "i4")])), "error"),
        "complex numbers": (saved(np.ones(3, dtype=np.complex64)), "error"),
        "negative": (saved(np.array([1, -1])), "error"),
        "2^32": (saved(np.array([2**32])), "error"),
        "2^64 - 1": (saved(np.array([2**64 - 1], dtype=np.uint64)), "error"),
        "empty": (saved(np.zeros(0, dtype=np.int64)), "error"),
        "no dimension": (saved(np.int64(3)), "error"),
        "three dimensions": (saved(np.zeros((2, 2, 2), dtype=np.int64)), "error"),
        "no documents": (saved(np.zeros((0, 5), dtype=np.int64)), "error"),
        "empty documents": (saved(np.zeros((5, 0), dtype=np.int64)), "error"),
        "big-endian": (saved(np.arange(4, dtype=">u4")), "either"),
        "by columns": (saved(np.asfortranarray(np.arange(6).reshape(2, 3))), "either"),
        "no bytes": (b"", "error"),
        "magic alone": (good[:6], "error"),
        "cut header": (good[:40], "error"),
        "cut data": (good[:-5], "error"),
        "more data": (good + b"abc", "either"),
        "version 9": (good[:6] + b"\x09\x00" + good[8:], "error"),
        "a long header": (npy_header("x" * 60000) + b"\0" * 64, "error"),
        "a header of 4 GB": (npy_header("{}", b"\x02\x00", 2**32 - 1), "error"),
        "no dict": (npy_header("[1]"), "error"),
        "a call": (npy_header("__import__('os').system('touch called')"), "error"),
        "a huge shape": (npy_header(told % ("<i8", "False", "(1000000000000000000,)")) + b"\0" * 64, "error"),
        "a shape beyond 2^64": (npy_header(told % ("<i8", "False", f"({10**30},)")) + b"\0" * 64, "error"),
        "a negative shape": (npy_header(told % ("<i8", "False", "(-8,)")) + b"\0" * 64, "error"),
        "a shape of texts": (npy_header(told % ("<i8", "False", "('a',)")) + b"\0" * 64, "error"),
        "a shape of booleans": (npy_header(told % ("<i8", "False", "(True, 8)")) + b"\0" * 64, "either"),
        "no tuple for a shape": (npy_header(told % ("<i8", "False", "8")) + b"\0" * 64, "error"),
        "an unknown dtype": (npy_header(told % ("<q9", "False", "(8,)")) + b"\0" * 64, "error"),
        "void": (npy_header(told % ("|V8", "False", "(8,)")) + b"\0" * 64, "error"),
        "an order of 3": (npy_header(told % ("<i8", "3", "(8,)")) + b"\0" * 64, "error"),
        "deep": (npy_header("(" * 9000 + ")" * 9000), "error"),
        "a subarray": (npy_header("{'descr': ('<i8', (2,)), 'fortran_order': False, 'shape': (4,), }") + b"\0" * 64, "either"),
    }
    found = [data(name, "a.npy", writes("a.npy", content), expect) for name, (content, expect) in files.items()]
    for number in range(14):
        content = bytearray(good)
        for _ in range(chance.choice([1, 2, 8])):
            content[chance.randrange(len(content) if number % 2 else 128)] = chance.randrange(256)
        found.append(data(f"random bytes {number}", "a.npy", writes("a.npy", bytes(content))))
    return numbered("npy", found)


def binary(chance: random.Random) -> list[Input]:  # noqa: ARG001
    """Raw tokens, and bounds beside them that do not fit."""
    tokens = np.arange(20, dtype="<u2").tobytes()
    words = (*BYTES, "--bin-dtype", "uint16")
    found = [
        data("no dtype", "a.bin", writes("a.bin", tokens), "error"),
        Input("odd size", ("data", "a.bin", *words), writes("a.bin", tokens[:-1]), "error"),
        Input("empty", ("data", "a.bin", *words), writes("a.bin", b""), "error"),
        Input("sound", ("data", "a.bin", *words), writes("a.bin", tokens), "ok"),
    ]
    bounds: dict[str, tuple[bytes, Expected]] = {
        "sound": (saved(np.array([0, 5, 20])), "ok"),
        "not from 0": (saved(np.array([1, 20])), "error"),
        "beyond the end": (saved(np.array([0, 21])), "error"),
        "before the end": (saved(np.array([0, 19])), "error"),
        "backward": (saved(np.array([0, 9, 5, 20])), "error"),
        "negative": (saved(np.array([0, -5, 20])), "error"),
        "2^63": (saved(np.array([0, 2**63, 20], dtype=np.uint64)), "error"),
        "floats": (saved(np.array([0.0, 5.5, 20.0])), "error"),
        "not numbers": (saved(np.array([0.0, np.nan, 20.0])), "error"),
        "objects": (saved(np.array([0, 20], dtype=object), pickled=True), "error"),
        "no dimension": (saved(np.int64(20)), "error"),
        "two dimensions": (saved(np.array([[0, 20]])), "error"),
        "none": (saved(np.zeros(0, dtype=np.int64)), "error"),
        "one": (saved(np.array([0])), "error"),
        "an empty document": (saved(np.array([0, 5, 5, 20])), "either"),
        "booleans": (saved(np.array([False, True])), "error"),
        "garbage": (b"garbage", "error"),
        "no bytes": (b"", "error"),
        "a huge shape": (npy_header("{'descr': '<i8', 'fortran_order': False, 'shape': (9999999999999,), }"), "error"),
    }
    for name, (content, expect) in bounds.items():
        build = all_of(writes("a.bin", tokens), writes("a.bounds.npy", content))
        found.append(Input(f"bounds: {name}", ("data", "a.bin", *words), build, expect))
    beside = all_of(writes("a.bin", tokens), writes("a.bounds.npy/x", b""))
    found.append(Input("bounds: a folder", ("data", "a.bin", *words), beside, "error"))
    return numbered("bin", found)


def _parquet(make: Callable[[Any], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:  # noqa: ARG001
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(make(pyarrow), folder / "a.parquet")

    return build


def _one(values: list[Any], kind: str | None = None, name: str = "text") -> Build:
    def make(pyarrow: Any) -> Any:
        types = {
            None: None,
            "binary": pyarrow.binary(),
            "floats": pyarrow.list_(pyarrow.float64()),
            "texts": pyarrow.list_(pyarrow.string()),
            "u64": pyarrow.list_(pyarrow.uint64()),
            "nested": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
            "fixed": pyarrow.list_(pyarrow.int64(), 2),
            "large": pyarrow.large_string(),
            "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
            "struct": pyarrow.struct([("a", pyarrow.string())]),
        }
        return pyarrow.table({name: pyarrow.array(values, type=types[kind])})

    return _parquet(make)


def parquet(chance: random.Random) -> list[Input]:
    tables: dict[str, tuple[Build, Expected]] = {
        "sound": (_one(["a", "b"]), "ok"),
        "large texts": (_one(["a"], "large"), "either"),
        "dictionary": (_one(["a", "a"], "dictionary"), "either"),
        "a null text": (_one(["a", None]), "error"),
        "numbers for text": (_one([1, 2]), "error"),
        "binary for text": (_one([b"\xff"], "binary"), "error"),
        "a struct for text": (_one([{"a": "x"}], "struct"), "error"),
        "no rows": (_one([], "large"), "error"),
        "another column": (_one(["a"], name="content"), "error"),
        "tokens": (_one([[1, 2], [3]], name="tokens"), "ok"),
        "tokens of a fixed length": (_one([[1, 2], [3, 4]], "fixed", "tokens"), "either"),
        "floats for tokens": (_one([[1.5]], "floats", "tokens"), "error"),
        "texts for tokens": (_one([["1"]], "texts", "tokens"), "error"),
        "lists of lists": (_one([[[1]]], "nested", "tokens"), "error"),
        "a null list": (_one([[1], None], name="tokens"), "error"),
        "a null token": (_one([[1, None]], name="tokens"), "error"),
        "a negative token": (_one([[1, -1]], name="tokens"), "error"),
        "a token of 2^64 - 1": (_one([[2**64 - 1]], "u64", "tokens"), "error"),
        "one number for tokens": (_one([1, 2], name="tokens"), "error"),
        "a prompt alone": (_one(["a"], name="prompt"), "error"),
        "empty texts": (_one(["", ""]), "error"),
        "no columns": (_parquet(lambda pyarrow: pyarrow.table({})), "error"),
        "text and tokens": (_parquet(lambda pyarrow: pyarrow.table({"text": ["a"], "tokens": [[1]]})), "either"),
        "two columns of text": (
            _parquet(lambda pyarrow: pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])),
            "either",
        ),
    }
    found = [data(name, "a.parquet", build, expect) for name, (build, expect) in tables.items()]

    def damaged(how: Callable[[bytes], bytes]) -> Build:
        def build(folder: Path, toys: Toys) -> None:
            _one(["text " * 50, "b"])(folder, toys)
            (folder / "a.parquet").write_bytes(how((folder / "a.parquet").read_bytes()))

        return build

    cuts = {"half": lambda data: data[: len(data) // 2], "no foot": lambda data: data[:-4], "nothing": lambda _: b""}
    cuts |= {"magic": lambda _: b"PAR1", "text": lambda _: b"PAR1 no table PAR1"}
    cuts |= {"a long foot": lambda data: data[:-8] + struct.pack("<I", 2**31) + b"PAR1"}
    found += [data(f"damaged: {name}", "a.parquet", damaged(how), "error") for name, how in cuts.items()]
    for number in range(10):
        places = [(chance.random(), chance.randrange(256)) for _ in range(4)]

        def flip(content: bytes, places: list[tuple[float, int]] = places) -> bytes:
            changed = bytearray(content)
            for where, value in places:
                changed[int(where * len(changed))] = value
            return bytes(changed)

        found.append(data(f"random bytes {number}", "a.parquet", damaged(flip)))
    return numbered("parquet", found)


def _tree(kind: str) -> Build:
    def build(folder: Path, toys: Toys) -> None:  # noqa: ARG001
        inside = folder / "in"
        inside.mkdir()
        if kind != "hidden files alone":
            (inside / "a.txt").write_text("sound")
        match kind:
            case "a link to itself":
                (inside / "b").symlink_to("b")
            case "a dangling link":
                (inside / "b.txt").symlink_to("nowhere")
            case "a link to its parent":
                (inside / "up").symlink_to("..")
            case "a pipe":
                os.mkfifo(inside / "b.txt")
            case "a socket":
                os.mknod(inside / "b.txt", 0o140644)
            case "hidden files alone":
                (inside / ".a.txt").write_text("hidden")
            case "a name that is no UTF-8":
                Path(os.fsdecode(os.fsencode(inside) + b"/\xff.txt")).write_text("x")
            case "a line end in a name":
                (inside / "a\nb.jsonl").write_text("{")
            case "a binary file":
                (inside / "b").write_bytes(b"\0" * 99)
            case "a folder called a.jsonl":
                (inside / "b.jsonl").mkdir()
            case "a deep folder":
                deep = inside.joinpath(*["d" * 200] * 15)
                deep.mkdir(parents=True)
                (deep / "a.txt").write_text("deep")
            case "an empty file":
                (inside / "b.txt").write_text("")
            case "a broken line":
                (inside / "b.jsonl").write_text("{")
            case "a token file":
                toys.copy("good.tokens", inside)
            case "a link to a file outside":
                (folder / "outside.txt").write_text("outside")
                (inside / "b.txt").symlink_to("../outside.txt")

    return build


TREES: dict[str, Expected] = {
    "a link to itself": "either",
    "a dangling link": "either",
    "a link to its parent": "ok",
    "a pipe": "either",
    "a socket": "either",
    "hidden files alone": "error",
    "a name that is no UTF-8": "either",
    "a line end in a name": "error",
    "a binary file": "ok",
    "a folder called a.jsonl": "ok",
    "a deep folder": "either",
    "an empty file": "either",
    "a broken line": "error",
    "a token file": "either",
    "a link to a file outside": "either",
}


def folders(chance: random.Random) -> list[Input]:  # noqa: ARG001
    found = [data(kind, "in", _tree(kind), expect) for kind, expect in TREES.items()]
    for kind in ("a pipe", "a socket", "a dangling link"):
        found.append(data(f"{kind}, named", "in/b.txt", _tree(kind), "error"))
    return numbered("folder", found)


def _changed_tokenizer(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        path = toys.copy("tokenizer", folder) / "tokenizer.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(change(content)))

    return build


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {key: value}


def _in_model(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"model": content["model"] | {key: value}}


def tokenizers(chance: random.Random) -> list[Input]:
    found = []
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {f"no {key}": (lambda c, k=key: {n: v for n, v in c.items() if n != k})
                                                           for key in ("model", "added_tokens", "version", "pre_tokenizer")}
    for key in ("model", "added_tokens", "pre_tokenizer", "normalizer", "decoder", "version", "post_processor", "truncation"):
        for value in chance.sample([3, "x", [], {}, [3], {"type": "Unknown"}, None, True], 3):
            changes[f"{key} = {value}"] = _with(key, value)
    for key, values in {
        "vocab": [{}, [], 3, {"a": -1}, {"a": 2**32}, {"a": "x"}, {"a": 5, "b": 5}, {"a": 2**31}],
        "merges": [3, ["x"], [["a"]], [["zz", "yy"]], ["a b c"]],
        "type": ["WordPiece", "Unigram", "x", 3, "WordLevel"],
        "unk_token": ["missing", 3],
        "dropout": [0.5, 2.0, "x"],
        "byte_fallback": ["x", True],
    }.items():
        changes |= {f"model.{key} = {shown(value)}": _in_model(key, value) for value in values}
    token = {"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for entry in ({"id": 2**32 - 1}, {"id": 2**33}, {"id": -1}, {"content": ""}, {"content": 3}, {"id": 4000000000, "content": "x"}):
        changes[f"added {entry}"] = _with("added_tokens", [token | {"special": True} | entry])
    changes["a list"] = lambda _: []
    words = ("data", "a.txt", *BPE)
    text = writes("a.txt", "the sea <end> the island")
    for name, change in changes.items():
        found.append(Input(name, words, all_of(text, _changed_tokenizer(change))))
    for name, content in {"no JSON": b"{", "no bytes": b"", "binary": bytes(range(256)), "deep": b"[" * 200_000}.items():
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer.json", content))
        found.append(Input(f"tokenizer.json: {name}", words, build, "error"))
    ends = ["3", "[]", "null", '"missing"', '{"content": 3}', "{}", '""', '{"content": "missing"}', "true", '{"content": null}']
    for end in ends:
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer_config.json", '{"eos_token": %s}' % end))
        expect: Expected = "error" if "missing" in end else "either"
        found.append(Input(f"eos_token {end}", words, build, expect))
    for name, content in {"no JSON": b"{", "a list": b"[]", "no bytes": b"", "binary": b"\xff\xfe", "deep": b"[" * 100_000}.items():
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer_config.json", content))
        found.append(Input(f"tokenizer_config.json: {name}", words, build))
    return numbered("tokenizer", found)


def partials(chance: random.Random) -> list[Input]:  # noqa: ARG001
    """What an interrupted command could have left, damaged."""
    found = []
    sound = copies("books")
    contents = {"no bytes": b"", "text": b"garbage", "zeros": b"\0" * 8192, "JSON": b'{"state": 3}'}
    for name, content in contents.items():
        build = all_of(sound, writes("out.tokens.partial", content))
        found.append(data(f"out.tokens.partial: {name}", "books", build, "ok"))
    found.append(data("out.tokens.partial: a folder", "books", all_of(sound, writes("out.tokens.partial/x", b""))))
    return numbered("partial", found)


MUTATORS = [texts, jsonl, npy, binary, parquet, folders, tokenizers, partials]
