"""The checkpoints of a run on disk: their names, their manifests, and whether they are sound.

A checkpoint is a folder `step-00000120` with the files of PyTorch's distributed checkpoint (DCP), one per rank, and a
`manifest.json`: the step, the shape and dtype of every tensor, the size and SHA-256 of every file. Nothing here needs
a model or a process group.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaca.train.checkpoint_reader import PlainReader, fill

PARTIAL, DAMAGED = ".partial", ".damaged"
HASHED_BYTES = 64 << 20

Described = dict[str, list[Any]]  # name -> [shape, dtype]


def describe(tensors: Mapping[str, Tensor]) -> Described:
    """Return the shape and dtype of every tensor, as a manifest has them."""
    return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()}


class CheckpointFolder:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        names = [path.name for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(name.removeprefix("step-")) for name in names if name[5:].isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def manifest(self, step: int) -> dict[str, Any] | None:
        """Return the manifest of a checkpoint; None if it is missing or damaged."""
        try:
            manifest = json.loads((self.path(step) / "manifest.json").read_text(encoding="utf-8"))
            return manifest if manifest.pop("sha256") == text_sha256(manifest) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def damage(self, step: int, wanted: Described, part: int = 0, parts: int = 1) -> str | None:
        """Return what is wrong with a checkpoint that should hold the tensors in `wanted`; None if it is sound.

        Ranks share the checking of the files: this reads the part-th of `parts` of them.
        """
        manifest = self.manifest(step)
        if manifest is None or manifest["step"] != step:
            return "manifest.json is not what was written"
        for name, tensor in wanted.items():
            if manifest["tensors"].get(name) != tensor:
                return f"it is of another model: {name} is {manifest['tensors'].get(name)}, not {tensor}"
        for name, (size, digest) in sorted(manifest["files"].items())[part::parts]:
            file = self.path(step) / name
            try:
                if file.stat().st_size != size or file_sha256(file) != digest:
                    return f"{name} is not what was written"
            except OSError as problem:
                return f"{name}: {problem.strerror}"
        return None

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that no later start reads it."""
        path = self.path(step)
        aside = path.with_name(f"{path.name}{DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def complete(self, partial: Path, step: int, manifest: dict[str, Any], keep: int) -> None:
        """Add the manifest to a written checkpoint, give it its name, and delete all but the newest `keep`."""
        with (partial / "manifest.json").open("w", encoding="utf-8") as file:
            json.dump({**manifest, "sha256": text_sha256(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        path = self.path(step)
        if path.exists():  # the run was at this step before, and went back past a damaged checkpoint
            shutil.rmtree(path)
        partial.rename(path)
        _sync_folder(self.folder)
        for old in self.steps()[:-keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def read(self, step: int, wanted: Described) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in `wanted`, whole and on the CPU, one after the other."""
        reader = PlainReader(self.path(step))
        for name, (shape, dtype) in wanted.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            fill({name: tensor}, reader)
            yield name, tensor
            del tensor  # the caller's is the only one now


def rank_digests(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of the files that this rank wrote; for rank 0 also of DCP's metadata file."""
    names = [path.name for path in folder.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
    return {name: ((folder / name).stat().st_size, file_sha256(folder / name)) for name in names}


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, read in large pieces: after each one this thread waits for Python's lock."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        buffer = memoryview(bytearray(min(os.fstat(opened.fileno()).st_size, HASHED_BYTES) or 1))
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def text_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
