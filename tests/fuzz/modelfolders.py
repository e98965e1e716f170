"""Model folders: config.json, its rope, other files and links, damaged or lying."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.recipe import Build, Expected, Input, Toys, all_of, copies, numbered, shown, train, writes

DATA = copies("good.tokens")
PLAN = ("plan", "model", "--tokens", "64K")
REHEARSE = ("rehearse", "model", "--tokens", "256", "--ranks", "2", "--memory-only")
WILD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    10**30,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    "48",
    -0.0,
]
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
SIZES += ["num_key_value_heads"]
OTHERS = ["model_type", "architectures", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling"]
OTHERS += [
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
]
OTHERS += [
    "max_position_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "mlp_bias",
    "partial_rotary_factor",
]
OTHERS += ["num_experts", "no_rope_layers", "auto_map", "max_window_layers"]


def _commands(chance: random.Random) -> tuple[str, ...]:
    return chance.choice([train(), train(), PLAN, REHEARSE, (*PLAN, "--json")])


def with_config(change: Callable[[dict[str, Any]], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        path = toys.copy("model", folder) / "config.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return all_of(DATA, build)


def set_key(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config | {key: value}


def drop_key(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda config: {name: value for name, value in config.items() if name != key}


def config_values(chance: random.Random) -> list[Input]:
    """Every key with values of other types and sizes."""
    found = []
    for key in SIZES:
        for value in WILD:
            wrong = not (value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0))
            build = with_config(set_key(key, value))
            found.append(Input(f"{key} = {shown(value)}", _commands(chance), build, "error" if wrong else "either"))
        found.append(Input(f"no {key}", _commands(chance), with_config(drop_key(key))))
    for key in OTHERS:
        for value in chance.sample(WILD, 6):
            found.append(Input(f"{key} = {shown(value)}", _commands(chance), with_config(set_key(key, value))))
    for sizes in ({"num_attention_heads": 5}, {"num_key_value_heads": 7}, {"num_key_value_heads": 4}, {"head_dim": 15}):
        found.append(Input(f"{sizes}", train(), with_config(lambda config, more=sizes: config | more), "error"))
    for sizes in ({"hidden_size": 64}, {"vocab_size": 300}, {"num_hidden_layers": 2}, {"intermediate_size": 81}):
        found.append(
            Input(f"weights of other sizes: {sizes}", train(), with_config(lambda c, more=sizes: c | more), "error")
        )
    found.append(Input("a small vocabulary", train(), with_config(set_key("vocab_size", 100)), "error"))
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
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 4,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        "error",
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 0,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        "either",
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": "1",
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        "error",
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": -64,
        },
        "error",
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 64,
        },
        "ok",
    ),
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
        new = with_config(set_key("rope_parameters", theta | rope if theta else rope))

        def old(config: dict[str, Any], rope: Any = rope) -> dict[str, Any]:
            plain = drop_key("rope_parameters")(config) | {"rope_theta": 1e6}
            if isinstance(rope, dict) and "rope_theta" in rope:
                plain |= {"rope_theta": rope["rope_theta"]}
            return plain | {"rope_scaling": rope}

        found.append(Input(f"rope_parameters {shown(rope, 90)}", _commands(chance), new, expect))
        old_expect: Expected = "either" if rope == [] else expect
        found.append(Input(f"rope_scaling {shown(rope, 90)}", train(), with_config(old), old_expect))
    return numbered("rope", found)


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


def links(chance: random.Random) -> list[Input]:
    found = [Input(kind, train(), _linked(kind), expect) for kind, expect in LINKS.items()]
    found += [
        Input(f"{kind} (plan)", PLAN, _linked(kind)) for kind in ("config outside", "config to /dev/zero", "dangling")
    ]
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


MUTATORS = [config_values, ropes, links, config_files]
