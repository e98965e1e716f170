"""Read documents from files, one after the other, each with the place behind it, where reading can continue.

One document is in memory at a time (64 rows of a table). Long text files, ready tokens and raw bytes are read in pieces
when they are encoded. To continue, a JSONL file is sought; packed files and JSON lists are read again up to the place.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ithaca.base.errors import DataError, first_line
from ithaca.data.preparation.inputs import Input, bounds_file
from ithaca.data.preparation.json_list import elements
from ithaca.data.preparation.pieces import LongText
from ithaca.data.preparation.records import Document, document
from ithaca.data.preparation.streams import SKIP_HINT, BadFile, chunks, not_utf8, opened
from ithaca.data.preparation.tables import Rows, arrow_rows, hub_rows, parquet_rows
from ithaca.data.tokenfile import DTYPES, Part, Stored, from_file, quoted

LONG = 1 << 20  # bytes of a text file from which on it is read in pieces


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
    field: str | None = None  # the field of the text in records
    skip_bad: bool = False


@dataclass(frozen=True)
class Bad:
    """A file or record that was skipped, and why."""

    sentence: str


Found = tuple[int, int, Document | DataError]  # records and bytes behind it; a document, or what is wrong with it
Read = Callable[[Input, Place, Reading], Iterator[Found]]


def documents(files: Sequence[Input], start: Place, reading: Reading) -> Iterator[tuple[Place, Document | Bad]]:
    """Yield all documents behind `start`, each with the place behind it."""
    for number in range(start.file, len(files)):
        file = files[number]
        begin = start if number == start.file else Place(number)
        try:
            for record, offset, found in _READERS[file.kind](file, begin, reading):
                yield Place(number, record, offset), _skip(found, reading) if isinstance(found, DataError) else found
        except BadFile as problem:
            yield Place(number + 1), _skip(problem, reading)
        except OSError as problem:
            why = DataError(f"'{file.path}' cannot be read ({problem.strerror or first_line(problem)})")
            yield Place(number + 1), _skip(why, reading)


def _skip(problem: DataError, reading: Reading) -> Bad:
    if not reading.skip_bad:
        raise DataError(f"{problem}{SKIP_HINT}") from None
    return Bad(str(problem))


def holds_tokens(file: Input, reading: Reading) -> bool:
    """Return whether a file's documents are ready tokens, by its kind or its first document."""
    if file.kind in ("text", "npy", "bin"):
        return file.kind != "text"
    found = (item for _, item in documents([file], Place(), reading))
    first = next((item for item in found if isinstance(item, Document)), None)
    return first is not None and first.ready


def _text(file: Input, start: Place, reading: Reading) -> Iterator[Found]:
    if start.record:
        return
    where = f"'{file.path}'"
    with opened(file.path, file.packed) as stream:
        head = stream.read(LONG + 1)
        if reading.raw and file.packed is None:
            mark = len(codecs.BOM_UTF8) if _marked(file.path) else 0
            content = Stored(_part(file.path, mark, np.dtype(np.uint8)), 0, file.size - mark)
        elif len(head) > LONG:
            content = LongText(file.path, file.packed, file.size)
        else:
            head = head.removeprefix(codecs.BOM_UTF8)
            content = np.frombuffer(head, np.uint8) if reading.raw else _decoded(where, head, 0)
    if isinstance(content, LongText) and not reading.raw:
        _check_utf8(file)
    yield 1, file.size, Document(where, content)


def _marked(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def _check_utf8(file: Input) -> None:
    """Raise an error if a long text is not UTF-8, before its first piece is encoded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with opened(file.path, file.packed) as stream:
        for chunk in chunks(stream):
            kept = len(decoder.getstate()[0])  # bytes of a character that the last chunk has begun
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as problem:
                raise not_utf8(f"'{file.path}'", done - kept + problem.start, problem.object[problem.start]) from None
            done += len(chunk)
    if held := decoder.getstate()[0]:
        raise not_utf8(f"'{file.path}'", done - len(held), held[0])


def _part(path: Path, offset: int, dtype: np.dtype) -> Part:
    return Part(quoted(path), from_file(path.open("rb", buffering=0)), offset, dtype)


def _decoded(where: str, raw: bytes, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as problem:
        raise not_utf8(where, offset + problem.start, raw[problem.start]) from None


def _jsonl(file: Input, start: Place, reading: Reading) -> Iterator[Found]:
    number, offset = (start.record, start.offset) if file.packed is None else (0, 0)
    with opened(file.path, file.packed) as lines:
        if offset:
            lines.seek(offset)
        while line := lines.readline():
            number += 1
            begin, offset = offset, offset + len(line)
            if number > start.record and not line.isspace():
                where = f"'{file.path}', line {number}"
                held = [line if begin else line.removeprefix(codecs.BOM_UTF8)]
                del line  # a line may be long: its bytes go before its text is parsed, and its text with `_from_line`
                found = _from_line(where, held, begin, reading)
                yield number, offset if file.packed is None else min(offset, file.size), found


def _from_line(where: str, held: list[bytes], begin: int, reading: Reading) -> Document | DataError:
    """Return the document of the line that is taken out of `held`, or what is wrong with it."""
    try:
        text = _decoded(where, held.pop(), begin)
        return document(where, _object(where, text), reading.field)
    except DataError as problem:
        return problem


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where} is not JSON ({getattr(problem, 'msg', problem)})") from None
    return _checked_object(where, record)


def _checked_object(where: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f'{where} is not an object: write {{"text": "…"}}')
    return record


def _json(file: Input, start: Place, reading: Reading) -> Iterator[Found]:
    with opened(file.path, file.packed) as stream:
        for number, (offset, record) in enumerate(elements(file.path, stream), 1):
            if number > start.record:
                where = f"'{file.path}', object {number}"
                yield number, min(offset, file.size), _from_record(where, record, reading)


def _from_record(where: str, record: Any, reading: Reading, table: bool = False) -> Document | DataError:
    try:
        return document(where, _checked_object(where, record), reading.field, table)
    except DataError as problem:
        return problem


def _table(rows_of: Rows) -> Read:
    def read(file: Input, start: Place, reading: Reading) -> Iterator[Found]:
        for row, offset, record in rows_of(file, start.record, reading.field):
            yield row + 1, offset, _from_record(f"'{file.path}', row {row + 1}", record, reading, table=True)

    return read


def _npy(file: Input, start: Place, _: Reading) -> Iterator[Found]:
    array = _load(file.path, mmap_mode="r")  # for its shape; the numbers are read below
    if array.ndim not in (1, 2):
        raise BadFile(f"'{file.path}' has the shape {list(array.shape)}: [tokens] or [documents, tokens] is needed")
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
        raise BadFile(f"'{path}' is not a plain .npy file ({first_line(problem)})") from None
    if array.dtype.kind not in "iu":
        raise BadFile(f"'{path}' holds {array.dtype}: whole numbers are needed, as array.astype('uint32') gives")
    return array


def _bin(file: Input, start: Place, reading: Reading) -> Iterator[Found]:
    dtype = DTYPES[str(reading.bin_dtype)]
    count, rest = divmod(file.size, dtype.itemsize)
    if rest:
        raise DataError(
            f"'{file.path}' has {file.size} bytes, not a multiple of the {dtype.itemsize} of --bin-dtype "
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
        raise BadFile(f"'{path}' is not a rising list of offsets from 0 to the {count} tokens beside it")
    return bounds


_READERS: dict[str, Read] = {
    "text": _text,
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _table(parquet_rows),
    "arrow": _table(arrow_rows),
    "hub": _table(hub_rows),
    "npy": _npy,
    "bin": _bin,
}
