"""The file of a benchmark's results: every row with its question, its machine, its commit and its command.

A row is stored as soon as it is measured, and each of its measurements before that, so that a run that was killed goes
on where it stopped. The file is replaced as a whole: a reader never sees half of it. A row belongs to its question. If
the question changes, as with another cap, the row is measured again, and replaced by the first new measurement. A file
is of one model and one device, and one command at a time writes it.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from ithaca.base.disk import same_file
from ithaca.base.errors import ConfigError
from ithaca.base.files import read_small
from ithaca.model.spec import Spec

Json = dict[str, Any]


@dataclass
class Stored:
    """A row as the file has it."""

    name: str
    question: Json  # all that the answer depends on
    predicted: Json | None = None
    answer: Json | None = None  # None: not measured, or not yet
    error: str | None = None  # why it could not be measured; the next run tries again
    measurements: list[Json] = field(default_factory=list)  # [{"request": …, "result": …, "commit": …, "device": …}]
    origin: Json = field(default_factory=dict)  # machine, commit, command
    about: Json = field(default_factory=dict)  # what the row is, and what is published beside it

    @property
    def commits(self) -> str:
        """The commits that its measurements were made at, in order: a row may have been begun at another one."""
        return ", ".join(dict.fromkeys(each.get("commit", "unknown") for each in self.measurements))

    @property
    def devices(self) -> set[str]:
        """The devices that it was measured on, also if it is not done."""
        found = [self.origin.get("machine", {}) if self.answer else {}, *self.measurements]
        return {each["device"] for each in found if "device" in each}

    @property
    def done(self) -> bool:
        """Whether there is nothing left to measure. A side whose package was missing is tried again."""
        return self.answer is not None and (self.answer.get("ran", True) or self.answer.get("final", False))


class Store:
    """The results of one benchmark of one model."""

    def __init__(self, folder: Path, bench: str, model: str, spec: Spec, ending: str = ""):
        name = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
        self.path = folder / f"{bench}-{name}{ending and '-'}{ending}.json"
        self.bench, self.model, self._sizes = bench, model, _sizes(spec)
        self.rows: dict[str, Stored] = {}
        self._replaced: dict[str, Stored] = {}  # rows that stay in the file until a new measurement takes their place

    @contextmanager
    def opened(self, device: str | None) -> Iterator[None]:
        """Read the file, and let no other command write it. `device`: on which rows will be measured."""
        lock = self.path.with_suffix(".lock")
        with self._locked(lock):
            try:
                self._read(device)
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _locked(self, lock: Path) -> IO[str]:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("a")
        except OSError as problem:
            raise self._no_folder(problem) from None
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(lock, file.fileno()):  # not deleted by the command that had it
                return file
        file.close()
        raise ConfigError(
            f"'{self.path}' is in use by another ithaca bench: wait until it has ended, or name another --out"
        )

    def _no_folder(self, problem: OSError) -> ConfigError:
        return ConfigError(f"--out {self.path.parent} cannot be written ({problem.strerror}): name another")

    def _read(self, device: str | None) -> None:
        if not self.path.exists():
            return
        head, rows = read_results(self.path)
        known = head.get("sizes")  # files of older releases have none
        if known != self._sizes if known else head.get("model", self.model) != self.model:
            raise ConfigError(f"'{self.path}' has results of another model, '{head['model']}': name another --out")
        others = sorted({other for row in rows for other in row.devices} - {device})
        if device and others:
            raise ConfigError(
                f"'{self.path}' has rows measured on {others[0]}, and this is {device}: name another --out"
            )
        self.rows = {row.name: row for row in rows}

    def row(self, name: str, question: Json) -> Stored:
        """Return the row of a question: as it was stored, or a new one if it was another question then."""
        question = json.loads(json.dumps(question))  # as the file has it
        found = self.rows.get(name)
        if found is None or found.question != question:
            if found:
                self._replaced[name] = found
            self.rows[name] = found = Stored(name, question)
        return found

    def _as_stored(self, name: str) -> Stored:
        row, old = self.rows[name], self._replaced.get(name)
        return old if old and old.answer and not (row.answer or row.measurements) else row

    def save(self, order: Iterable[str] = ()) -> None:
        """Write all rows, those of `order` first, and replace the file."""
        names = dict.fromkeys([*(name for name in order if name in self.rows), *self.rows])
        rows = [asdict(self._as_stored(name)) for name in names]
        content = {"bench": self.bench, "model": self.model, "sizes": self._sizes, "rows": rows}
        trial = self.path.with_suffix(".json.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with trial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(trial, self.path)
        except OSError as problem:
            raise self._no_folder(problem) from None


def _sizes(spec: Spec) -> Json:
    """What tells models of one name apart."""
    return {"parameters": spec.parameters(), "layers": spec.layers, "hidden": spec.hidden, "heads": spec.heads}


def read_results(path: Path) -> tuple[Json, list[Stored]]:
    """Return the head and the rows of a file of results. Raise an error if it is something else."""
    try:
        content = json.loads(read_small(path))
        return content, [Stored(**row) for row in content["rows"]]
    except OSError as problem:
        raise ConfigError(f"'{path}' cannot be read ({problem.strerror}): name another folder") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"'{path}' holds no results of ithaca bench: move it away, or name another folder") from None
