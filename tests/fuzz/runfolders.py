"""Run folders: every file of a run damaged, missing or lying, then continued or exported."""

import json
import os
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ithaca.checkpoint.files import text_sha256
from tests.fuzz.recipe import Build, Input, Toys, all_of, copies, numbered, shown, writes
from tests.fuzz.toys import STEPS

SOUND = copies("run", "model", "good.tokens")
GO_ON = ("train", "--run", "run", "--ranks", "1", "--set", f"train.steps={2 * STEPS}")
EXPORT = ("export", "run", "out")
NEWEST, OLDER = f"step-{STEPS:08d}", f"step-{STEPS - 1:08d}"
WILD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    float("nan"),
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    [[0], "x"],
    "../x",
    "a" * 300,
]


def losses(path: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


def same_losses(folder: Path, toys: Toys) -> str | None:
    """A run that goes on has the losses of one that nobody disturbed; lines that were damaged may be gone."""
    found = losses(folder / "run" / "metrics.jsonl")
    wanted = losses(toys.folder / "whole-run" / "metrics.jsonl")
    same = set(found) <= set(wanted) and found[-STEPS:] == wanted[-STEPS:]
    return None if same else f"losses {found} instead of {wanted}"


def same_weights(folder: Path, toys: Toys) -> str | None:
    """The model of the last step."""
    found, wanted = (path / "model.safetensors" for path in (folder / "out", toys.folder / "exported"))
    return None if found.read_bytes() == wanted.read_bytes() else "other weights than those of the last step"


def go_on(name: str, change: Build, expect: Any = "either") -> Input:
    return Input(f"{name} (train)", GO_ON, all_of(SOUND, change), expect, check=same_losses)


def signed_on(name: str, change: Build, expect: Any = "either") -> Input:
    """Go on from a record that was changed and signed again: the losses may be others."""
    return replace(go_on(name, change, expect), check=None)


def export(name: str, change: Build, expect: Any = "either") -> Input:
    return Input(f"{name} (export)", EXPORT, all_of(SOUND, change), expect)


def _path(path: str) -> str:
    return path.replace("NEWEST", f"checkpoints/{NEWEST}").replace("OLDER", f"checkpoints/{OLDER}")


FILES = ["config.toml", "metrics.jsonl", "loss.png", "log.txt", "lock", "model/config.json", "model/dtypes.json"]
FILES += ["NEWEST/.metadata", "NEWEST/manifest.json", "NEWEST/__0_0.distcp"]


def damage(path: str, how: str, chance: random.Random) -> Build:
    places = [(chance.random(), chance.randrange(1, 256)) for _ in range(3)]

    def build(folder: Path, toys: Toys) -> None:
        file = folder / "run" / _path(path)
        data = file.read_bytes()
        file.unlink()
        match how:
            case "empty":
                file.write_bytes(b"")
            case "cut":
                file.write_bytes(data[: len(data) // 2])
            case "longer":
                file.write_bytes(data + b"more")
            case "garbage":
                file.write_bytes(bytes(range(256)) * 4)
            case "flipped":
                changed = bytearray(data)
                for where, value in places if data else []:
                    changed[int(where * len(data))] ^= value
                file.write_bytes(bytes(changed))
            case "a folder":
                file.mkdir()
            case "a link to itself":
                file.symlink_to(file.name)
            case "a dangling link":
                file.symlink_to("nowhere")
            case "a link to where it is now":
                (folder / "elsewhere").write_bytes(data)
                file.symlink_to(folder / "elsewhere")
            case "a link to /dev/full":
                file.symlink_to("/dev/full")
            case "a pipe":
                os.mkfifo(file)

    return build


HOWS = [
    "gone",
    "empty",
    "cut",
    "longer",
    "garbage",
    "flipped",
    "a folder",
    "a link to itself",
    "a dangling link",
    "a link to where it is now",
    "a link to /dev/full",
]


def every_file(chance: random.Random) -> list[Input]:
    """Every file in every state."""
    found = []
    for path in FILES:
        for how in HOWS:
            found.append(go_on(f"{path} {how}", damage(path, how, chance)))
            found.append(export(f"{path} {how}", damage(path, how, chance)))
    for path in ("metrics.jsonl", "log.txt", "lock", "config.toml"):
        found.append(go_on(f"{path} a pipe", damage(path, "a pipe", chance)))
    return numbered("run-file", found)


def both_checkpoints(chance: random.Random) -> list[Input]:
    """No checkpoint is sound."""
    found = []
    for first, second in (("empty", "gone"), ("flipped", "cut"), ("garbage", "a folder"), ("longer", "empty")):
        for file in ("manifest.json", ".metadata", "__0_0.distcp"):
            change = all_of(damage(f"NEWEST/{file}", first, chance), damage(f"OLDER/{file}", second, chance))
            found.append(go_on(f"{file} {first} and {second}", change, "error"))
            found.append(export(f"{file} {first} and {second}", change, "error"))
    return numbered("checkpoints", found)


def sealed(change: Callable[[Path], None]) -> Build:
    """A change to both checkpoints after which sizes and SHA-256 in their manifests are right again."""

    def build(folder: Path, toys: Toys) -> None:
        for name in (NEWEST, OLDER):
            checkpoint = folder / "run" / "checkpoints" / name
            before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
            change(checkpoint)
            manifest = checkpoint / "manifest.json"
            text = manifest.read_text()
            for file, data in before.items():
                if (checkpoint / file).is_file() and file != "manifest.json":
                    new = (checkpoint / file).read_bytes()
                    text = text.replace(sha256(data).hexdigest(), sha256(new).hexdigest())
                    pattern = rf'("{re.escape(file)}": \[\s*){len(data)}\b'
                    text = re.sub(pattern, rf"\g<1>{len(new)}", text)
            manifest.write_text(signed(json.loads(text)))

    return build


def signed(manifest: dict[str, Any]) -> str:
    """A manifest as text, with the SHA-256 of its own that a checkpoint's writer gives it."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return json.dumps({**rest, "sha256": text_sha256(rest)})


class Hostile:
    """What an unpickler that runs code would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch was-here; touch ../was-here",)


def _write(file: str, content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        path = checkpoint / file
        if path.exists():
            path.write_bytes(content(path.read_bytes()))

    return change


def sealed_lies(chance: random.Random) -> list[Input]:
    """Files that the manifest vouches for and that are not what they were."""
    contents: dict[str, Callable[[bytes], bytes]] = {
        "hostile": lambda _: pickle.dumps(Hostile()),
        "hostile, old protocol": lambda _: pickle.dumps(Hostile(), protocol=0),
        "a number": lambda _: pickle.dumps(3),
        "a dict": lambda _: pickle.dumps({"a": 1}),
        "no bytes": lambda _: b"",
        "text": lambda _: b"garbage",
        "cut": lambda data: data[: len(data) // 2],
        "a JSON list": lambda _: b"[]",
        "a JSON object": lambda _: b"{}",
    }
    found = []
    for file in (".metadata", "__0_0.distcp"):
        for name, content in contents.items():
            change = sealed(_write(file, content))
            found.append(go_on(f"{file} {name}", change, "error"))
            found.append(export(f"{file} {name}", change, "error"))
        for number in range(6):
            place, value = chance.random(), chance.randrange(1, 256)

            def flip(data: bytes, place: float = place, value: int = value) -> bytes:
                at = int(place * len(data))
                return data[:at] + bytes([data[at] ^ value]) + data[at + 1 :]

            change = sealed(_write(file, flip))
            found.append(Input(f"{file} flipped {number} (train)", GO_ON, all_of(SOUND, change)))
            found.append(export(f"{file} flipped {number}", change))
    return numbered("sealed", found)


def with_json(path: str, change: Callable[[Any], Any]) -> Build:
    def build(folder: Path, toys: Toys) -> None:
        names = [path.replace("NEWEST", f"checkpoints/{name}") for name in (NEWEST, OLDER)]
        for name in set(names):
            file = folder / "run" / name
            told = change(json.loads(file.read_text()))
            file.write_text(signed(told) if isinstance(told, dict) and "sha256" in told else json.dumps(told))

    return build


def manifests(chance: random.Random) -> list[Input]:
    """Every key of a manifest with values of other types, in all checkpoints, signed: what it says is what it is."""
    found = []

    def nth(number: int, value: Any) -> Callable[[Any], Any]:
        def change(told: dict[str, Any]) -> dict[str, Any]:
            key = sorted(told)[number % len(told)]
            return told | {key: value}

        return change

    def inner(number: int, value: Any) -> Callable[[Any], Any]:
        """A value one floor below."""

        def change(told: dict[str, Any]) -> dict[str, Any]:
            tables = [key for key in sorted(told) if isinstance(told[key], dict) and told[key]]
            key = tables[number % len(tables)]
            name = sorted(told[key])[number // len(tables) % len(told[key])]
            return told | {key: told[key] | {name: value}}

        return change

    for number in range(36):
        value = chance.choice(WILD)
        make = chance.choice([signed_on, export])
        found.append(make(f"key {number} = {shown(value)}", with_json("NEWEST/manifest.json", nth(number, value))))
    for number in range(48):
        value = chance.choice(WILD)
        make = chance.choice([signed_on, export])
        found.append(
            make(f"inner key {number} = {shown(value)}", with_json("NEWEST/manifest.json", inner(number, value)))
        )
    for value in ([], 3, None, "x", {}):
        found.append(go_on(f"{shown(value)} alone", with_json("NEWEST/manifest.json", lambda _, v=value: v), "error"))
    return numbered("manifest", found)


def dtypes(chance: random.Random) -> list[Input]:
    """dtypes.json, which export obeys."""
    found = []
    for value in [*WILD, "float16", "int8", "torch.float32", "complex64", "FLOAT32", "bool"]:
        told = with_json("model/dtypes.json", lambda told, v=value: told | {"model.norm.weight": v})
        found.append(export(f"one = {shown(value)}", told, "either" if value == "float16" else "error"))
    for value in ([], 3, None, "x", {}):
        found.append(export(f"{shown(value)} alone", with_json("model/dtypes.json", lambda _, v=value: v), "error"))
    less = with_json("model/dtypes.json", lambda told: {k: v for k, v in told.items() if "norm" not in k})
    found.append(export("some missing", less))
    found.append(export("some more", with_json("model/dtypes.json", lambda told: told | {"other": "float32"})))
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "model_type", "tie_word_embeddings", "head_dim"):
        for value in chance.sample(WILD, 3):
            change = with_json("model/config.json", lambda told, k=key, v=value: told | {k: v})
            found.append(chance.choice([export, go_on])(f"config.json {key} = {shown(value)}", change))
    return numbered("run-model", found)


METRICS = [
    b"{\n",
    b"[]\n",
    b"3\n",
    b"null\n",
    b"{}\n",
    b'{"step": "x"}\n',
    b'{"step": -1}\n',
    b'{"step": null}\n',
    b"\xff\xfe\n",
]
METRICS += [
    b'{"step": 1e400}\n',
    b"\0" * 100,
    b"[" * 100_000,
    b'{"step": 2, "loss": NaN}',
    b'{"step": 4, "loss": "x"}\n',
    b"\n\n",
]
METRICS += [
    b'{"step": 99999999999999999999, "loss": 1.0}\n',
    b'{"step": 1, "loss": 1.0}\n',
    b'{"step": true}\n',
    b'{"step": 1.5}\n',
]


def metrics(chance: random.Random) -> list[Input]:
    """Lines that no run wrote, before, between and after its own."""
    found = []
    for line in METRICS:
        where = chance.choice(["before", "after", "between"])

        def build(folder: Path, toys: Toys, line: bytes = line, where: str = where) -> None:
            path = folder / "run" / "metrics.jsonl"
            data = path.read_bytes()
            first = data.index(b"\n") + 1
            place = {"before": 0, "after": len(data), "between": first}[where]
            path.write_bytes(data[:place] + line + data[place:])

        found.append(Input(f"{shown(line)} {where}", GO_ON, all_of(SOUND, build)))
    return numbered("metrics", found)


def edited_config(chance: random.Random) -> list[Input]:
    """config.toml of a run, edited by hand."""
    edits = {
        "seed = 0": ["seed = 7", "seed = -1", 'seed = "0"', "seed = 0.5"],
        "batch = 1": ["batch = 2", "batch = 0", "batch = 1.5"],
        "tokens = 16": ["tokens = 32", "tokens = 0", 'tokens = "16"'],
        'source = "good.tokens"': ['source = "prompts.tokens"', "source = 3", 'source = ""'],
        'source = "model"': ['source = "missing"', 'source = "tiny"', "source = []"],
        "beta1 = 0.9": ["beta1 = 0.5", "beta1 = 2", "beta1 = nan"],
        "weight_decay = 0.1": ["weight_decay = 0.5", "weight_decay = -1"],
        "[train]": ["[trian]", "[[train]]", "[train", ""],
        "learning_rate = 0.003": ["learning_rate = -1", "learning_rate = inf", 'learning_rate = "x"'],
    }
    # What would change the losses is refused; the page says so
    refused = {"seed = 7", "batch = 2", "tokens = 32", 'source = "prompts.tokens"', "beta1 = 0.5", "weight_decay = 0.5"}
    found = []
    for old, news in edits.items():
        for new in news:

            def build(folder: Path, toys: Toys, old: str = old, new: str = new) -> None:
                toys.copy("prompts.tokens", folder)
                path = folder / "run" / "config.toml"
                path.write_text(path.read_text().replace(old, new))

            harmless = new in ('tokens = "16"', 'source = ""', 'source = "missing"', 'source = "tiny"')
            expect = "error" if new in refused or not harmless else "either"
            found.append(Input(f"{old} -> {shown(new)}", GO_ON, all_of(SOUND, build), expect))
    for option in ("train.seed=7", "train.batch=2", "train.tokens=32", "train.beta1=0.5", "train.weight_decay=0.5"):
        found.append(Input(f"--set {option}", (*GO_ON, "--set", option), SOUND, "error"))
    return numbered("edited", found)


def other_data(chance: random.Random) -> list[Input]:
    """The data of the run changed between two starts."""
    found = []
    for _ in range(8):
        place = chance.randrange(400)

        def build(folder: Path, toys: Toys, place: int = place) -> None:
            path = folder / "good.tokens"
            data = bytearray(path.read_bytes())
            data[4096 + place] ^= 1
            path.write_bytes(bytes(data))

        found.append(Input(f"a token at {place}", GO_ON, all_of(SOUND, build), "error"))
    found.append(Input("gone", GO_ON, copies("run", "model"), "error"))
    words = ("data", "a.txt", "--out", "good.tokens")
    found.append(Input("made again under its name", words, all_of(SOUND, writes("a.txt", b"x")), "error"))
    other = all_of(
        copies("run", "model"), lambda folder, toys: toys.copy("prompts.tokens", folder, "good.tokens") and None
    )
    found.append(Input("another file", GO_ON, other, "error"))
    return numbered("run-data", found)


MUTATORS = [every_file, both_checkpoints, sealed_lies, manifests, dtypes, metrics, edited_config, other_data]
