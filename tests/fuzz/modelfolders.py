"""Model folders: config.json, index, safetensors headers and links, damaged or lying."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, train, writes

DATA = copies("good.tokens")
PLAN = ("plan", "model", "--tokens", "64K")
REHEARSE = ("rehearse", "model", "--tokens", "256", "--ranks", "2", "--memory-only")
WILD: list[Any] = [None, True, -1, 0, 1.5, 2**31, 10**30, float("nan"), float("inf"), "", "x", [], {}, [1], {"a": 1}, "48", -0.0]
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
SIZES += ["num_key_value_heads"]
OTHERS = ["model_type", "architectures", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling"]
OTHERS += ["tie_word_embeddings", "attention_bias", "attention_dropout", "sliding_window", "use_sliding_window", "layer_types"]
OTHERS += ["max_position_embeddings", "dtype", "torch_dtype", "quantization_config", "mlp_bias", "partial_rotary_factor"]
OTHERS += ["num_experts", "no_rope_layers", "auto_map", "max_window_layers"]


def _commands(chance: random.Random) -> tuple[str, ...]:
    return chance.choice([train(), train(), PLAN, REHEARSE, (*PLAN, "--json")])


def with_config(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        path = toys.copy("model", folder) / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return all_of(DATA, build)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config | {key: value}


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: {name: value for name, value in config.items() if name != key}


def config_values(chance: random.Random) -> list[Input]:
    """Every key with values of other types and sizes."""
    found = []
    for key in SIZES:
        for value in WILD:
            wrong = not (value is None or isinstance(value, int) and not isinstance(value, bool) and value > 0)
            build = with_config(_set(key, value))
            found.append(Input(f"{key} = {shown(value)}", _commands(chance), build, "error" if wrong else "either"))
        found.append(Input(f"no {key}", _commands(chance), with_config(_drop(key))))
    for key in OTHERS:
        for value in chance.sample(WILD, 6):
            found.append(Input(f"{key} = {shown(value)}", _commands(chance), with_config(_set(key, value))))
    for sizes in ({"num_attention_heads": 5}, {"num_key_value_heads": 7}, {"num_key_value_heads": 4}, {"head_dim": 15}):
        found.append(Input(f"{sizes}", train(), with_config(lambda config, more=sizes: config | more), "error"))
    for sizes in ({"hidden_size": 64}, {"vocab_size": 300}, {"num_hidden_layers": 2}, {"intermediate_size": 81}):
        found.append(Input(f"weights of other sizes: {sizes}", train(), with_config(lambda c, more=sizes: c | more), "error"))
    found.append(Input("a small vocabulary", train(), with_config(_set("vocab_size", 100)), "error"))
    return numbered("config", found)


ROPES: list[tuple[Any, Expected]] = [
    ({"rope_type": "unknown"}, "error"),
    ({"rope_type": 3}, "error"),
    ({"rope_type": "linear"}, "error"),
    ({"rope_type": "linear", "factor": 0}, "error"),
    ({"rope_type": "linear", "factor": -4}, "error"),
    ({"rope_type": "linear", "factor": "4"}, "error"),
    ({"rope_type": "linear", "factor": float("nan")}, "error"),
    ({"rope_type": "linear", "factor": 10**400}, "error"),
    ({"rope_type": "linear", "factor": [4]}, "error"),
    ({"rope_type": "dynamic", "factor": 2.0}, "error"),
    ({"rope_type": "longrope", "factor": 2.0}, "error"),
    ({"rope_type": "yarn"}, "error"),
    ({"rope_type": "yarn", "factor": 0}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "64"}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": "x"}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 0}, "either"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_slow": -1}, "either"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": "x"}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": []}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1.0}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 0}, "error"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": "x"}, "either"),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "ok"),
    ({"rope_type": "llama3"}, "error"),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 64}, "error"),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 4, "original_max_position_embeddings": 64}, "either"),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": "1", "high_freq_factor": 4, "original_max_position_embeddings": 64}, "error"),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": -64}, "error"),
    ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}, "ok"),
    ({"rope_type": "default", "rope_theta": -1}, "error"),
    ({"rope_type": "default", "rope_theta": 0}, "error"),
    ({"rope_type": "default", "rope_theta": "x"}, "error"),
    ({"rope_type": "default", "rope_theta": float("inf")}, "error"),
    ({"rope_type": "default", "rope_theta": 1e-300}, "either"),
    ({"rope_type": "default", "rope_theta": 1.0}, "either"),
    ({"rope_type": "default", "rope_theta": 10**400}, "error"),
    ({"full_attention": {"rope_type": "default"}}, "either"),
    ([], "error"),
    (3, "error"),
    ("linear", "error"),
    ([{"rope_type": "linear", "factor": 2}], "error"),
]


def ropes(chance: random.Random) -> list[Input]:
    found = []
    for rope, expect in ROPES:
        theta = {"rope_theta": 1e6} if isinstance(rope, dict) else None
        new = with_config(_set("rope_parameters", theta | rope if theta else rope))

        def old(config: dict[str, Any], rope: Any = rope) -> dict[str, Any]:
            plain = _drop("rope_parameters")(config) | {"rope_theta": 1e6}
            if isinstance(rope, dict) and "rope_theta" in rope:
                plain |= {"rope_theta": rope["rope_theta"]}
            return plain | {"rope_scaling": rope}

        found.append(Input(f"rope_parameters {shown(rope, 90)}", _commands(chance), new, expect))
        old_expect: Expected = "either" if rope == [] else expect
        found.append(Input(f"rope_scaling {shown(rope, 90)}", train(), with_config(old), old_expect))
    return numbered("rope", found)


def _header(change: Callable[[dict[str, Any]], Any], file: str = "model/model.safetensors", length: int | None = None) -> Build:
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
        "one tensor less": _drop("model.norm.weight"),
        "an unknown tensor": lambda told: told | {"extra.weight": told["model.norm.weight"]},
        "a tensor that is a number": _set("model.norm.weight", 3),
        "metadata that is a number": _set("__metadata__", 3),
        "metadata of numbers": _set("__metadata__", {"format": 3}),
        "two of one place": lambda told: told | {"model.norm.weight": told["model.layers.0.input_layernorm.weight"]},
    }
    found += [Input(name, train(), _header(change), "error") for name, change in changes.items()]
    for length in (0, 1, 7, 10**6, 2**40, 2**63, 2**64 - 1):
        found.append(Input(f"a header of {length} bytes", train(), _header(lambda told: told, length=length), "error"))
    for name, content in {"no bytes": b"", "text": b"weights", "a pickle": b"\x80\x02}q\x00.", "zeros": b"\0" * 1000}.items():
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


def indices(chance: random.Random) -> list[Input]:  # noqa: ARG001
    found = [Input("sound", train(), _index(lambda told: told), "ok")]
    names: list[Any] = ["../model.safetensors", "/etc/passwd", "/dev/zero", "", ".", "..", "a\0b", "a" * 5000, "missing", 3, None]
    names += [[], {}, True, "\ud800", "config.json", "model.safetensors.index.json", "a/" * 3000 + "b", "//", "\n", "~", "C:\\x"]
    names += ["../good.tokens", "model-00001-of-00002.safetensors/x", "model-00001-of-00002.safetensors"]
    for name in names:
        found.append(Input(f"a file called {shown(name)}", train(), _index(_file(name)), "error"))
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "no weight_map": _drop("weight_map"),
        "an empty weight_map": _set("weight_map", {}),
        "a list": lambda _: [],
        "no JSON": lambda _: b"{",
        "binary": lambda _: bytes(range(256)),
        "deep": lambda _: b"[" * 100_000,
        "no bytes": lambda _: b"",
    }
    changes |= {f"weight_map = {shown(value)}": _set("weight_map", value) for value in ([], 3, "x", None, [["a", "b"]])}
    changes["one weight less"] = lambda told: told | {"weight_map": _drop("model.norm.weight")(told["weight_map"])}
    found += [Input(name, train(), _index(change), "error") for name, change in changes.items()]
    for value in (3, None, [], {"total_size": "x"}, {"total_size": -1}):
        found.append(Input(f"metadata = {shown(value)}", train(), _index(_set("metadata", value))))
    found.append(Input("an index beside one file", train(), all_of(DATA, _both)))
    return numbered("index", found)


def _both(folder: Path, toys: Toys) -> None:
    toys.copy("sharded", folder, "model")
    toys.copy("model/model.safetensors", folder, "model/model.safetensors")


def _linked(kind: str) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        model = toys.copy("model", folder)
        weights, config = model / "model.safetensors", model / "config.json"
        match kind:
            case "weights outside":
                weights.rename(folder / "outside")
                weights.symlink_to("../outside")
            case "weights outside, absolute":
                weights.rename(folder / "outside")
                weights.symlink_to(folder / "outside")
            case "config outside":
                config.rename(folder / "outside")
                config.symlink_to("../outside")
            case "weights within":
                weights.rename(model / "inside")
                weights.symlink_to("inside")
            case "dangling":
                weights.unlink()
                weights.symlink_to("nowhere")
            case "to itself":
                weights.unlink()
                weights.symlink_to("model.safetensors")
            case "to /dev/zero":
                weights.unlink()
                weights.symlink_to("/dev/zero")
            case "config to /dev/zero":
                config.unlink()
                config.symlink_to("/dev/zero")
            case "to a folder":
                weights.unlink()
                weights.symlink_to(".")
            case "a cache's snapshot":
                cache = folder / "models--a--b"
                (cache / "blobs").mkdir(parents=True)
                (cache / "snapshots").mkdir()
                model.rename(cache / "snapshots" / "0")
                for path in list((cache / "snapshots" / "0").iterdir()):
                    path.rename(cache / "blobs" / path.name)
                    path.symlink_to(f"../../blobs/{path.name}")
                (folder / "model").symlink_to("models--a--b/snapshots/0")

    return all_of(DATA, build)


LINKS: dict[str, Expected] = {
    "weights outside": "either",
    "weights outside, absolute": "either",
    "config outside": "either",
    "weights within": "ok",
    "dangling": "error",
    "to itself": "error",
    "to /dev/zero": "error",
    "config to /dev/zero": "error",
    "to a folder": "error",
    "a cache's snapshot": "ok",
}


def links(chance: random.Random) -> list[Input]:  # noqa: ARG001
    found = [Input(kind, train(), _linked(kind), expect) for kind, expect in LINKS.items()]
    found += [Input(f"{kind} (plan)", PLAN, _linked(kind)) for kind in ("config outside", "config to /dev/zero", "dangling")]
    return numbered("link", found)


def config_files(chance: random.Random) -> list[Input]:
    """config.json as bytes."""
    found = []
    files = {"no JSON": b"{", "a list": b"[]", "a number": b"3", "no bytes": b"", "binary": bytes(range(256))}
    files |= {"deep": b"[" * 100_000, "UTF-16": "{}".encode("utf-16"), "an empty object": b"{}", "null": b"null"}
    for name, content in files.items():
        build = all_of(DATA, copies("model"), writes("model/config.json", content))
        for words in (train(), PLAN, REHEARSE):
            found.append(Input(f"{name} ({words[0]})", words, build, "error"))
    for words in (train(), PLAN, REHEARSE):
        found.append(Input(f"an empty folder ({words[0]})", words, all_of(DATA, writes("model/README", b"")), "error"))
        found.append(Input(f"a folder ({words[0]})", words, all_of(DATA, writes("model/config.json/x", b"")), "error"))
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        for content in (b"{", b"", bytes(range(256))):
            build = all_of(DATA, copies("model"), writes(f"model/{name}", content))
            found.append(Input(f"{name} {shown(content)}", train(), build))
    for number in range(8):
        places = [(chance.random(), chance.randrange(32, 127)) for _ in range(2)]

        def flip(folder: Path, toys: Toys, places: list[tuple[float, int]] = places) -> None:
            path = toys.copy("model", folder) / "config.json"
            data = bytearray(path.read_bytes())
            for where, value in places:
                data[int(where * len(data))] = value
            path.write_bytes(bytes(data))

        found.append(Input(f"random bytes {number}", _commands(chance), all_of(DATA, flip)))
    return numbered("model-file", found)


MUTATORS = [config_values, ropes, weights, indices, links, config_files]
