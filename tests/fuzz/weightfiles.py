"""Weights of a model folder: safetensors headers and index files, damaged or lying."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.modelfolders import DATA, drop_key, set_key
from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, train, writes


def _header(
    change: Callable[[dict[str, Any]], Any], file: str = "model/model.safetensors", length: int | None = None
) -> Build:
    """A safetensors file with another header."""

    def build(folder: Path, toys: Toys) -> None:
        toys.copy(file.partition("/")[0], folder)
        path = folder / file
        data = path.read_bytes()
        size = struct.unpack_from("<Q", data)[0]
        told = change(json.loads(data[8 : 8 + size]))
        text = told if isinstance(told, bytes) else json.dumps(told).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])

    return all_of(DATA, build)


def _tensor(key: str, value: Any, name: str = "model.norm.weight") -> Callable[[dict[str, Any]], Any]:
    return lambda told: told | {name: told[name] | {key: value}}


def weights(chance: random.Random) -> list[Input]:
    """safetensors whose header lies."""
    found = []
    for key, values in {
        "dtype": ["F16", "I64", "BOOL", "F8_E4M3", "X", 3, None, "F64", "C64", "U8"],
        "shape": [[], [47], [49], [-48], [48, 1], ["48"], 48, None, [2**63], [10**30], [0], [1.5], [[48]]],
        "data_offsets": [[0, 0], [0, 192], [192, 0], [-1, 191], [0, 10**18], [0], 3, None, ["0", "1"], [2**63, 2**64]],
    }.items():
        for value in values:
            expect: Expected = "either" if value in ("F16",) else "error"
            found.append(Input(f"{key} = {shown(value)}", train(), _header(_tensor(key, value)), expect))
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "a list": lambda _: [],
        "no JSON": lambda _: b"{",
        "no bytes": lambda _: b"",
        "deep": lambda _: b"[" * 50_000,
        "no tensors": lambda _: {},
        "one tensor less": drop_key("model.norm.weight"),
        "an unknown tensor": lambda told: told | {"extra.weight": told["model.norm.weight"]},
        "a tensor that is a number": set_key("model.norm.weight", 3),
        "metadata that is a number": set_key("__metadata__", 3),
        "metadata of numbers": set_key("__metadata__", {"format": 3}),
        "two of one place": lambda told: told | {"model.norm.weight": told["model.layers.0.input_layernorm.weight"]},
    }
    found += [Input(name, train(), _header(change), "error") for name, change in changes.items()]
    for length in (0, 1, 7, 10**6, 2**40, 2**63, 2**64 - 1):
        found.append(Input(f"a header of {length} bytes", train(), _header(lambda told: told, length=length), "error"))
    for name, content in {
        "no bytes": b"",
        "text": b"weights",
        "a pickle": b"\x80\x02}q\x00.",
        "zeros": b"\0" * 1000,
    }.items():
        build = all_of(DATA, copies("model"), writes("model/model.safetensors", content))
        found.append(Input(f"model.safetensors: {name}", train(), build, "error"))
    found.append(Input("not numbers", train(), all_of(DATA, _not_numbers), "error"))
    found.append(Input("cut", train(), all_of(DATA, _cut), "error"))
    return numbered("weights", found)


def _not_numbers(folder: Path, toys: Toys) -> None:
    path = toys.copy("model", folder) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4000] + b"\xff" * 4000)


def _cut(folder: Path, toys: Toys) -> None:
    path = toys.copy("model", folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _index(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        path = toys.copy("sharded", folder, "model") / "model.safetensors.index.json"
        told = change(json.loads(path.read_text()))
        path.write_bytes(told if isinstance(told, bytes) else json.dumps(told).encode())

    return all_of(DATA, build)


def _file(name: Any) -> Callable[[dict[str, Any]], Any]:
    """One weight in another file."""
    return lambda told: told | {"weight_map": told["weight_map"] | {"model.norm.weight": name}}


def indices(chance: random.Random) -> list[Input]:
    found = [Input("sound", train(), _index(lambda told: told), "ok")]
    names: list[Any] = [
        "../model.safetensors",
        "/etc/passwd",
        "/dev/zero",
        "",
        ".",
        "..",
        "a\0b",
        "a" * 5000,
        "missing",
        3,
        None,
    ]
    names += [
        [],
        {},
        True,
        "\ud800",
        "config.json",
        "model.safetensors.index.json",
        "a/" * 3000 + "b",
        "//",
        "\n",
        "~",
        "C:\\x",
    ]
    names += ["../good.tokens", "model-00001-of-00002.safetensors/x", "model-00001-of-00002.safetensors"]
    for name in names:
        expect: Expected = "either" if name == "model-00001-of-00002.safetensors" else "error"  # it may be there
        found.append(Input(f"a file called {shown(name)}", train(), _index(_file(name)), expect))
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "no weight_map": drop_key("weight_map"),
        "an empty weight_map": set_key("weight_map", {}),
        "a list": lambda _: [],
        "no JSON": lambda _: b"{",
        "binary": lambda _: bytes(range(256)),
        "deep": lambda _: b"[" * 100_000,
        "no bytes": lambda _: b"",
    }
    changes |= {
        f"weight_map = {shown(value)}": set_key("weight_map", value) for value in ([], 3, "x", None, [["a", "b"]])
    }
    found += [Input(name, train(), _index(change), "error") for name, change in changes.items()]
    less = _index(lambda told: told | {"weight_map": drop_key("model.norm.weight")(told["weight_map"])})
    found.append(Input("one weight less", train(), less))  # which is in the file all the same
    for value in (3, None, [], {"total_size": "x"}, {"total_size": -1}):
        found.append(Input(f"metadata = {shown(value)}", train(), _index(set_key("metadata", value))))
    found.append(Input("an index beside one file", train(), all_of(DATA, _both)))
    return numbered("index", found)


def _both(folder: Path, toys: Toys) -> None:
    toys.copy("sharded", folder, "model")
    toys.copy("model/model.safetensors", folder, "model/model.safetensors")


MUTATORS = [weights, indices]
