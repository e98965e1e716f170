"""The file of a benchmark's results: every row with its question, its machine, its commit and its command.

A row is stored as soon as it is measured, and each of its measurements before that, so that a run that was killed goes
on where it stopped. The file is replaced as a whole: a reader never sees half of it. A row belongs to its question. If
the question changes, as with another cap, the row is measured again.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.files import read_small

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
        found = [self.origin.get("machine", {}), *self.measurements]
        return {each["device"] for each in found if "device" in each}

    @property
    def done(self) -> bool:
        """Whether there is nothing left to measure. A side whose package was missing is tried again."""
        return self.answer is not None and (self.answer.get("ran", True) or self.answer.get("final", False))


class Store:
    """The results of one benchmark of one model."""

    def __init__(self, folder: Path, bench: str, model: str, ending: str = ""):
        name = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
        self.path = folder / f"{bench}-{name}{ending and '-'}{ending}.json"
        self.bench, self.model = bench, model
        self.rows: dict[str, Stored] = {}
        if self.path.exists():
            self.rows = {row.name: row for row in read_results(self.path)[1]}

    def row(self, name: str, question: Json, machine: Json | None) -> Stored:
        """Return the row of a question: as it was stored, or a new one if it was another question or device then."""
        question = json.loads(json.dumps(question))  # as the file has it
        found = self.rows.get(name)
        moved = found and machine and found.devices - {machine["device"]}
        if found is None or found.question != question or moved:
            self.rows[name] = found = Stored(name, question)
        return found

    def save(self, order: Iterable[str] = ()) -> None:
        """Write all rows, those of `order` first, and replace the file."""
        names = dict.fromkeys([*(name for name in order if name in self.rows), *self.rows])
        content = {"bench": self.bench, "model": self.model, "rows": [asdict(self.rows[name]) for name in names]}
        trial = self.path.with_suffix(".json.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with trial.open("w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(trial, self.path)
        except OSError as problem:
            raise ConfigError(
                f"--out {self.path.parent} cannot be written ({problem.strerror}): name another"
            ) from None


def read_results(path: Path) -> tuple[Json, list[Stored]]:
    """Return the head and the rows of a file of results. Raise an error if it is something else."""
    try:
        content = json.loads(read_small(path))
        return content, [Stored(**row) for row in content["rows"]]
    except OSError as problem:
        raise ConfigError(f"'{path}' cannot be read ({problem.strerror}): name another folder") from None
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"'{path}' holds no results of ithaca bench: move it away, or name another folder") from None
