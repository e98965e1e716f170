"""The checkpoints of a run on disk: their names, their manifests, and whether they are sound.

A checkpoint is a folder `step-00000120` with the files of PyTorch's distributed checkpoint (DCP), one per rank, and a
`manifest.json`: the step, the shape and dtype of every tensor, the size and SHA-256 of every file. Nothing here needs
a model or a process group. The ending of any other name says its state: `.partial` is being written or was never
finished, `.damaged` and `.replaced` were renamed and stay, `.deleted` is being deleted.
"""

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem

from ithaca.base.disk import reason, system_error
from ithaca.base.errors import RunError
from ithaca.base.files import read_small
from ithaca.checkpoint.lease import DELETED, MANIFEST, Lease, delete
from ithaca.checkpoint.reader import PlainReader, fill
from ithaca.checkpoint.shard import Shard

PARTIAL, DAMAGED, REPLACED = ".partial", ".damaged", ".replaced"
HASHED_BYTES = 64 << 20

Described = dict[str, list[Any]]  # name -> [shape, dtype]


def describe(state: Mapping[str, Shard]) -> Described:
    """Return the shape and dtype of every tensor, as a manifest has them."""
    return {name: [list(shard.shape), str(shard.dtype)] for name, shard in state.items()}


class CheckpointFolder:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first.

        The names are read at once: a run adds the new checkpoint before it deletes an old one, so one is always seen.
        A folder that cannot be read is an error: taken for an empty one, the run would begin anew.
        """
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as problem:
            if problem.errno == errno.ENAMETOOLONG:  # nothing can be there
                return []
            raise RunError(f"'{self.folder}' cannot be read ({problem.strerror})") from None
        numbers = [int(name[5:]) for name in names if re.fullmatch("step-[0-9]{8,}", name)]
        return sorted(number for number in numbers if self.path(number).name in names)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def manifest(self, step: int) -> dict[str, Any] | None:
        """Return the manifest of a checkpoint; None if it is missing or damaged."""
        try:
            return self._read_manifest(step)
        except (OSError, ValueError):
            return None

    def damage(self, step: int, wanted: Described, part: int = 0, parts: int = 1) -> str | None:
        """Return what is wrong with a checkpoint that should hold the tensors in `wanted`; None if it is sound.

        Ranks share the checking of the files: this reads the part-th of `parts` of them.
        """
        try:
            manifest = self._read_manifest(step)
        except OSError as problem:
            return f"{MANIFEST}: {problem.strerror}"
        except ValueError as problem:
            return f"{MANIFEST} {problem}"
        if manifest["step"] != step:
            return f"{MANIFEST} is of step {manifest['step']}"
        for name, tensor in wanted.items():
            if manifest["tensors"].get(name) != tensor:
                return f"it is of another model: {name} is {manifest['tensors'].get(name)}, not {tensor}"
        for name, (size, digest) in sorted(manifest["files"].items())[part::parts]:
            file = self.path(step) / name
            try:
                if not stat.S_ISREG(file.stat().st_mode):
                    return f"{name} is not a file"
                if (found := file.stat().st_size) != size:
                    return f"{name} has {found:,} bytes, not {size:,}"
                if file_sha256(file) != digest:
                    return f"{name} is not what was written"
            except OSError as problem:
                return f"{name}: {problem.strerror}"
        return None

    def _read_manifest(self, step: int) -> dict[str, Any]:
        """Return a manifest. Raise OSError or, if it is not what was written, ValueError."""
        try:
            manifest = json.loads(read_small(self.path(step) / MANIFEST))
            if manifest.pop("sha256") == text_sha256(manifest) and _is_manifest(manifest):
                return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # raised below
        raise ValueError("is not what was written")

    def lease(self, step: int) -> Lease:
        """Return a context in which the run does not delete this checkpoint. Entering raises GoneError if it has."""
        return Lease(self.path(step))

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that no later start reads it. Nothing is deleted."""
        path = self.path(step)
        path.rename(_vacant_name(path, DAMAGED))

    def clean(self) -> None:
        """Make the folder, and delete what a killed run was writing or deleting."""
        self.folder.mkdir(exist_ok=True)
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover)
        for leftover in self.folder.glob(f"*{DELETED}"):
            # On NFS a file that someone has open keeps its folder. That does no harm, and the next start tries again
            shutil.rmtree(leftover, ignore_errors=True)

    def complete(self, partial: Path, step: int, manifest: dict[str, Any]) -> str | None:
        """Add the manifest to a written checkpoint, and give it its name. Return a warning, if there is one."""
        _write_manifest(partial / MANIFEST, manifest)
        path, warning = self.path(step), None
        if path.exists():  # someone has put it there, and someone may be reading it
            aside = _vacant_name(path, REPLACED)
            path.rename(aside)
            warning = f"another checkpoint of step {step} was there: it is now '{aside}'"
        partial.rename(path)
        _sync_folder(self.folder)
        return warning

    def add_note(self, step: int, note: dict[str, Any]) -> None:
        """Add entries to the manifest of a checkpoint. A reader's lease on it ends, and the reader looks again."""
        manifest, file = self._read_manifest(step) | note, self.path(step) / MANIFEST
        partial = file.with_name(f"{MANIFEST}{PARTIAL}")
        _write_manifest(partial, json.loads(json.dumps(manifest)))  # as it will be read
        partial.rename(file)

    def best(self, data: dict[str, Any] | None = None) -> tuple[int, float] | None:
        """Return the step and the loss of the checkpoint with the lowest validation loss; None if none was validated.

        Each manifest says what its own weights reach, so nothing else must survive a kill. Only losses on `data` are
        compared; None: on those of the newest checkpoint that was validated.
        """
        found = [(step, noted) for step in self.steps() if (noted := own_validation(self.manifest(step)))]
        data = found[-1][1]["data"] if found and data is None else data
        losses = {step: noted["last"][1] for step, noted in found if noted["data"] == data}
        return min(losses.items(), key=lambda item: item[1]) if losses else None

    def prune(self, keep: int) -> list[str]:
        """Delete old checkpoints. Return what went wrong.

        The newest `keep` stay, the one with the lowest validation loss, and those that someone reads.
        """
        problems = []
        try:
            steps = self.steps()[:-keep]
            best = self.best() if steps else None
            steps = [step for step in steps if not best or step != best[0]]
        except RunError as problem:
            return [f"old checkpoints could not be deleted: {problem}"]
        for old in steps:
            try:
                delete(self.path(old))
            except OSError as problem:
                problems.append(f"the old checkpoint of step {old} could not be deleted ({problem.strerror})")
        return problems

    def read(self, step: int, wanted: Described) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in `wanted`, whole and on the CPU, one after the other."""
        reader = PlainReader(self.path(step))
        for name, (shape, dtype) in wanted.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            fill({name: tensor}, reader)
            yield name, tensor
            del tensor  # the caller's is the only one now


def own_validation(manifest: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a manifest's entry about the validation of its own step; None if that step was not validated."""
    noted = (manifest or {}).get("validation")
    return noted if manifest and noted and noted["last"][0] == manifest["step"] else None


