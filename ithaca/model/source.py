"""Where weights come from: a Hugging Face folder's safetensors files, or random numbers for a preset's sizes.

Naming a model reads only its `config.json` and the headers of its files, so every mismatch is found before memory is
taken. Values are read later by row ranges, so that a rank reads its shards and nothing else: each range goes straight
from a mapping of its own, dropped at once, to where it belongs, and host memory peaks at the shards plus one range.
Nothing is unpickled.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ithaca.errors import ModelError, suggestion
from ithaca.model.presets import PRESETS
from ithaca.model.spec import Spec, read_spec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class Weights(Protocol):
    """Values by Hugging Face name and row range."""

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in the file, None where there is no file."""
        ...

    def read(self, name: str, rows: range, into: Tensor) -> None:
        """Put these rows of a weight into a tensor of their shape, whatever its dtype and device."""
        ...


@dataclass(frozen=True)
class ModelSource:
    """A model that is named and checked but not read: what `ithaca.apply` turns into a trainable one."""

    spec: Spec
    config: Mapping[str, Any]  # config.json as it was found; it goes out with the weights again
    weights: Weights
    dtype: str  # of the computation: bfloat16, float32, float64, or auto (bfloat16 on a GPU, float32 on a CPU)
    folder: Path | None  # None for a preset

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]


def load_model(model: str | Path, dtype: str = "auto", seed: int = 0) -> ModelSource:
    """Name a model: a Hugging Face folder, or a preset (its sizes with random weights drawn from `seed`).

    `dtype` is the dtype of the computation; the trained shards are held in at least float32.
    """
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype '{dtype}' is not supported: {suggestion(str(dtype), ['auto', *DTYPES])}")
    if str(model) in PRESETS:
        config = PRESETS[str(model)]
        spec = read_spec(config)
        return ModelSource(spec, config, RandomWeights(spec, seed), dtype, None)
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(f"'{model}' is neither a folder nor a preset: {suggestion(str(model), PRESETS)}")
    config = _read_json(folder / "config.json")
    spec = read_spec(config)
    return ModelSource(spec, config, FolderWeights(folder, spec), dtype, folder)


class RandomWeights:
    """Normal matrices, unit norms, zero biases; the same numbers on any number of ranks of one kind of device."""

    def __init__(self, spec: Spec, seed: int, deviation: float = 0.02):
        self._shapes, self._seed, self._deviation = dict(spec.shapes()), seed, deviation

    def stored_dtype(self, name: str) -> torch.dtype | None:  # noqa: ARG002
        return None

    def read(self, name: str, rows: range, into: Tensor) -> None:
        shape = self._shapes[name]
        if len(shape) == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # The whole weight is drawn on every rank: its rows must not depend on who holds them
        whole = torch.randn(shape, generator=generator, device=into.device)
        into.copy_(whole[rows.start : rows.stop] * self._deviation)


class FolderWeights:
    """The safetensors files of a folder, checked against the Spec when it is made."""

    def __init__(self, folder: Path, spec: Spec):
        self._files: dict[str, Path] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(folder):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    header = opened.get_slice(name)
                    if header.get_dtype() not in _STORED:
                        raise ModelError(
                            f"{file.name} holds {name} as {header.get_dtype()}: supported are {', '.join(_STORED)}"
                        )
                    self._files[name], self._dtypes[name] = file, _STORED[header.get_dtype()]
                    shapes[name] = tuple(header.get_shape())
        _check_shapes(folder, spec, shapes)
        if spec.tied and "lm_head.weight" in shapes:
            self._check_tied(folder, shapes["lm_head.weight"])

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self._dtypes[name]

    def read(self, name: str, rows: range, into: Tensor) -> None:
        with _opened(self._files[name]) as opened:
            into.copy_(opened.get_slice(name)[rows.start : rows.stop])

    def _check_tied(self, folder: Path, shape: tuple[int, ...]) -> None:
        """Some folders store the table twice; two different ones would be a silent loss of the second."""
        for start in range(0, shape[0], 4096):
            rows = range(start, min(start + 4096, shape[0]))
            table, head = torch.empty(2, len(rows), shape[1], dtype=torch.float64)
            self.read("model.embed_tokens.weight", rows, table)
            self.read("lm_head.weight", rows, head)
            if not torch.equal(table, head):
                raise ModelError(
                    f"config.json in '{folder}' ties head and embedding, but the files hold two different ones: "
                    "set tie_word_embeddings to false, or remove lm_head.weight"
                )


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        if not names or any(Path(str(name)).name != name for name in names):
            raise ModelError(f"'{index}' has no weight_map that names files of its folder")
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ModelError(f"'{folder}' lacks {missing[0]}, one of the {len(names)} files that its index names")
        return [folder / name for name in names]
    if list(folder.glob("*.bin")):
        raise ModelError(
            f"'{folder}' holds pickled weights (.bin), which are never loaded: save it as safetensors with "
            "transformers' save_pretrained first"
        )
    raise ModelError(f"'{folder}' holds no weights: model.safetensors or model.safetensors.index.json is needed")


def _check_shapes(folder: Path, spec: Spec, found: dict[str, tuple[int, ...]]) -> None:
    needed = dict(spec.shapes())
    missing = [name for name in needed if name not in found]
    if missing:
        raise ModelError(f"'{folder}' lacks {len(missing)} of {len(needed)} weights, {missing[0]} among them")
    for name, shape in needed.items():
        if found[name] != shape:
            raise ModelError(
                f"{name} in '{folder}' has shape {list(found[name])}, but config.json makes it {list(shape)}"
            )
    # Old Llama files carry tables of rope, which are computed; a tied head may be stored twice
    more = [name for name in found if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    more = [name for name in more if not (spec.tied and name == "lm_head.weight")]
    if more:
        raise ModelError(f"'{folder}' holds {len(more)} weights that config.json does not know, {more[0]} among them")


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise ModelError(f"'{file}' is truncated or not a safetensors file ({problem})") from None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"'{file.parent}' is not a Hugging Face folder: {file.name} is missing") from None
    except (OSError, ValueError) as problem:
        raise ModelError(f"'{file}' cannot be read as JSON ({problem})") from None
    if not isinstance(content, dict):
        raise ModelError(f"'{file}' holds {type(content).__name__}, not a JSON object")
    return content
