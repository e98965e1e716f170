"""The input files behind the paths of `ithaca data`, in order, each with its kind.

A file is binary if its first 8 KiB hold a zero byte, as in git. A binary file that is named directly is an error; in a
folder it is skipped and counted. Cost: one small read for each text file.
"""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ithaca.base.errors import DataError, suggestion
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.tokenfile import DTYPES, INT64

KINDS = {".jsonl": "jsonl", ".parquet": "parquet", ".npy": "npy", ".bin": "bin"}  # every other file is text
_PROBED_BYTES = 8192


@dataclass(frozen=True)
class Input:
    """One file. `stamp` changes with its content: size and time of change, also of a file that belongs to it."""

    path: Path
    kind: str
    size: int
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    files: tuple[Input, ...]
    binary: int  # binary files in folders, skipped


def bounds_file(path: Path) -> Path:
    """Return the file of document offsets that belongs to raw tokens: corpus.bin -> corpus.bounds.npy."""
    return path.with_suffix(".bounds.npy")


def find_inputs(paths: Sequence[Path], bin_dtype: str | None = None, ours: Iterable[Path] = ()) -> Inputs:
    """Return the files at the paths. Files in `ours`, which this process writes, are skipped in folders."""
    if not paths:
        raise DataError("no path is given: name a file or a folder, as in `ithaca data notes.txt --out notes.tokens`")
    if bin_dtype is not None and bin_dtype not in DTYPES:
        raise DataError(f"--bin-dtype {bin_dtype} is not known: {suggestion(bin_dtype, DTYPES)}")
    own = {path.resolve() for path in ours}
    files: list[Input] = []
    binary = 0
    for path in paths:
        found, skipped = _folder(path, bin_dtype, own) if path.is_dir() else ([_named(path, bin_dtype)], 0)
        files += found
        binary += skipped
    return Inputs(tuple(files), binary)


def _named(path: Path, bin_dtype: str | None) -> Input:
    file = _input(path)
    if file.size == 0:
        raise DataError(f"'{path}' is empty, 0 bytes: name a file with text or tokens")
    if file.kind == "bin" and bin_dtype is None:
        raise DataError(f"'{path}' holds raw tokens of unknown size: add --bin-dtype uint16, or uint8 or uint32")
    if file.kind == "text" and (place := _zero_byte(path)) is not None:
        raise DataError(
            f"'{path}' is binary, with a zero byte at offset {place}: "
            "name text in UTF-8, or .jsonl, .parquet, .npy or .bin files"
        )
    return file


def _folder(folder: Path, bin_dtype: str | None, own: set[Path]) -> tuple[list[Input], int]:
    files: list[Input] = []
    binary = 0
    for path in sorted(_visible(folder)):
        if path.resolve() in own or _belongs_to_bin(path):
            continue
        file = _input(path)
        if (file.kind == "bin" and bin_dtype is None) or (file.kind == "text" and _zero_byte(path) is not None):
            binary += 1
        else:
            files.append(file)
    if not files:
        beside = f", only {binary} binary files" if binary else ""
        raise DataError(
            f"'{folder}' holds no text and no tokens{beside}: name a folder with text, .jsonl or .npy files"
        )
    return files, binary


def _visible(folder: Path) -> Iterator[Path]:
    for top, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(top, name)).is_file())


def _unreadable(problem: OSError) -> None:
    raise DataError(f"'{problem.filename}' cannot be read ({problem.strerror})") from None


def _belongs_to_bin(path: Path) -> bool:
    return path.name.endswith(".bounds.npy") and path.with_name(path.name.replace(".bounds.npy", ".bin")).exists()


def check_unchanged(files: Iterable[Input]) -> None:
    """Raise an error if a file has changed since it was found: its documents may be half old and half new."""
    for file in files:
        now = _input(file.path)
        if now.stamp != file.stamp:
            raise DataError(
                f"'{file.path}' has changed while it was read ({file.size} bytes before, {now.size} now): "
                "run the same command again, which starts again"
            )


def _input(path: Path) -> Input:
    try:
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns)
        kind = KINDS.get(path.suffix.lower(), "text")
        if kind == "bin" and bounds_file(path).exists():
            beside = bounds_file(path).stat()
            stamp += (beside.st_size, beside.st_mtime_ns)
    except FileNotFoundError:
        raise DataError(f"'{path}' does not exist: name a file or a folder") from None
    except OSError as problem:
        raise DataError(f"'{path}' cannot be read ({problem.strerror})") from None
    return Input(path, kind, status.st_size, stamp)


def _zero_byte(path: Path) -> int | None:
    """Return the offset of the first zero byte among the first bytes; None if there is none."""
    try:
        with path.open("rb") as file:
            place = file.read(_PROBED_BYTES).find(b"\0")
    except OSError as problem:
        raise DataError(f"'{path}' cannot be read ({problem.strerror})") from None
    return None if place < 0 else place


_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TABLES = {"encodings", "pydoc_data", "msilib"}  # tables, not programs: a small model cannot learn them


def standard_library() -> TokenFile:
    """Return the source code of Python's standard library, without tests and tables, one token a byte."""
    top = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(top.rglob("*.py")) if not (_SKIPPED | _TABLES) & set(file.relative_to(top).parts)]
    contents = [content for file in files if (content := file.read_bytes())]
    bounds = np.cumsum([0, *map(len, contents)], dtype=INT64)
    return in_memory(np.frombuffer(b"".join(contents), np.uint8), bounds, tokenizer="bytes", vocab=256)
