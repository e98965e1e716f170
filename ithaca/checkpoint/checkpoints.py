"""Checkpoints of a run: written while training continues, complete or absent, checked before they are used.

Each rank has a thread that writes its shards by DCP, over a process group of their own, into a folder
`step-00000120.partial`. The folder gets its final name when every file is on disk, so a run that is killed at any
moment keeps its last good checkpoint. A checkpoint can be read on another number of ranks. files.py
describes the folder.
"""

import json
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
from ithaca.base.disk import reason
from ithaca.base.errors import RunError, first_line
from ithaca.base.sizes import format_bytes
from ithaca.checkpoint.files import (
    PARTIAL,
    CheckpointFolder,
    FolderLostError,
    PartialFiles,
    WriteError,
    as_write_error,
    cause,
    describe,
    none_is_sound,
    rank_digests,
    total_updates,
)
from ithaca.checkpoint.other_run import read_newest
from ithaca.checkpoint.reader import PlainReader, fill
from ithaca.checkpoint.shard import for_dcp
from ithaca.checkpoint.snapshot import WEIGHT, Snapshot, local_bytes, training_state
from ithaca.parallel.agree import from_first, on_this_node, together
from ithaca.parallel.hangs import is_collective_error
from ithaca.tape.budget import host_budget

COPY_SHARE = 0.9  # of the free host memory: a run can do without the copy, but not without memory that it needs later


