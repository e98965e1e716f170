"""A run folder: everything that a run writes, and needs to continue.

    config.toml     the resolved configuration      model/       config.json and tokenizer of the model, for export
    metrics.jsonl   one object per step             loss.png     a picture of the loss
    checkpoints/    the newest few                  log.txt      the printed lines
    lock            held while a job trains here    profile-step-N/    the profile of a step, if one is wanted

Rank 0 writes. The lock keeps a second job out of the folder. When a run continues from a checkpoint, metrics of later
steps are cut off first: those steps are done again. On several nodes, all must see the same folder (`check_shared`).
A run that finds its folder gone or in other hands stops (`lost`); it never makes the folder a second time.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from ithaca.base.disk import is_full, missing_folders, not_a_file, reason, remove_empty, same_file
from ithaca.base.errors import ConfigError, RunError
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config, parse_config, read_config
from ithaca.data.version1 import is_index
from ithaca.model.save import write_description, write_dtypes
from ithaca.model.source import DTYPES_FILE, ModelSource
from ithaca.parallel.agree import from_first, ranks_without
from ithaca.parallel.mesh import Mesh

LOCK_SECONDS = 20  # to wait for the lock: an interrupted job may hold it a little longer
GONE_TRIES = 5  # after which a folder that is not there cannot be made, as in /proc
SEE_SECONDS = 30.0  # to wait for a file: network file systems may cache its absence for so long
ASK_SECONDS = 0.2
VALIDATION = "validation_loss"  # the key that only lines about a validation have
TASKS = "tasks_seconds"  # the key that only lines about an evaluation of tasks have


class RunFolder:
    """The files of one run, by name."""

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.toml", path / "metrics.jsonl"
        self.model, self.checkpoints = path / "model", path / "checkpoints"
        self.origin = self.model / "origin.json"  # where the weights came from, if from another run
        self.picture, self.log, self.lock = path / "loss.png", path / "log.txt", path / "lock"
        self._held: IO[str] | None = None  # the lock's file, while this process holds it
        self._made: list[Path] = []  # the folders that `hold` has made, the innermost first
        self._found: set[str] = set()  # what was in the folder before
        self._told = False  # whether `mend` has said that it failed
        self._config_before: str | None = None  # the text of config.toml when the folder was locked
        self._steps_begun = False

    def begun(self) -> bool:
        """Return whether a run has written its configuration here."""
        return os.path.exists(self.config)

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
            raise ConfigError(f"'{self.path}' holds a different run: {difference}, another --run starts a new one")

    def hold(self) -> IO[str]:
        """Make the folder if it is new, and lock it for as long as the returned file stays open."""
        if os.path.exists(self.path) and not self.begun() and not self._vacant():
            if self.has_checkpoints():
                raise ConfigError(
                    f"'{self.path}' has checkpoints but no config.toml: put it back to continue (the manifest.json of "
                    "each checkpoint has its text), or name another --run"
                )
            raise ConfigError(f"'{self.path}' exists and is not a run folder: name another --run")
        for file in (self.lock, self.config, self.metrics, self.log, self.picture):
            self._check_file(file)
            self._check_file(partial_name(file))
        self._made = missing_folders(self.path)
        locked_before = os.path.lexists(self.lock)
        try:
            self._held = self._lock()
            # Only now: while this job waited for the lock, the one before may have deleted what it had made
            self._found = {path.name for path in self.path.iterdir() if locked_before or path != self.lock}
            self._config_before = self.config.read_text(encoding="utf-8") if self.begun() else None
            return self._held
        except OSError as problem:
            kind = RunError if is_full(problem) else ConfigError
            raise kind(f"'{self.path}' cannot be made a run folder ({reason(problem, self.path)})") from None

    def begin_steps(self) -> None:
        """Keep the folder from now on, whatever happens."""
        self._steps_begun = True

    def release(self, refused: bool = False) -> None:
        """Unlock the folder. If the run has not begun in it, delete what its start has made, and nothing else.

        `refused`: the start ended in a user's mistake. If no step has begun, all that it has written goes as well.
        """
        assert self._held is not None
        refused = refused and not self._steps_begun
        if not self.lost():
            if refused and self._config_before is not None:
                self._put_back_config(self._config_before)
            elif (refused and not self.has_checkpoints()) or (not self.begun() and self._vacant()):
                self._delete_leftovers()
        self._held.close()

    def _put_back_config(self, text: str) -> None:
        with contextlib.suppress(OSError, RunError, UnicodeError):  # the sentence about the mistake comes first
            if self.config.read_text(encoding="utf-8") != text:
                replace_text(self.config, text)

    def _delete_leftovers(self) -> None:
        with contextlib.suppress(OSError):  # what cannot be deleted stays; the next start takes it for its own
            # The lock goes last: without it, another job may begin here
            for leftover in sorted(self.path.iterdir(), key=lambda path: path == self.lock):
                if leftover.name not in self._found:
                    shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        remove_empty(self._made)

    def _check_file(self, file: Path) -> None:
        """Raise an error if something else lies where the run writes a file. A link could lead out of the folder."""
        if kind := not_a_file(file):
            raise RunError(f"'{file}' is {kind}, and the run writes a file there: move it away, then start again")

    def _vacant(self) -> bool:
        """Return whether the folder holds nothing but the files of a start that failed early."""
        return self.path.is_dir() and all(map(self._is_leftover, self.path.iterdir()))

    def _is_leftover(self, path: Path) -> bool:
        """Return whether a start that failed early has made this; by its content where a user may have such a name."""
        if path == self.model:
            return (path / DTYPES_FILE).is_file()
        if path == self.checkpoints:
            return path.is_dir() and not any(path.iterdir())
        return path.name in ("lock", "model.partial", "config.toml.partial") or is_index(path)

    def _lock(self) -> IO[str]:
        """Make the folder and lock it. The system releases the lock when this process ends."""
        until, gone = time.monotonic() + LOCK_SECONDS, 0
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                if file := self._try_lock():
                    return file
            except FileNotFoundError:  # a start that failed has deleted its folder right now
                gone += 1
                if gone == GONE_TRIES:
                    raise
            if time.monotonic() > until:
                raise RunError(f"'{self.path}' is in use by another job: stop it, or name another --run")
            time.sleep(ASK_SECONDS)

    def _try_lock(self) -> IO[str] | None:
        """Lock the folder; return None if another job has it, or took away the lock's file before it was locked."""
        file = self.lock.open("a")  # without truncating: the holder's word must stay (check_shared)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(self.lock, file.fileno()):
                return file
        file.close()
        return None

    def lost(self) -> str | None:
        """Return what happened to the folder if it is not this job's any more; None on ranks that do not hold it."""
        if self._held is None or self._held.closed or same_file(self.lock, self._held.fileno()):
            return None
        if not os.path.exists(self.path):
            return f"the run folder '{self.path}' was deleted or renamed while the run trained"
        return f"'{self.lock}' was deleted or replaced while the run trained, so the folder may be another job's"

    def mend(self, config: Config) -> str | None:
        """Put back the lock or config.toml if someone has deleted it, and return a sentence about it.

        If both are gone, the folder is lost: someone is deleting it, and a run must not bring it back.
        """
        if self._held is None or self._held.closed:
            return None
        locked = same_file(self.lock, self._held.fileno())
        try:
            if locked and _is_gone(self.config):
                replace_text(self.config, config.toml())
                return f"'{self.config}' was deleted while the run trained: it is written again"
            if self.begun() and _is_gone(self.lock) and (file := self._try_lock()):
                os.dup2(file.fileno(), self._held.fileno())  # whoever closes the old file releases the new lock
                file.close()
                return f"'{self.lock}' was deleted while the run trained: the folder is locked again"
        except (OSError, RunError) as problem:  # a disk that is full or does not answer now must not end a run
            told, self._told = self._told, True
            return None if told else f"{problem}; the run goes on, and tries again after each step"
        return None

    def begin(
        self, config: Config, source: ModelSource, dtype: torch.dtype, origin: dict[str, Any] | None = None
    ) -> None:
        """Write the configuration and, before the first checkpoint, the description of the model and its origin."""
        if not self.has_checkpoints():
            shutil.rmtree(self.model, ignore_errors=True)
            partial = self.path / "model.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with writing(self.model):
                try:
                    partial.mkdir()
                    write_description(source, dtype, partial)
                    write_dtypes(source, dtype, partial)
                    if origin:
                        (partial / self.origin.name).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
                    partial.rename(self.model)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        replace_text(self.config, config.toml())
        assert read_config(self.config, [], saved=True) == config

    def set_aside(self) -> Path | None:
        """Rename an old run, so that a fresh one can take its place. Nothing is deleted. Return the new name."""
        if not self.path.exists():
            return None
        if self.path.name in ("", ".."):
            raise ConfigError(f"--fresh cannot rename '{self.path}': name the run folder, as --run ../mine")
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        with self.hold():
            try:
                self.path.rename(aside)
            except OSError as problem:
                why = problem.strerror
                raise ConfigError(f"'{self.path}' cannot be renamed to '{aside}' ({why}): name another --run") from None
        return aside

    def cut_metrics(self, step: int, validated: bool = False, evaluated: bool = False) -> None:
        """Keep the metrics of the first `step` steps. A line that a kill left half-written is dropped, too.

        `validated`, `evaluated`: whether the validation and the tasks after the last of them are known; else they will
        be made again.
        """
        known = {VALIDATION: validated, TASKS: evaluated}

        def kept() -> Iterator[str]:
            try:
                for line in self._read_lines():
                    is_known = all(known[name] for name in known if name in line)
                    if line["step"] < step or (line["step"] == step and is_known):
                        yield json.dumps(line) + "\n"
            except OSError as problem:
                raise RunError(f"'{self.metrics}' cannot be read ({problem.strerror}): move it away") from None

        _replace_by(self.metrics, kept())

    def read_metrics(self, *names: str) -> list[dict[str, Any]]:
        """Return one object per step, with all that was noted or, if they are given, with these names and the step.

        Lines that are not JSON objects with a step are skipped. A million steps fill gigabytes if everything is kept.
        """
        steps = (line for line in self._read_lines() if VALIDATION not in line and TASKS not in line)
        if not names:
            return list(steps)
        return [{name: line[name] for name in ("step", *names) if name in line} for line in steps]

    def read_validations(self) -> list[dict[str, Any]]:
        """Return one object per validation, from the same file."""
        return [line for line in self._read_lines() if VALIDATION in line]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Return one object per evaluation of tasks, from the same file."""
        return [line for line in self._read_lines() if TASKS in line]

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        if kind := not_a_file(self.metrics):
            raise OSError(errno.EINVAL, f"it is {kind}")
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    yield found


def _is_gone(file: Path) -> bool:
    """Return whether a file does not exist. A disk that does not answer now says nothing about it."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system in the body into one sentence about `path`."""
    try:
        yield
    except OSError as problem:
        raise RunError(f"'{path}' could not be written ({reason(problem, path.parent)})") from None


