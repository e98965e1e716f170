"""Token files whose header lies, with checksums that are right; the layout is that of docs/data.md.

The sound file is written by `ithaca data`, so the keys that are changed are those of the current version. Files of
version 1 are written here by hand.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, train, writes

MAGIC, HEADER = b"\x89ithaca\n", 4096
STATS = ("data", "good.tokens", "--stats")
WILD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "uint8",
    [],
    {},
    [1],
]
WILD += ["9" * 1000, "\ud800", [[]], {"a": 1}, -(2**63), "1", "float32", "object", "bytes"]


def parse(data: bytes) -> tuple[int, dict[str, Any]]:
    """Version and JSON of a header."""
    version, length, _ = struct.unpack_from("<III", data, 8)
    return version, json.loads(data[20 : 20 + length])


def header(
    content: bytes | dict[str, Any], version: int = 1, length: int | None = None, crc: int | None = None
) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    length = len(text) if length is None else length
    crc = zlib.crc32(text) if crc is None else crc
    return (MAGIC + struct.pack("<III", version, length, crc) + text).ljust(HEADER, b"\0")


def with_header(change: Callable[[int, dict[str, Any]], bytes], toy: str = "good.tokens") -> Build:
    """A sound file with another header."""

    def build(folder: Path, toys: Toys) -> None:
        data = (toys.folder / toy).read_bytes()
        (folder / "good.tokens").write_bytes(change(*parse(data)) + data[HEADER:])

    return build


def with_bytes(change: Callable[[bytes], bytes], toy: str = "good.tokens") -> Build:
    """A sound file with other bytes."""

    def build(folder: Path, toys: Toys) -> None:
        (folder / "good.tokens").write_bytes(change((toys.folder / toy).read_bytes()))

    return build


def both(name: str, build: Build, expect: Expected, chance: random.Random) -> Input:
    """Shown or trained on, by chance."""
    words = chance.choice([STATS, train()])
    return Input(f"{name} ({words[0]})", words, all_of(copies("model"), build), expect)


KEYS = ("dtype", "tokens", "documents", "vocab", "tokenizer", "masked", "labels", "blocks_sha256")
CHECKED = ("dtype", "tokens", "documents", "masked", "blocks_sha256")  # which the rest of the file contradicts


def lying_headers(chance: random.Random) -> list[Input]:
    """Every key of the JSON with values of other types, and without it."""
    found = []
    for toy in ("good.tokens", "prompts.tokens"):
        for key in KEYS:
            for value in chance.sample(WILD, 8):
                change = with_header(lambda version, told, k=key, v=value: header(told | {k: v}, version), toy)
                sound = (key, value) == ("dtype", "uint8") or (key, value, toy) == ("masked", True, "prompts.tokens")
                expect: Expected = "error" if key in CHECKED and not sound else "either"
                found.append(both(f"{toy}: {key} = {shown(value)}", change, expect, chance))
            gone = with_header(lambda v, told, k=key: header({n: x for n, x in told.items() if n != k}, v), toy)
            found.append(both(f"{toy}: no {key}", gone, "error", chance))
    more = with_header(lambda version, told: header(told | {"colour": "blue"}, version))
    found.append(both("an unknown key", more, "either", chance))
    return numbered("header-lies", found)


def damaged_headers(chance: random.Random) -> list[Input]:
    """The header as bytes."""
    texts: dict[str, bytes] = {
        "no JSON": b"{",
        "a list": b"[]",
        "a number": b"3",
        "null": b"null",
        "an empty object": b"{}",
        "no text": b"",
        "invalid UTF-8": b'{"dtype": "\xff"}',
        "deep": b"[" * 4000,
        "deeper": b"[" * 2000 + b"]" * 2000,
        "a key twice": b'{"tokens": 1, "tokens": 2}',
    }
    found = [
        both(name, with_header(lambda v, _, t=text: header(t, v)), "error", chance) for name, text in texts.items()
    ]
    for length in (0, 1, 4076, 4077, 5000, 2**31, 2**32 - 1):
        change = with_header(lambda v, told, n=length: header(told, v, length=n))
        found.append(both(f"a length of {length}", change, "error", chance))
    for version in (0, 1, 3, 99, 2**31, 2**32 - 1):
        change = with_header(lambda _, told, v=version: header(told, v))
        found.append(both(f"version {version}", change, "error", chance))
    found.append(both("a wrong crc", with_header(lambda v, told: header(told, v, crc=1)), "error", chance))
    for cut in (0, 1, 7, 8, 19, 20, 100, 4095, 4096, 4097, 4300):
        found.append(both(f"cut at {cut}", with_bytes(lambda data, n=cut: data[:n]), "error", chance))
    found.append(both("one byte less", with_bytes(lambda data: data[:-1]), "error", chance))
    found.append(both("bytes more", with_bytes(lambda data: data + b"\0" * 8), "error", chance))
    found.append(
        both("an end of line changed", with_bytes(lambda data: data.replace(b"\n", b"\r\n", 1)), "error", chance)
    )
    found.append(both("twice", with_bytes(lambda data: data + data), "error", chance))
    for number in range(16):
        where = (0, 200) if number % 2 else (HEADER, HEADER + 700)
        places = [(chance.randrange(*where), chance.randrange(1, 256)) for _ in range(chance.choice([1, 4]))]

        def flip(data: bytes, places: list[tuple[int, int]] = places) -> bytes:
            changed = bytearray(data)
            for place, value in places:
                changed[place % len(changed)] ^= value
            return bytes(changed)

        found.append(both(f"random bytes {number}", with_bytes(flip), "either", chance))
    return numbered("header-bytes", found)


def version1(tokens: Any, bounds: list[int], learned: list[int] | None = None, /, **more: Any) -> bytes:
    """A file of version 1, sound but for what the arguments say."""
    body = tokens.tobytes()
    body += b"\0" * (-len(body) % 8)
    tail = np.array(bounds, dtype="<i8").tobytes() + np.array(learned or [], dtype="<i8").tobytes()
    told = {"dtype": str(tokens.dtype), "tokens": len(tokens), "documents": len(bounds) - 1, "vocab": 256}
    told |= {"tokenizer": "bytes", "learned_from": learned is not None, "bounds_crc32": zlib.crc32(tail)}
    return header(told | more) + body + tail


def lying_bounds(chance: random.Random) -> list[Input]:
    """Files of version 1: documents that cannot be, under a right checksum, and lying headers."""
    tokens = np.arange(40, dtype=np.uint8)
    big = 2**63 - 1
    files: dict[str, tuple[bytes, Expected]] = {
        "sound": (version1(tokens, [0, 10, 40]), "ok"),
        "sound, with prompts": (version1(tokens, [0, 10, 40], [5, 12]), "ok"),
        "not from 0": (version1(tokens, [3, 10, 40]), "error"),
        "not to the end": (version1(tokens, [0, 10, 30]), "error"),
        "beyond the end": (version1(tokens, [0, 10, 50]), "error"),
        "backward": (version1(tokens, [0, 30, 10, 40]), "error"),
        "negative": (version1(tokens, [0, -10, 40]), "error"),
        "huge": (version1(tokens, [0, big, 40]), "error"),
        "an empty document": (version1(tokens, [0, 10, 10, 40]), "either"),
        "learned before its document": (version1(tokens, [0, 10, 40], [0, 5]), "error"),
        "learned after its document": (version1(tokens, [0, 10, 40], [11, 12]), "error"),
        "learned from nowhere": (version1(tokens, [0, 10, 40], [-1, -5]), "error"),
        "learned from afar": (version1(tokens, [0, 10, 40], [big, big]), "error"),
        "nothing learned": (version1(tokens, [0, 10, 40], [10, 40]), "either"),
        "fewer documents told": (version1(tokens, [0, 10, 40], documents=1), "error"),
        "more documents told": (version1(tokens, [0, 10, 40], documents=3), "error"),
        "fewer tokens told": (version1(tokens, [0, 10, 40], tokens=30), "error"),
        "wider tokens told": (version1(tokens, [0, 10, 40], dtype="uint16"), "error"),
        "signed tokens told": (version1(tokens, [0, 10, 40], dtype="int8"), "error"),
        "floats told": (version1(tokens, [0, 10, 40], dtype="float32"), "error"),
        "a vocabulary of 5": (version1(tokens, [0, 10, 40], vocab=5), "either"),
        "a vocabulary of 0": (version1(tokens, [0, 10, 40], vocab=0), "error"),
        "a vocabulary beyond the model": (version1(tokens, [0, 10, 40], vocab=100000), "error"),
        "no documents": (version1(tokens[:0], [0]), "error"),
        "no bounds": (version1(tokens[:0], [], documents=0), "error"),
        "tokens of 2^32": (version1(tokens, [0, 40], tokens=2**32), "error"),
        "documents of 2^60": (version1(tokens, [0, 40], documents=2**60), "error"),
        "tokens of 2^61 in 4 bytes": (version1(tokens, [0, 40], tokens=2**61, dtype="uint32"), "error"),
        "a token outside the model": (version1(np.full(40, 999, dtype=np.uint16), [0, 40], vocab=256), "either"),
    }
    found = []
    for key in ("dtype", "tokens", "documents", "vocab", "tokenizer", "learned_from", "bounds_crc32"):
        for value in chance.sample(WILD, 5):
            content = version1(tokens, [0, 10, 40], [5, 12], **{key: value})
            wrong = key in ("tokens", "documents", "bounds_crc32") or (key == "dtype" and value != "uint8")
            build = writes("good.tokens", content)
            found.append(both(f"{key} = {shown(value)}", build, "error" if wrong else "either", chance))
    for name, (content, expect) in files.items():
        beyond = name == "a vocabulary beyond the model"  # which --stats does not know
        found.append(Input(f"{name} (data)", STATS, writes("good.tokens", content), "either" if beyond else expect))
        build = all_of(copies("model"), writes("good.tokens", content))
        found.append(Input(f"{name} (train)", train(), build, expect))
    return numbered("bounds", found)


def other_files(chance: random.Random) -> list[Input]:
    """What is no token file at all."""
    found = []
    for name, content in {"text": b"text", "JSON": b"{}", "no bytes": b"", "zeros": b"\0" * 8192}.items():
        for words in (STATS, train()):
            found.append(
                Input(f"{name} ({words[0]})", words, all_of(copies("model"), writes("good.tokens", content)), "error")
            )
    for words in (STATS, train()):
        build = all_of(copies("model"), writes("good.tokens/x", b""))
        found.append(Input(f"a folder ({words[0]})", words, build, "error"))
    found.append(
        Input(
            "of another tokenizer",
            train("--set", "data.source=bpe.tokens"),
            copies("model", "good.tokens", "bpe.tokens"),
            "error",
        )
    )
    prompts = train("--set", "data.source=prompts.tokens")
    found.append(Input("with prompts", prompts, copies("model", "good.tokens", "prompts.tokens"), "ok"))
    return numbered("token-file", found)


MUTATORS = [lying_headers, damaged_headers, lying_bounds, other_files]