class Checkpoints:
    """The checkpoints of one run, seen from one rank. Every rank calls every method.

    `reserved_bytes` is memory of this node that something else will take later. `lost` is called before a checkpoint is
        written, and returns a sentence if the run folder does not belong to the run any more.
    """

    def __init__(
        self,
        folder: Path,
        model: Model,
        optimizer: torch.optim.Optimizer,
        keep: int,
        warn: Callable[[str], None] = print,
        reserved_bytes: int = 0,
        lost: Callable[[], str | None] = lambda: None,
    ):
        self._files, self._keep, self._warn, self._lost_folder = CheckpointFolder(folder), keep, warn, lost
        self._optimizer = optimizer
        self._state = training_state(model, optimizer)
        self._rank, self._ranks = model.mesh.rank, model.mesh.size
        # A group of its own: its thread communicates while the main thread trains
        self._group: Any = dist.new_group(list(range(self._ranks)), backend="gloo")
        self._snapshot = self._make_snapshot(reserved_bytes)
        self._writer: threading.Thread | None = None
        self._problem: tuple[int, str, bool] | None = None
        self._lost: BaseException | None = None
        self._abandoned = False

    def clean(self) -> None:
        """Make the folder, and delete what a run that was killed left half-done."""
        self._on_first_rank(self._files.clean)

    def _on_first_rank(self, work: Callable[[], Any]) -> None:
        """Do `work`, which changes the folder, on rank 0. If it fails, raise an error on all ranks."""

        def try_it() -> None:
            try:
                work()
            except OSError as problem:
                why = reason(problem, self._files.folder)
                raise RunError(f"'{self._files.folder}' cannot be used as the folder of checkpoints ({why})") from None

        together(self._group, lambda: try_it() if self._rank == 0 else None)

    def save(self, step: int, note: dict[str, Any]) -> None:
        """Begin to write the state after `step` steps. Wait first for a write that is under way.

        The manifest gets what `note` has. Its `updates` is the number of updates of the optimizer, if not `step`.
        """
        self.wait()
        work = (step, note, _random_state())
        if self._snapshot is None or not self._take():
            self._write(*work)
            return
        self._writer = threading.Thread(target=self._write, args=work, daemon=True)
        self._writer.start()

    def _take(self) -> bool:
        """Begin the copy on all ranks. If one rank lacks the memory after all, drop the copy on all of them."""
        assert self._snapshot is not None
        problem = None
        try:
            self._snapshot.take()
        except Exception as error:
            problem = str(error)
        problems = [text for text in self._gather(problem) if text]
        if problems:
            self._warn(f"no copy of the state for checkpoints ({problems[0]}): training waits while they are written")
            self._snapshot.close()
            self._snapshot = None
        return not problems

    def writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def before_update(self) -> None:
        """Wait until a copy under way has read the state. Call this before the optimizer changes it."""
        if self._snapshot is not None:
            self._snapshot.before_update()

    def wait(self) -> None:
        """Wait for the write that is under way."""
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
        """Let `close` skip a write that is under way: it may wait for a rank that is lost."""
        self._abandoned = True

    def problem(self) -> tuple[int, str, bool] | None:
        """Return the step and the reason of a write that failed since the last call, and whether the folder is lost.

        They are the same on all ranks. If the disk was full, the reason has the bytes that were free when the write
        failed. Raise the error of a lost rank.
        """
        if self._lost is not None:
            raise self._lost
        problem, self._problem = self._problem, None
        return problem

    def size(self) -> int:
        """Return the bytes of one checkpoint, over all ranks."""
        return sum(shard.whole_bytes for shard in self._state.values())

    def last_good(self) -> str:
        """Return words about the newest checkpoint on disk."""
        try:
            steps = self._files.steps()
        except RunError as problem:
            return str(problem)
        return f"the last good checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"

    def best(self, data: dict[str, Any]) -> tuple[int, float] | None:
        """Return the step and the loss of the checkpoint on disk with the lowest loss on these validation data.

        Any rank may ask alone.
        """
        return self._files.best(data)

    def add_note(self, step: int, note: dict[str, Any]) -> None:
        """Add entries to the manifest of a checkpoint that is on disk already."""
        self._on_first_rank(lambda: self._files.add_note(step, note))

    def load(self) -> dict[str, Any] | None:
        """Read the newest sound checkpoint into model and optimizer. Return its manifest; None without checkpoints.

        If a checkpoint is damaged, the previous one is used, a warning is printed, and the damaged one is renamed.
        """
        known, damaged = from_first(self._group, self._files.steps), dict[int, str]()
        wanted = describe(self._state)
        for step in reversed(known):
            damage = [text for text in self._gather(self._files.damage(step, wanted, self._rank, self._ranks)) if text]
            if not damage:
                # Only now: if no checkpoint is sound, they must keep their names, or the next start would begin anew
                self._on_first_rank(lambda: [self._files.set_aside(newer) for newer in damaged])
                return self._read(step)
            self._warn(f"the checkpoint of step {step} is damaged ({damage[0]}): trying the previous one")
            damaged[step] = damage[0]
        if known:
            raise none_is_sound(self._files.folder, damaged)
        return None

    def load_other(self, files: CheckpointFolder, optimizer: bool) -> dict[str, Any]:
        """Read the newest sound checkpoint of another run: its weights and, if `optimizer`, the states of its AdamW.

        Return its manifest.
        """
        state = {name: shard for name, shard in self._state.items() if optimizer or name.startswith(WEIGHT)}
        manifest, warnings = read_newest(files, state, self._group)
        for text in warnings:
            self._warn(text)
        if optimizer:
            self._count_updates(manifest)
        return manifest

    def _count_updates(self, manifest: dict[str, Any]) -> None:
        """Set AdamW's number of updates, with those of the run that its states came from (`origin`)."""
        for state in self._optimizer.state.values():
            state["step"].fill_(total_updates(manifest))

    def prune(self) -> None:
        """Delete old checkpoints. The newest was read or written just now, so a sound checkpoint is kept."""
        for problem in self._files.prune(self._keep) if self._rank == 0 else ():
            self._warn(problem)

    def _make_snapshot(self, reserved_bytes: int) -> Snapshot | None:
        """Return the copy's memory; None if a node lacks it, and training then waits while checkpoints are written."""
        needed, _ = on_this_node(self._group, local_bytes(self._state))
        free, reason = host_budget()
        if not all(self._gather(needed + reserved_bytes <= COPY_SHARE * free)):
            tapes = f" beside {format_bytes(reserved_bytes)} of tapes" if reserved_bytes else ""
            self._warn(
                f"a copy of the state for checkpoints takes {format_bytes(needed)} of this node's memory{tapes}, and "
                f"{reason} is {format_bytes(free)}: training will wait while checkpoints are written"
            )
            return None
        return Snapshot(self._state)

    def _read(self, step: int) -> dict[str, Any]:
        reader = together(self._group, lambda: PlainReader(self._files.path(step)))
        fill(for_dcp(self._state), reader, self._group)
        manifest = self._files.manifest(step)
        assert manifest is not None
        manifest.setdefault("updates", step)  # before they were counted, every step was one
        self._count_updates(manifest)
        if len(manifest["random"]) == self._ranks:  # another number of ranks draws other numbers
            try:
                _restore_random_state(manifest["random"][self._rank])
            except (RuntimeError, ValueError):
                self._warn(
                    f"the random state in the checkpoint of step {step} is not one of this torch: it is left out"
                )
        return manifest

    def _write(self, step: int, note: dict[str, Any], random: list[str]) -> None:
        """Write a checkpoint. Ranks agree after each stage: an error on one is an error on all."""
        path = self._files.path(step)
        partial = path.with_name(path.name + PARTIAL)
        try:
            self._stage(lambda: self._begin(partial) if self._rank == 0 else None)
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
            writer.fs = PartialFiles(self.size())
            with self._snapshot.finished() if self._snapshot else nullcontext(self._state) as state:
                dcp.save(for_dcp(state), storage_writer=writer, process_group=self._group)
            parts = self._stage(lambda: rank_digests(partial, self._rank))
            files = {name: digest for part in parts for name, digest in part.items()}
            manifest = {
                "step": step,
                "files": files,
                "tensors": describe(self._state),
                "random": self._gather(random),
                **note,
            }
            manifest = json.loads(json.dumps(manifest))  # as it will be read
            self._stage(lambda: self._complete(partial, step, manifest) if self._rank == 0 else None)
            self.prune()
        except (Exception, dcp.api.CheckpointException) as problem:  # any error means that nothing was written
            found = cause(problem)
            self._problem = step, first_line(found), isinstance(found, FolderLostError)
            self._lost = problem if is_collective_error(problem) else None
            if self._rank == 0 and not self._lost_folder():
                shutil.rmtree(partial, ignore_errors=True)

    def _begin(self, partial: Path) -> None:
        self._check_folder()
        if not self._files.folder.exists():
            self._files.folder.mkdir()
        partial.mkdir()

    def _complete(self, partial: Path, step: int, manifest: dict[str, Any]) -> None:
        self._check_folder()
        if warning := self._files.complete(partial, step, manifest):
            self._warn(warning)

    def _check_folder(self) -> None:
        if lost := self._lost_folder():
            raise FolderLostError(lost)

    def _stage(self, work: Callable[[], Any]) -> list[Any]:
        """Do a part of a write. Return the results of all ranks, or raise the error of one of them."""
        try:
            with as_write_error(self._files.folder, self.size()):
                found: Any = work()
        except WriteError as problem:
            found = problem
        results = self._gather(found)
        for result in results:
            if isinstance(result, WriteError):
                raise result
        return results

    def _gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self._ranks
        dist.all_gather_object(items, item, group=self._group)
        return items


def _random_state() -> list[str]:
    """Return the states of this rank's generators: of the CPU and, if there is one, of the GPU."""
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [bytes(state.tolist()).hex() for state in (torch.get_rng_state(), *cuda)]


def _restore_random_state(states: list[str]) -> None:
    cpu, *cuda = (torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8) for state in states)
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda[0])