def none_is_sound(folder: Path, damaged: dict[int, str]) -> RunError:
    """Return the error of a run whose checkpoints are all damaged; `damaged` says how, step by step."""
    steps: dict[str, list[str]] = {}
    for step, damage in sorted(damaged.items()):
        steps.setdefault(damage, []).append(str(step))
    each = "; ".join(f"step {', '.join(numbers)}: {damage}" for damage, numbers in steps.items())
    return RunError(
        f"no checkpoint in '{folder}' is sound ({each}): nothing was changed; copy one again from a backup or from "
        "where it came, or name another --run"
    )


def total_updates(manifest: dict[str, Any]) -> int:
    """Return how often AdamW has changed the weights: in this run, and before it if the run took over its state."""
    own = manifest.get("updates", manifest["step"])  # before they were counted, every step was one
    return own + manifest.get("origin", {}).get("updates", 0)


class WriteError(Exception):
    """A part of a checkpoint could not be written; the text is the reason. It can be sent to other ranks."""


class FolderLostError(WriteError):
    """The run folder is not the run's any more."""


@contextmanager
def as_write_error(place: Path, needed: int) -> Iterator[None]:
    """Turn a system error into a WriteError. If the disk is full, it has `needed` and the bytes that are free now."""
    try:
        yield
    except Exception as problem:
        if isinstance(problem, WriteError) or system_error(problem) is None:
            raise
        raise WriteError(reason(problem, place, needed)) from None


