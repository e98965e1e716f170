"""The input files behind the paths of `ithaca data`, in order, each with its kind.

A file that no reader takes (kinds.py) is an error if it is named, and is skipped and counted in a folder. A folder that
`datasets` wrote is read as its Arrow files. A name that begins with hf: is a dataset of the `datasets` package.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError, suggestion
from ithaca.base.sizes import format_count
from ithaca.data.preparation.hub import PREFIX, is_dict, is_saved, load, only_split, saved_files
from ithaca.data.preparation.kinds import kind_of, refusal
from ithaca.data.preparation.streams import SKIP_HINT, BadFile
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.tokenfile import DTYPES, INT64


@dataclass(frozen=True)
class Input:
    """One file, or one dataset by name. `stamp` changes with its content: sizes and times of change."""

    path: Path
    kind: str
    size: int
    stamp: tuple[int, ...]
    packed: str | None = None
    dataset: Any = field(default=None, compare=False, repr=False)  # of kind 'hub'


@dataclass
class Inputs:
    """The files that were found, those that were not read, and notes about choices."""

    files: list[Input] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)  # files in folders that no reader takes
    bad: list[str] = field(default_factory=list)  # sentences about files that cannot be read
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """The options by which files are found."""

    bin_dtype: str | None = None
    own: frozenset[Path] = frozenset()  # files that this process writes, which are skipped in folders
    skip_bad: bool = False


def bounds_file(path: Path) -> Path:
    """Return the file of document offsets that belongs to raw tokens: corpus.bin -> corpus.bounds.npy."""
    return path.with_suffix(".bounds.npy")


def find_inputs(
    paths: Sequence[Path], bin_dtype: str | None = None, ours: Iterable[Path] = (), skip_bad: bool = False
) -> Inputs:
    """Return the files at the paths. Files in `ours`, which this process writes, are skipped in folders."""
    if not paths:
        raise DataError("no path is given: name a file or a folder, as in `ithaca data notes.txt --out notes.tokens`")
    if bin_dtype is not None and bin_dtype not in DTYPES:
        raise DataError(f"--bin-dtype {bin_dtype} is not known: {suggestion(bin_dtype, DTYPES)}")
    how = Finding(bin_dtype, frozenset(path.resolve() for path in ours), skip_bad)
    found = Inputs()
    for path in paths:
        if str(path).startswith(PREFIX):
            found.files.append(_dataset(path, found))
        elif path.is_dir():
            _add_folder(found, path, how)
        else:
            found.files.append(_named(path, bin_dtype))
    return found


def _dataset(path: Path, found: Inputs) -> Input:
    dataset, note, stamp = load(str(path))
    found.notes += [note] if note else []
    return Input(path, "hub", len(dataset), stamp, dataset=dataset)


def _named(path: Path, bin_dtype: str | None) -> Input:
    file = _input(path)
    if file.size == 0:
        raise DataError(f"'{path}' is empty, 0 bytes: name a file with text or tokens")
    if file.kind == "bin" and bin_dtype is None:
        raise DataError(f"'{path}' holds raw tokens of unknown size: add --bin-dtype uint16, or uint8 or uint32")
    if reason := refusal(path):
        raise DataError(f"'{path}' {reason}")
    return file


def _add_folder(found: Inputs, folder: Path, how: Finding) -> None:
    files, skipped = len(found.files) + len(found.bad), len(found.skipped)
    for path in sorted(_entries(folder)):
        if is_saved(path):
            found.files += map(_input, saved_files(path))
        elif is_dict(path):
            found.files += map(_input, saved_files(only_split(path, found.notes)))
        elif path.resolve() not in how.own and not _belongs_to_bin(path):
            _add_file(found, path, how)
    if len(found.files) + len(found.bad) == files:
        others = len(found.skipped) - skipped
        beside = f", only {format_count(others, 'file')} of other kinds" if others else ""
        raise DataError(
            f"'{folder}' holds no text and no tokens{beside}: name a folder with text, .jsonl or .npy files"
        )


def _add_file(found: Inputs, path: Path, how: Finding) -> None:
    try:
        file = _input(path)
        if (file.kind == "bin" and how.bin_dtype is None) or refusal(path):
            found.skipped.append(path)
        else:
            found.files.append(file)
    except BadFile as problem:
        if not how.skip_bad:
            raise DataError(f"{problem}{SKIP_HINT}") from None
        found.bad.append(str(problem))


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, without hidden ones, and the folders that `datasets` wrote."""
    for name, folders, names in os.walk(folder, onerror=_unreadable):
        top = Path(name)
        if is_saved(top) or is_dict(top):
            folders[:] = []
            yield top
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := top / name).is_file())


def _unreadable(problem: OSError) -> None:
    raise DataError(f"'{problem.filename}' cannot be read ({problem.strerror})") from None


def _belongs_to_bin(path: Path) -> bool:
    return path.name.endswith(".bounds.npy") and path.with_name(path.name.replace(".bounds.npy", ".bin")).exists()


def check_unchanged(files: Iterable[Input]) -> None:
    """Raise an error if a file has changed since it was found: its documents may be half old and half new."""
    for file in files:
        now = file if file.kind == "hub" else _input(file.path)
        if now.stamp != file.stamp:
            raise DataError(
                f"'{file.path}' has changed while it was read ({file.size} bytes before, {now.size} now): "
                "run the same command again, which starts again"
            )


def _input(path: Path) -> Input:
    kind, packed = kind_of(path)
    try:
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns)
        if kind == "bin" and bounds_file(path).exists():
            beside = bounds_file(path).stat()
            stamp += (beside.st_size, beside.st_mtime_ns)
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist: name a file or a folder, or a dataset as hf:NAME") from None
    except OSError as problem:
        raise BadFile(f"'{path}' cannot be read ({problem.strerror})") from None
    return Input(path, kind, status.st_size, stamp, packed)


_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TABLES = {"encodings", "pydoc_data", "msilib"}  # tables, not programs: a small model cannot learn them


def standard_library() -> TokenFile:
    """Return the source code of Python's standard library, without tests and tables, one token a byte."""
    top = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(top.rglob("*.py")) if not (_SKIPPED | _TABLES) & set(file.relative_to(top).parts)]
    contents = [content for file in files if (content := file.read_bytes())]
    bounds = np.cumsum([0, *map(len, contents)], dtype=INT64)
    return in_memory(np.frombuffer(b"".join(contents), np.uint8), bounds, tokenizer="bytes", vocab=256)
