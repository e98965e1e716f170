"""A run folder: everything that a run writes, and needs to continue.

    config.toml     the resolved configuration      model/       config.json and tokenizer of the model, for export
    metrics.jsonl   one object per step             loss.png     a picture of the loss
    checkpoints/    the newest few                  log.txt      the printed lines
    lock            held while a job trains here

Rank 0 writes. The lock keeps a second job out of the folder. When a run continues from a checkpoint, metrics of later
steps are cut off first: those steps are done again. On several nodes, all must see the same folder (`check_shared`).
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import IO, Any

import torch

from ithaca.base.errors import ConfigError, RunError
from ithaca.config import Config, parse_config, read_config
from ithaca.model.save import write_description, write_dtypes
from ithaca.model.source import ModelSource
from ithaca.parallel.agree import from_first, without
from ithaca.parallel.mesh import Mesh
from ithaca.train.checkpoint_files import CheckpointFolder

LOCK_SECONDS = 20  # to wait for the lock: an interrupted job may hold it a little longer
SEE_SECONDS = 30.0  # to wait for a file: network file systems may cache its absence for so long
ASK_SECONDS = 0.2


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.toml", path / "metrics.jsonl"
        self.model, self.checkpoints = path / "model", path / "checkpoints"
        self.picture, self.log, self.lock = path / "loss.png", path / "log.txt", path / "lock"

    def begun(self) -> bool:
        """Return whether a run has written its configuration here."""
        return self.config.exists()

    def has_checkpoints(self) -> bool:
        return self.last_checkpoint() > 0

    def last_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        return max(CheckpointFolder(self.checkpoints).steps(), default=0)

    def saved_config(self) -> Config:
        return read_config(self.config, [], saved=True)

    def record(self) -> Config | None:
        """Return the configuration of the newest checkpoint; without checkpoints, that of the last start, if any.

        A checkpoint's record counts, not config.toml: anyone may have edited that.
        """
        files = CheckpointFolder(self.checkpoints)
        for step in reversed(files.steps()):
            if manifest := files.manifest(step):
                return parse_config(manifest["config"])
        return self.saved_config() if self.begun() else None

    def check(self, config: Config) -> None:
        """Raise an error if the run has checkpoints and this configuration would make it another run."""
        record = self.record() if self.has_checkpoints() else None
        if record and (difference := config.conflict(record)):
            raise ConfigError(f"'{self.path}' is another run: {difference}, another --run starts a new one")

    def hold(self) -> IO[str]:
        """Make the folder if it is new, and lock it for as long as the returned file stays open."""
        if self.path.exists() and not self.begun() and not self._vacant():
            raise ConfigError(f"'{self.path}' exists and is not a run folder: name another --run")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self._lock()
        except OSError as problem:
            raise ConfigError(f"'{self.path}' cannot be made a run folder ({problem.strerror})") from None

    def _vacant(self) -> bool:
        """Return whether the folder holds nothing but the files of a start that failed early."""
        leftovers = {"lock", "model", "model.partial", "config.toml.partial"}
        return self.path.is_dir() and {path.name for path in self.path.iterdir()} <= leftovers

    def _lock(self) -> IO[str]:
        """Lock the folder. The system releases the lock when this process ends."""
        file = self.lock.open("a")  # without truncating: the holder's word must stay (check_shared)
        until = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunError(f"'{self.path}' is in use by another job: stop it, or name another --run") from None
                time.sleep(0.2)

    def begin(self, config: Config, source: ModelSource, dtype: torch.dtype) -> None:
        """Write the configuration and, before the first checkpoint, the description of the model."""
        if not self.has_checkpoints():
            shutil.rmtree(self.model, ignore_errors=True)
            partial = self.path / "model.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write_description(source, dtype, partial)
            write_dtypes(source, dtype, partial)
            partial.rename(self.model)
        partial = self.path / "config.toml.partial"
        partial.write_text(config.toml(), encoding="utf-8")
        assert read_config(partial, []) == config
        partial.rename(self.config)

    def set_aside(self) -> Path | None:
        """Rename an old run, so that a fresh one can take its place. Nothing is deleted. Return the new name."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        with self.hold():
            self.path.rename(aside)
        return aside

    def cut_metrics(self, step: int) -> None:
        """Keep the metrics of the first `step` steps. A line that a kill left half-written is dropped, too."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        partial = self.metrics.with_name("metrics.jsonl.partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        partial.rename(self.metrics)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return one object per step. Lines that are not JSON objects with a step are skipped."""
        lines = []
        text = self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.exists() else ""
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                lines.append(found)
        return lines


def check_shared(run: RunFolder, lock: IO[str] | None, grid: Mesh) -> None:
    """Raise an error on all ranks if one of them does not see rank 0's run folder. Collective.

    Rank 0, which holds the lock, writes a random word into the lock's file; every rank must read it there.
    """
    if not grid.several_nodes:
        return
    word = from_first(grid.group, lambda: leave_word(lock) if lock else "")
    if blind := without(grid.group, sees_word(run.lock, word)):
        raise ConfigError(
            f"the run folder '{run.path}' is not the same on all ranks (rank {blind[0]} does not see what rank 0 "
            "wrote): --run must lie on a disk that all nodes share"
        )


def leave_word(lock: IO[str]) -> str:
    """Write a random word into the lock's file, and return it."""
    word = secrets.token_hex(8)
    lock.truncate(0)
    lock.write(word)
    lock.flush()
    os.fsync(lock.fileno())
    return word


def sees_word(file: Path, word: str) -> bool:
    """Return whether the word appears in the file within `SEE_SECONDS`."""
    until = time.monotonic() + SEE_SECONDS
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            os.listdir(file.parent)  # makes a network file system look again
            if file.read_text(encoding="utf-8") == word:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(ASK_SECONDS)
