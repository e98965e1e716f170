"""Arrays for `ithaca data`: .npy, .bin with its bounds, and Parquet, damaged or lying."""

import io
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.documents import BYTES, data
from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, numbered, writes


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
        "a subarray": (
            npy_header("{'descr': ('<i8', (2,)), 'fortran_order': False, 'shape': (4,), }") + b"\0" * 64,
            "either",
        ),
    }
    found = [data(name, "a.npy", writes("a.npy", content), expect) for name, (content, expect) in files.items()]
    for number in range(14):
        content = bytearray(good)
        for _ in range(chance.choice([1, 2, 8])):
            content[chance.randrange(len(content) if number % 2 else 128)] = chance.randrange(256)
        found.append(data(f"random bytes {number}", "a.npy", writes("a.npy", bytes(content))))
    return numbered("npy", found)


def binary(chance: random.Random) -> list[Input]:
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
    def build(folder: Path, toys: Toys) -> None:
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


MUTATORS = [npy, binary, parquet]
