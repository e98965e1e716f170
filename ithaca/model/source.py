"""Where weights come from: a Hugging Face folder's safetensors files, or random numbers for a preset's sizes.

`load_model` reads only `config.json` and the headers of the files (and a tied table that is stored twice), so that
every mismatch is found before memory is allocated. Values are read later by row ranges, so that a rank reads only its
own shards. Each range is copied straight from a memory map, which is closed at once: host memory peaks at the shards
plus one range. Nothing is unpickled.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ithaca.base.errors import ModelError, shown, suggestion
from ithaca.base.sizes import parse_tokens
from ithaca.model.config_json import find_config
from ithaca.model.extend import extend_rope
from ithaca.model.families import read_spec
from ithaca.model.folder import check_readable, companions, model_file, read_json
from ithaca.model.spec import Spec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

DTYPES_FILE = "dtypes.json"
DEVIATION = 0.02  # of random weights, unless a preset has an initializer_range
_INDEX = "model.safetensors.index.json"

_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _STORED.values()}


class Weights(Protocol):
    """Values by Hugging Face name and place."""

    def stored_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in the file; None if there is no file."""
        ...

    def identity(self) -> object:
        """A value that ranks compare, so that they do not mix two models. Cheap."""
        ...

    def read(self, name: str, rows: range, into: Tensor, columns: range | None = None) -> None:
        """Copy rows of a weight, or some columns of them, into a tensor of that shape, of any dtype and device."""
        ...


@dataclass(frozen=True)
class ModelSource:
    """A model that is checked but not read yet. `ithaca.apply` makes a trainable one of it."""

    spec: Spec
    config: Mapping[str, Any]  # config.json as it was found, or with a new rope; it is saved with the weights
    weights: Weights
    dtype: str  # of the computation: bfloat16, float32, float64, or auto (bfloat16 on a GPU, float32 on a CPU)
    folder: Path | None  # None for a preset
    rope_line: str = ""  # how `rope` changed the rope; empty without that argument
    config_before: Mapping[str, Any] | None = None  # config.json before that change; None without that argument

    @property
    def unextended(self) -> "ModelSource":
        """The same model, described as it was before its rope was changed."""
        return replace(self, config=self.config_before) if self.config_before is not None else self

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]


def load_model(
    model: str | Path,
    dtype: str = "auto",
    seed: int = 0,
    *,
    rope: str | None = None,
    tokens: int | str | None = None,
) -> ModelSource:
    """Open a model: a Hugging Face folder, or a preset (its sizes, with random weights drawn from `seed`).

    `dtype` is the dtype of the computation. The trained shards are in at least float32. `rope` extends the model to a
    context of `tokens`, as the option `model.rope` does: `rope="auto", tokens="64K"`. The new settings are saved with
    the model.
    """
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype '{dtype}' is not supported: {suggestion(str(dtype), ['auto', *DTYPES])}")
    if (rope is None) != (tokens is None):
        missing = "tokens, as tokens='64K'" if tokens is None else "rope, as rope='auto'"
        raise ModelError(f"load_model has rope={shown(rope)} and tokens={shown(tokens)}: give {missing}, too")
    source = _open_model(model, dtype, seed)
    return source if rope is None or tokens is None else extend_model(source, rope, parse_tokens(tokens))


def _open_model(model: str | Path, dtype: str, seed: int) -> ModelSource:
    config, folder = find_config(model)
    spec = read_spec(config)
    if folder is None:
        weights = RandomWeights(spec, seed, config.get("initializer_range", DEVIATION))
        return ModelSource(spec, config, weights, dtype, None)
    companions(folder)  # a link that may not be followed is found now, not when the trained model is saved
    weights = FolderWeights(folder, spec)
    if dtype != "float64" and any(weights.stored_dtype(name) == torch.float64 for name, _ in spec.shapes()):
        raise ModelError(f"'{folder}' holds float64 weights, which would lose bits: give dtype='float64'")
    return ModelSource(spec, config, weights, dtype, folder)


def extend_model(source: ModelSource, rope: str, tokens: int) -> ModelSource:
    """The same weights with the rope that the option `rope` gives for a context of `tokens`."""
    config, line = extend_rope(source.config, rope, tokens)
    return replace(source, spec=read_spec(config), config=config, rope_line=line, config_before=source.config)


def describe_model(folder: Path, dtype: str = "auto") -> ModelSource:
    """A model whose weights a checkpoint will fill; `folder` holds its description and the dtypes of its weights."""
    config = read_json(folder, "config.json")
    spec = read_spec(config)
    return ModelSource(spec, config, UnreadWeights(_read_dtypes(folder, spec)), dtype, folder)


def _read_dtypes(folder: Path, spec: Spec) -> dict[str, torch.dtype]:
    """The dtype in which each weight of the model was stored."""
    given, file = read_json(folder, DTYPES_FILE), folder / DTYPES_FILE
    names = [name for name, _ in spec.shapes()]
    odd = sorted(given.keys() ^ set(names))
    if odd:
        whose = "is none of them" if odd[0] in given else "is missing"
        raise ModelError(
            f"'{file}' has {len(given)} weights for the {len(names)} of config.json: {shown(odd[0])} {whose}"
        )
    for name in names:
        if not isinstance(given[name], str) or given[name] not in _NAMED:
            raise ModelError(f"'{file}' gives {name} as {shown(given[name])}: one of {', '.join(_NAMED)} is needed")
    return {name: _NAMED[given[name]] for name in names}