def partial_name(file: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return file.with_name(f"{file.name}.partial")


def replace_text(file: Path, text: str) -> None:
    """Write a file as a whole: a kill or a full disk leaves the old one."""
    _replace_by(file, [text])


def _replace_by(file: Path, parts: Iterable[str]) -> None:
    partial = partial_name(file)
    with writing(file):
        try:
            with partial.open("w", encoding="utf-8") as written:
                written.writelines(parts)
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)


def check_shared(run: RunFolder, lock: IO[str] | None, grid: Mesh) -> None:
    """Raise an error on all ranks if one of them does not see rank 0's run folder. Collective.

    Rank 0, which holds the lock, writes a random word into the lock's file; every rank must read it there.
    """
    if not grid.several_nodes:
        return
    word = from_first(grid.group, lambda: leave_word(lock) if lock else "")
    if blind := ranks_without(grid.group, sees_word(run.lock, word)):
        raise ConfigError(
            f"the run folder '{run.path}' is not the same on all ranks (rank {blind[0]} does not see what rank 0 "
            "wrote): --run must lie on a disk that all nodes share"
        )


def leave_word(lock: IO[str]) -> str:
    """Write a random word into the lock's file, and return it."""
    word = secrets.token_hex(8)
    with writing(Path(lock.name)):
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