class PartialFiles(FileSystem):
    """DCP's file system for a partial checkpoint. It makes no folders: a missing folder was deleted."""

    def __init__(self, needed: int):
        self._needed = needed

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:  # pyrefly: ignore
        with as_write_error(Path(path).parent, self._needed), super().create_stream(path, mode) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike) -> None:
        """Leave the folder as it is."""


def cause(problem: BaseException) -> BaseException:
    """Return the error that DCP has wrapped, or the error itself."""
    if isinstance(problem, dcp.api.CheckpointException):
        return next(iter(problem.failures.values()))[0]
    return problem


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


def _vacant_name(path: Path, ending: str) -> Path:
    """Return the path with this ending, or with the first number behind it that is free."""
    number, found = 1, path.with_name(f"{path.name}{ending}")
    while found.exists():
        number, found = number + 1, path.with_name(f"{path.name}{ending}{number + 1}")
    return found


def _is_manifest(found: dict[str, Any]) -> bool:
    """Return whether a manifest has the entries that are read, of the right types; later versions may add others."""
    match found:
        case {"step": int(step), "tensors": dict(), "files": dict(files), "random": list(random), "config": str()}:
            return (
                all(Path(name).name == name for name in files)  # within the checkpoint's folder
                and all(isinstance(entry, list) and [*map(type, entry)] == [int, str] for entry in files.values())
                and all(isinstance(states, list) and all(map(_is_hex, states)) for states in random)
                and _is_data(found.get("data"))
                and all(isinstance(found.get(name, {}), dict) for name in ("model", "computed"))
                and _is_validation(found.get("validation"))
                and _is_count(found.get("updates", 0), step)
                and _is_count(found.get("passes_without_labels", 0), 2**63)
                and ("origin" not in found or is_origin(found["origin"]))
                and _is_history(found.get("history", []))
            )
    return False


def _is_data(found: Any) -> bool:
    """Return whether this is the identity of data, of several mixed, or the list of four of old checkpoints."""
    match found:
        case {"mix": [_, *_] as sources}:
            return all(_is_data(source) and isinstance(source.get("share"), float) for source in sources)
        case {"tokens": int(), "documents": int(), "sha256": str()} | [int(), int(), str(), int()]:
            return True
    return False


def _is_validation(found: Any) -> bool:
    """Return whether this is what a run notes of its validation, or nothing."""
    match found:
        case None | {"data": dict(), "start": [int(), float()], "last": [int(), float()]}:
            return True
    return False


def is_origin(found: Any) -> bool:
    """Return whether this says from which checkpoint of which run another run began."""
    match found:
        case {"run": str(), "step": int(step), "optimizer": bool(), "updates": int(updates)}:
            return _is_count(step, 2**63) and _is_count(updates, 2**63)
    return False


def _is_history(found: Any) -> bool:
    """Return whether this is a list of changes: step, option, old value, new value."""
    if not isinstance(found, list):
        return False
    return all(isinstance(line, list) and len(line) == 4 and isinstance(line[1], str) for line in found)


def _is_count(found: Any, most: int) -> bool:
    return type(found) is int and 0 <= found <= most


def _is_hex(found: Any) -> bool:
    return isinstance(found, str) and re.fullmatch("([0-9a-f]{2})+", found) is not None


def text_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _write_manifest(file: Path, manifest: dict[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as opened:
        json.dump({**manifest, "sha256": text_sha256(manifest)}, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
