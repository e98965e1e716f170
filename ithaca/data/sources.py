"""Read documents from files, one after the other, each with the place behind it, where reading can continue.

One document is in memory at a time (64 for Parquet). Ready tokens and raw bytes are read in pieces when they are
written. To continue, a JSONL file is sought and Parquet row groups are skipped, which costs next to nothing.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ithaca.base.errors import DataError, first_line
from ithaca.data.inputs import Input, bounds_file
from ithaca.data.records import Document, columns, document
from ithaca.data.tokenfile import DTYPES, Part, Stored, from_file, quoted

PARQUET_ROWS = 64


@dataclass(frozen=True)
class Place:
    """A place behind a document: whole files, then records (lines, rows) and bytes of the next file."""

    file: int = 0
    record: int = 0
    offset: int = 0  # bytes, to seek in a JSONL file and to show progress


@dataclass(frozen=True)
class Reading:
    """How files are read: `raw` leaves text undecoded; `bin_dtype` is the dtype of .bin files."""

    raw: bool
    bin_dtype: str | None


Read = Callable[[Input, Place, Reading], Iterator[tuple[int, int, Document]]]  # records and bytes behind it, a document


def documents(files: Sequence[Input], start: Place, reading: Reading) -> Iterator[tuple[Place, Document]]:
    """Yield all documents behind `start`, each with the place behind it."""
    for number in range(start.file, len(files)):
        file = files[number]
        begin = start if number == start.file else Place(number)
        try:
            for record, offset, found in _READERS[file.kind](file, begin, reading):
                yield Place(number, record, offset), found
        except OSError as problem:
            raise DataError(f"'{file.path}' cannot be read ({problem.strerror or first_line(problem)})") from None


def holds_tokens(file: Input, reading: Reading) -> bool:
    """Return whether a file's documents are ready tokens, by its kind or its first document."""
    if file.kind in ("text", "npy", "bin"):
        return file.kind != "text"
    first = next(documents([file], Place(), reading), None)
    return first is not None and first[1].ready


def _text(file: Input, start: Place, reading: Reading) -> Iterator[tuple[int, int, Document]]:
    if start.record:
        return
    where = f"'{file.path}'"
    raw = Stored(_part(file.path, 0, np.dtype(np.uint8)), 0, file.size)
    yield 1, file.size, Document(where, raw if reading.raw else _decoded(where, raw[:].tobytes(), 0))


def _part(path: Path, offset: int, dtype: np.dtype) -> Part:
    return Part(quoted(path), from_file(path.open("rb", buffering=0)), offset, dtype)


def _decoded(where: str, raw: bytes, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as problem:
        raise DataError(
            f"{where} is not UTF-8 at byte offset {offset + problem.start} (0x{raw[problem.start]:02x}): "
            "convert it with `iconv -t UTF-8`"
        ) from None


def _jsonl(file: Input, start: Place, _: Reading) -> Iterator[tuple[int, int, Document]]:
    number, offset = start.record, start.offset
    with file.path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            number += 1
            begin, offset = offset, offset + len(line)
            if line.strip():
                where = f"'{file.path}', line {number}"
                yield number, offset, document(where, _object(where, _decoded(where, line, begin)))


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where} is not JSON ({getattr(problem, 'msg', problem)})") from None
    if not isinstance(record, dict):
        raise DataError(f'{where} is not an object: write {{"text": "…"}}')
    return record


def _parquet(file: Input, start: Place, _: Reading) -> Iterator[tuple[int, int, Document]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"reading '{file.path}' needs pyarrow: pip install 'ithaca[parquet]'") from None
    try:
        with parquet.ParquetFile(file.path) as table:
            total = table.metadata.num_rows
            for row, record in _rows(table, columns(file.path, table.schema_arrow.names), start.record):
                place = f"'{file.path}', row {row + 1}"
                yield row + 1, file.size * (row + 1) // total, document(place, record, table=True)
    except (pyarrow.ArrowException, ValueError) as problem:  # ValueError: text in it is not UTF-8
        raise DataError(f"'{file.path}' is not Parquet ({first_line(problem)})") from None


def _rows(table: Any, columns: list[str], skip: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows behind the first `skip` with their numbers. Row groups before them are not read."""
    row = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= skip:
            row += rows
            continue
        for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=columns):
            for record in batch.to_pylist():
                if row >= skip:
                    yield row, record
                row += 1


def _npy(file: Input, start: Place, _: Reading) -> Iterator[tuple[int, int, Document]]:
    array = _load(file.path, mmap_mode="r")  # for its shape; the numbers are read below
    if array.ndim not in (1, 2):
        raise DataError(f"'{file.path}' has the shape {list(array.shape)}: [tokens] or [documents, tokens] is needed")
    count, length = (1, *array.shape) if array.ndim == 1 else array.shape
    by_columns = array.ndim == 2 and not array.flags.c_contiguous  # the rows lie scattered in the file
    rows = _load(file.path) if by_columns else None
    numbers = _part(file.path, array.offset, array.dtype)
    for row in range(start.record, count):
        where = f"'{file.path}', row {row}" if array.ndim == 2 else f"'{file.path}'"
        first = row * length
        stored = Stored(numbers, first, first + length) if rows is None else rows[row]
        yield row + 1, file.size * (row + 1) // count, Document(where, stored, ready=True)


def _load(path: Path, mmap_mode: Literal["r"] | None = None) -> Any:
    """Load or map the whole numbers of a .npy file. Pickled files are never opened."""
    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except OSError:
        raise
    except Exception as problem:  # whatever Python's own parser raises: numpy reads the header as a literal
        raise DataError(f"'{path}' is not a plain .npy file ({first_line(problem)})") from None
    if array.dtype.kind not in "iu":
        raise DataError(f"'{path}' holds {array.dtype}: whole numbers are needed, as array.astype('uint32') gives")
    return array


def _bin(file: Input, start: Place, reading: Reading) -> Iterator[tuple[int, int, Document]]:
    dtype = DTYPES[str(reading.bin_dtype)]
    count, rest = divmod(file.size, dtype.itemsize)
    if rest:
        raise DataError(
            f"'{file.path}' has {file.size} bytes, no multiple of the {dtype.itemsize} of --bin-dtype "
            f"{reading.bin_dtype}: give the dtype it was written in"
        )
    bounds, tokens = _bounds(bounds_file(file.path), count), _part(file.path, 0, dtype)
    for number in range(start.record, len(bounds) - 1):
        end = int(bounds[number + 1])
        where = f"'{file.path}', document {number}" if len(bounds) > 2 else f"'{file.path}'"
        yield number + 1, end * dtype.itemsize, Document(where, Stored(tokens, int(bounds[number]), end), ready=True)


def _bounds(path: Path, count: int) -> np.ndarray:
    if not path.exists():
        return np.array([0, count])
    bounds = _load(path)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != count or (bounds[1:] < bounds[:-1]).any():
        raise DataError(f"'{path}' is no rising list of offsets from 0 to the {count} tokens beside it")
    return bounds


_READERS: dict[str, Read] = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "npy": _npy, "bin": _bin}
