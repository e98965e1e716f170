"""Checkpoints that survive: written beside the training, whole or not at all, checked before they are believed.

A checkpoint is a folder `step-00000120` of files that PyTorch's distributed checkpoint (DCP) wrote, one per rank, and a
`manifest.json` with the step, what the caller adds, and the size and SHA-256 of every file. It is written as
`step-00000120.partial` by a thread of each rank over a process group of their own, and gets its name when every file is
on disk: a run that is killed at any moment leaves the last good one. It can be read on another number of ranks.
"""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ithaca.assemble import Model
from ithaca.base.errors import RunError
from ithaca.base.sizes import format_bytes
from ithaca.parallel.agree import from_first, on_this_node, together
from ithaca.parallel.hangs import lost_touch
from ithaca.tape.budget import host_budget
from ithaca.train.snapshot import Snapshot, local_bytes, training_state

PARTIAL, DAMAGED = ".partial", ".damaged"
HASHED_BYTES = 64 << 20
COPY_SHARE = 0.9  # of what is free: a copy is dispensable, and whatever comes after it is not


class Checkpoints:
    """The checkpoints of one run, seen from one rank. Every rank calls every method.

    `spoken_for` are bytes of this node's memory that something else is going to take.
    """

    def __init__(
        self,
        folder: Path,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        keep: int,
        say: Callable[[str], None] = print,
        reserved_bytes: int = 0,
    ):
        self._folder, self._keep, self._say = folder, keep, say
        self._optimizer = optimizer
        self._state = training_state(model, optimizer)
        self._rank, self._ranks = model.mesh.rank, model.mesh.size
        # Of its own, since its thread talks while the main one trains
        self._group: Any = dist.new_group(list(range(self._ranks)), backend="gloo")
        self._snapshot = self._make_snapshot(reserved_bytes) if optimizer else None
        self._writer: threading.Thread | None = None
        self._problem: tuple[int, str] | None = None
        self._lost: BaseException | None = None
        self._abandoned = False

    def clean(self) -> None:
        """Make the folder, and remove what a killed write left in it; for the one job that trains here."""

        def sweep() -> None:
            try:
                self._folder.mkdir(exist_ok=True)
                for leftover in self._folder.glob(f"*{PARTIAL}"):
                    shutil.rmtree(leftover)
            except OSError as problem:
                raise RunError(f"'{self._folder}' is not a folder of checkpoints ({problem})") from None

        together(self._group, lambda: sweep() if self._rank == 0 else None)

    def save(self, step: int, note: dict[str, Any]) -> None:
        """Begin to write the state after `step` steps; an earlier write is waited for first."""
        self.wait()
        work = (step, note, _random_state())
        if self._snapshot is None:
            self._write(*work)
            return
        if not self._take():
            self._write(*work)
            return
        self._writer = threading.Thread(target=self._write, args=work, daemon=True)
        self._writer.start()

    def _take(self) -> bool:
        """Begin the copy; on all ranks or, where one of them cannot have the memory after all, on none from now on."""
        assert self._snapshot is not None
        problem = None
        try:
            self._snapshot.take()
        except Exception as error:
            problem = str(error)
        problems = [text for text in self._gather(problem) if text]
        if problems:
            self._say(f"no copy of the state for checkpoints ({problems[0]}): training waits while they are written")
            self._snapshot.close()
            self._snapshot = None
        return not problems

    def writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def before_update(self) -> None:
        """Call before the optimizer changes what a snapshot may still be reading."""
        if self._snapshot is not None:
            self._snapshot.before_update()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def close(self) -> None:
        if self._abandoned:
            return
        self.wait()
        if self._snapshot is not None:
            self._snapshot.close()

    def abandon(self) -> None:
        """Let `close` leave a write alone that is under way: it may wait for a rank that is lost."""
        self._abandoned = True

    def problem(self) -> tuple[int, str] | None:
        """(step, reason) of a write that failed since the last time this was asked; raises what lost a rank in it."""
        if self._lost is not None:
            raise self._lost
        problem, self._problem = self._problem, None
        return problem

    def size(self) -> int:
        """Bytes of one checkpoint, all ranks together."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self._state.values())

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, oldest first."""
        names = [path.name for path in self._folder.glob("step-*") if path.is_dir()]
        return sorted(int(name.removeprefix("step-")) for name in names if name[5:].isdigit())

    def load(self, say: Callable[[str], None], repair: bool) -> dict[str, Any] | None:
        """Read the newest checkpoint that is sound into model and optimizer, and give its manifest; None if none is.

        With `repair` damaged ones that are newer get another name, so that they stand in nobody's way.
        """
        known, damaged = from_first(self._group, self.steps), []
        for step in reversed(known):
            damage = [problem for problem in self._gather(self._damage(step)) if problem]
            if not damage:
                # Only now: without a sound one they must stay, or the next start would silently begin anew
                for newer in damaged if repair and self._rank == 0 else ():
                    self._set_aside(newer)
                return self._read(step)
            say(f"the checkpoint of step {step} is damaged ({damage[0]}): going back to the one before")
            damaged.append(step)
        if known:
            raise RunError(
                f"none of the {len(known)} checkpoints in '{self._folder}' is sound: --fresh begins the run anew"
            )
        return None

    def _set_aside(self, step: int) -> None:
        path = self._path(step)
        aside = path.with_name(f"{path.name}{DAMAGED}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _make_snapshot(self, reserved_bytes: int) -> Snapshot | None:
        """None where a rank's host has no room for a copy: checkpoints are then written while training waits."""
        needed, _ = on_this_node(self._group, local_bytes(self._state))
        free, reason = host_budget()
        if not all(self._gather(needed + reserved_bytes <= COPY_SHARE * free)):
            tapes = f" beside {format_bytes(reserved_bytes)} of tapes" if reserved_bytes else ""
            self._say(
                f"a copy of the state for checkpoints takes {format_bytes(needed)} of this node's memory{tapes}, and "
                f"{reason} is {format_bytes(free)}: training will wait while checkpoints are written"
            )
            return None
        return Snapshot(self._state)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _manifest(self, step: int) -> dict[str, Any] | None:
        """What a checkpoint says of itself; None if that is not what was written."""
        try:
            manifest = json.loads((self._path(step) / "manifest.json").read_text(encoding="utf-8"))
            return manifest if manifest.pop("sha256") == _text_sha256(manifest) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _read(self, step: int) -> dict[str, Any]:
        dcp.load(dict(self._state), checkpoint_id=self._path(step), process_group=self._group)
        for state in self._optimizer.state.values() if self._optimizer else ():
            state["step"].fill_(step)
        manifest = self._manifest(step)
        assert manifest is not None
        if len(manifest["random"]) == self._ranks:  # another number of ranks draws other numbers
            _restore_random_state(manifest["random"][self._rank])
        return manifest

    def _damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint, as far as this rank looks: ranks share the files among them."""
        path, manifest = self._path(step), self._manifest(step)
        if manifest is None or manifest["step"] != step:
            return "manifest.json is not what was written"
        for name, tensor in self._describe().items():
            if manifest["tensors"].get(name) != tensor:
                return f"it is of another model: {name} is {manifest['tensors'].get(name)}, not {tensor}"
        for name, (size, digest) in sorted(manifest["files"].items())[self._rank :: self._ranks]:
            try:
                if (path / name).stat().st_size != size or _sha256(path / name) != digest:
                    return f"{name} is not what was written"
            except OSError as problem:
                return f"{name}: {problem.strerror}"
        return None

    def _describe(self) -> dict[str, list[Any]]:
        """Shape and dtype of every tensor of the state."""
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in self._state.items()}

    def _write(self, step: int, note: dict[str, Any], random: list[str]) -> None:
        """All of a write. Each stage ends in agreement: what fails on one rank fails on all."""
        path = self._path(step)
        partial = path.with_name(path.name + PARTIAL)
        try:
            self._stage(lambda: partial.mkdir(parents=True) if self._rank == 0 else None)
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
            with self._snapshot.finished() if self._snapshot else nullcontext(self._state) as state:
                dcp.save(dict(state), storage_writer=writer, process_group=self._group)
            parts = self._stage(lambda: _digests(partial, self._rank))
            files = {name: digest for part in parts for name, digest in part.items()}
            manifest = {"step": step, "files": files, "tensors": self._describe(), "random": self._gather(random)}
            manifest = json.loads(json.dumps({**manifest, **note}))  # as it will be read
            self._stage(lambda: self._complete(partial, path, manifest))
        except (Exception, dcp.api.CheckpointException) as problem:  # nothing that fails may pass for written
            self._problem = step, _reason(problem)
            self._lost = problem if lost_touch(problem) else None
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _complete(self, partial: Path, path: Path, manifest: dict[str, Any]) -> None:
        if self._rank != 0:
            return
        with (partial / "manifest.json").open("w", encoding="utf-8") as file:
            json.dump({**manifest, "sha256": _text_sha256(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():  # a step that is reached a second time, after going back past a damaged one
            shutil.rmtree(path)
        partial.rename(path)
        _sync_folder(self._folder)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def _stage(self, work: Callable[[], Any]) -> list[Any]:
        """Do a part of a write; its result on every rank, or the OSError that one of them met."""
        try:
            found: Any = work()
        except OSError as problem:
            found = problem
        results = self._gather(found)
        for result in results:
            if isinstance(result, OSError):
                raise result
        return results

    def _gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self._ranks
        dist.all_gather_object(items, item, group=self._group)
        return items


def _digests(folder: Path, rank: int) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of what this rank wrote; rank 0 also has the file that describes them all."""
    names = [path.name for path in folder.glob(f"__{rank}_*")] + ([".metadata"] if rank == 0 else [])
    return {name: ((folder / name).stat().st_size, _sha256(folder / name)) for name in names}


def _sha256(file: Path) -> str:
    """By large pieces: after each one this thread queues for the interpreter, which the training keeps busy."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _text_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _random_state() -> list[str]:
    """Of this rank's CPU and, where there is one, GPU."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [bytes(state.tolist()).hex() for state in (torch.get_rng_state(), *cuda)]


def _restore_random_state(states: list[str]) -> None:
    cpu, *cuda = (torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8) for state in states)
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda[0])


def _reason(problem: BaseException) -> str:
    """What the file system said, out of the layers that wrap it."""
    if isinstance(problem, dcp.api.CheckpointException):
        inner = next(iter(problem.failures.values()))[0]
        return str(inner)
    return str(problem)
