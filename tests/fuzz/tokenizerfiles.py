"""Tokenizers for `ithaca data`: tokenizer.json and tokenizer_config.json, damaged or lying."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.documents import BPE
from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, writes


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
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"no {key}": (lambda c, k=key: {n: v for n, v in c.items() if n != k})
        for key in ("model", "added_tokens", "version", "pre_tokenizer")
    }
    for key in (
        "model",
        "added_tokens",
        "pre_tokenizer",
        "normalizer",
        "decoder",
        "version",
        "post_processor",
        "truncation",
    ):
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
    for entry in (
        {"id": 2**32 - 1},
        {"id": 2**33},
        {"id": -1},
        {"content": ""},
        {"content": 3},
        {"id": 4000000000, "content": "x"},
    ):
        changes[f"added {entry}"] = _with("added_tokens", [token | {"special": True} | entry])
    changes["a list"] = lambda _: []
    words = ("data", "a.txt", *BPE)
    text = writes("a.txt", "the sea <end> the island")
    for name, change in changes.items():
        found.append(Input(name, words, all_of(text, _changed_tokenizer(change))))
    for name, content in {
        "no JSON": b"{",
        "no bytes": b"",
        "binary": bytes(range(256)),
        "deep": b"[" * 200_000,
    }.items():
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer.json", content))
        found.append(Input(f"tokenizer.json: {name}", words, build, "error"))
    ends = [
        "3",
        "[]",
        "null",
        '"missing"',
        '{"content": 3}',
        "{}",
        '""',
        '{"content": "missing"}',
        "true",
        '{"content": null}',
    ]
    for end in ends:
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer_config.json", f'{{"eos_token": {end}}}'))
        expect: Expected = "error" if "missing" in end else "either"
        found.append(Input(f"eos_token {end}", words, build, expect))
    for name, content in {
        "no JSON": b"{",
        "a list": b"[]",
        "no bytes": b"",
        "binary": b"\xff\xfe",
        "deep": b"[" * 100_000,
    }.items():
        build = all_of(text, copies("tokenizer"), writes("tokenizer/tokenizer_config.json", content))
        found.append(Input(f"tokenizer_config.json: {name}", words, build))
    return numbered("tokenizer", found)


MUTATORS = [tokenizers]