class UnreadWeights:
    """Weights that are not read: a checkpoint will fill them."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]):
        self._dtypes = dtypes

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self._dtypes[name]

    def identity(self) -> object:
        return sorted(map(str, self._dtypes.items()))

    def read(self, name: str, rows: range, into: Tensor, columns: range | None = None) -> None: ...


class RandomWeights:
    """Random normal matrices, unit norms, zero biases; the same for any number of ranks on one kind of device."""

    def __init__(self, spec: Spec, seed: int, deviation: float = DEVIATION):
        self._shapes, self._seed, self._deviation = dict(spec.shapes()), seed, deviation

    def stored_dtype(self, name: str) -> torch.dtype | None:  # noqa: ARG002
        return None

    def identity(self) -> object:
        return self._seed

    def read(self, name: str, rows: range, into: Tensor, columns: range | None = None) -> None:
        shape = self._shapes[name]
        if len(shape) == 1:
            into.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # Every rank draws the whole weight, so that the values do not depend on how it is sharded
        whole = torch.randn(shape, generator=generator, device=into.device)
        into.copy_(whole[_index(rows, columns)].mul_(self._deviation))


class FolderWeights:
    """The safetensors files of a folder, checked against the Spec."""

    def __init__(self, folder: Path, spec: Spec):
        self._files: dict[str, Path] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(folder):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    header = opened.get_slice(name)
                    kind = header.get_dtype()
                    if kind not in _STORED:
                        raise ModelError(
                            f"{file.name} holds {shown(name)} as {kind}: supported are {', '.join(_STORED)}"
                        )
                    if name in self._files:
                        raise ModelError(
                            f"{self._files[name].name} and {file.name} in '{folder}' both hold {shown(name)}: "
                            "remove it from one of them"
                        )
                    self._files[name], self._dtypes[name] = file, _STORED[kind]
                    self._shapes[name] = tuple(header.get_shape())
        _check_shapes(folder, spec, self._shapes)
        if spec.tied and "lm_head.weight" in self._shapes and not self._tied_twice():
            raise ModelError(
                f"config.json in '{folder}' ties head and embedding, but the files hold two different ones: "
                "set tie_word_embeddings to false, or remove lm_head.weight"
            )

    def stored_dtype(self, name: str) -> torch.dtype | None:
        return self._dtypes[name]

    def identity(self) -> object:
        """Names, shapes, dtypes, and the values of one small weight, which differ between any two trained models."""
        sample = torch.empty(self._shapes["model.norm.weight"], dtype=torch.float64)
        self.read("model.norm.weight", range(len(sample)), sample)
        return sorted(self._shapes.items()), sorted(map(str, self._dtypes.items())), sample.tolist()

    def read(self, name: str, rows: range, into: Tensor, columns: range | None = None) -> None:
        with _opened(self._files[name]) as opened:
            try:
                into.copy_(opened.get_slice(name)[_index(rows, columns)])
            except SafetensorError as problem:
                file = self._files[name]
                raise ModelError(f"'{file}' has changed since it was opened ({problem})") from None

    def _tied_twice(self) -> bool:
        """Whether the two stored copies of a tied table are equal. If not, one of them would be lost silently."""
        names = ("model.embed_tokens.weight", "lm_head.weight")
        if len({(self._shapes[name], self._dtypes[name]) for name in names}) > 1:
            return False
        for start in range(0, self._shapes[names[0]][0], 4096):
            parts = []
            for name in names:
                with _opened(self._files[name]) as opened:
                    parts.append(opened.get_slice(name)[start : start + 4096].view(torch.uint8))
            if not torch.equal(*parts):
                return False
        return True


def _index(rows: range, columns: range | None) -> tuple[slice, ...]:
    return tuple(slice(part.start, part.stop) for part in (rows, columns) if part is not None)


def _weight_files(folder: Path) -> list[Path]:
    single = model_file(folder, "model.safetensors")
    if single:
        return [single]
    if model_file(folder, _INDEX):
        weight_map = read_json(folder, _INDEX).get("weight_map")
        named = list(weight_map.values()) if isinstance(weight_map, dict) else []
        odd = [name for name in named if not isinstance(name, str) or name in ("", "..") or Path(name).name != name]
        if odd or not named:
            found = f"weight_map names {shown(odd[0])}" if odd else "it has no weight_map"
            raise ModelError(f"'{folder / _INDEX}' names no files of its folder ({found})")
        names = sorted(set(named))
        files = [model_file(folder, name) for name in names]
        if None in files:
            missing = shown(names[files.index(None)])
            raise ModelError(f"'{folder}' lacks {missing}, one of the {len(names)} files that its index names")
        return [file for file in files if file]
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
    # Old Llama files hold rotary tables, which are computed here; a tied head may be stored twice
    more = [name for name in found if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    more = [name for name in more if not (spec.tied and name == "lm_head.weight")]
    if more:
        raise ModelError(
            f"'{folder}' holds {len(more)} weights that config.json does not know, {shown(more[0])} among them"
        )


def _opened(file: Path) -> Any:
    check_readable(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as problem:
        raise ModelError(f"'{file}' is truncated or not a safetensors file ({problem})") from None
