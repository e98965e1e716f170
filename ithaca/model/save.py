"""Write a Hugging Face folder: config.json, safetensors files with their index, and the tokenizer of the source.

Weights come one by one and are written in files of at most 2 GB, so host memory holds one file at a time. The folder
gets its name only when it is complete: a save that is killed leaves nothing that looks like a model.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ithaca.base.disk import is_full, reason
from ithaca.base.errors import ModelError, RunError
from ithaca.model.folder import companions
from ithaca.model.source import DTYPES_FILE, ModelSource

FILE_BYTES = 2 * 10**9


def check_vacant(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"'{folder}' exists already: name a new folder, nothing is overwritten")


def write_folder(
    source: ModelSource,
    dtypes: dict[str, torch.dtype],
    tensors: Iterator[tuple[str, Tensor]],
    folder: Path,
    rename_dtype: bool,
) -> None:
    """Write the tensors, which come in the order of `dtypes`, as the model that `source` describes.

    config.json keeps the dtype it names, unless `rename_dtype`.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_description(source, dtypes["model.embed_tokens.weight"], partial, rename_dtype)
        _write_files(partial, _files(source, dtypes), dtypes, tensors)
        partial.rename(folder)
    except (OSError, SafetensorError) as problem:
        needed = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in source.spec.shapes())
        kind = RunError if is_full(problem) else ModelError
        raise kind(f"'{folder}' could not be written ({reason(problem, partial, needed)})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_description(source: ModelSource, dtype: torch.dtype, folder: Path, rename_dtype: bool = False) -> None:
    """Write everything of a Hugging Face folder but its weights: config.json and the files beside it."""
    config = dict(source.config)
    keys = [key for key in ("dtype", "torch_dtype") if config.get(key)]
    for key in (keys or ["dtype"]) if rename_dtype or not keys else ():
        config[key] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    for name in companions(source.folder) if source.folder else ():
        copy = folder / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(source.folder / name, copy)  # pyrefly: ignore


def write_dtypes(source: ModelSource, dtype: torch.dtype, folder: Path) -> None:
    """Write the dtype that each weight is exported in, for a description whose weights are in a checkpoint."""
    names = {name: source.weights.stored_dtype(name) or dtype for name, _ in source.spec.shapes()}
    _write_json(folder / DTYPES_FILE, {name: str(kind).removeprefix("torch.") for name, kind in names.items()})


def _files(source: ModelSource, dtypes: dict[str, torch.dtype]) -> list[list[str]]:
    """The names of the weights, file by file."""
    files: list[list[str]] = [[]]
    size = 0
    for name, shape in source.spec.shapes():
        count = torch.Size(shape).numel() * dtypes[name].itemsize
        if files[-1] and size + count > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += count
    return files


def _write_files(
    folder: Path,
    files: list[list[str]],
    dtypes: dict[str, torch.dtype],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, start=1):
        whole = len(files) == 1
        file = "model.safetensors" if whole else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        content = {}
        for name in names:
            given, tensor = next(tensors)
            assert given == name
            content[name] = tensor.to(dtypes[name]).contiguous()
            total += content[name].nbytes
            weight_map[name] = file
        save_file(content, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
