"""What an input of the campaign is: a name, how to build its folder, the command, and what the pages promise.

Inputs are written from README.md, docs/ and `--help` alone. None was made by reading the checks in ithaca/, so that a
check which is missing there is not missing here as well.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

Expected = Literal["ok", "error", "either"]


@dataclass(frozen=True)
class Toys:
    """Sound things, made once for all inputs: models, token files, a tokenizer, documents, a run after three steps."""

    folder: Path

    def copy(self, name: str, folder: Path, to: str | None = None) -> Path:
        """A copy in the folder of an input, which may be damaged there."""
        source, target = self.folder / name, folder / (to or name)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)
        return target


Build = Callable[[Path, Toys], None]
Check = Callable[[Path, Toys], str | None]


def nothing(folder: Path, toys: Toys) -> None:
    """Build an empty folder."""


@dataclass(frozen=True)
class Input:
    """One command in one folder."""

    name: str  # mutator/what, which is what a finding is named by
    words: tuple[str, ...]
    build: Build = nothing
    expect: Expected = "either"  # "either": the pages do not say, or a success means little
    check: Check | None = None  # after a success: what is wrong with its result
    started: bool = False  # as a program of its own with spawned ranks, which takes seconds

    @property
    def command(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def mutator(self) -> str:
        return self.name.partition("/")[0]


Mutator = Callable[[random.Random], list[Input]]


def all_of(*builds: Build) -> Build:
    """A build that does one after the other."""

    def build(folder: Path, toys: Toys) -> None:
        for one in builds:
            one(folder, toys)

    return build


def copies(*names: str) -> Build:
    """A build that copies toys under their own names."""

    def build(folder: Path, toys: Toys) -> None:
        for name in names:
            toys.copy(name, folder)

    return build


def writes(name: str, content: bytes | str) -> Build:
    """A build that writes one file."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content

    def build(folder: Path, toys: Toys) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return build


def sets(*options: str) -> tuple[str, ...]:
    return tuple(word for option in options for word in ("--set", option))


SHORT = ("train.tokens=16", "train.steps=1", "train.device=cpu")
SMALL = sets("model.source=model", "data.source=good.tokens", *SHORT)


def train(*more: str, run: str = "run") -> tuple[str, ...]:
    """`ithaca train` of one rank and one short step on the toys, which takes a fraction of a second."""
    return ("train", "--run", run, "--ranks", "1", *SMALL, *more)


def numbered(mutator: str, inputs: list[Input]) -> list[Input]:
    """The same inputs with names that differ."""
    return [replace(one, name=f"{mutator}/{number:03d} {one.name}") for number, one in enumerate(inputs)]


def shown(value: object, longest: int = 40) -> str:
    """A value as a part of a name."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 8]}… {len(text)}"
