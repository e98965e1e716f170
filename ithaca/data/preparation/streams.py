"""Files as streams of bytes, plain or packed by gzip or zstd. A byte order mark at the start is left out.

Python 3.11 has no zstd; pyarrow has. A packed file is read from its start, also to continue behind a place in it.
"""

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ithaca.base.errors import DataError, first_line
from ithaca.base.files import TO_UTF8

CHUNK = 1 << 20
SKIP_HINT = "; --skip-bad skips it"


class BadFile(DataError):
    """A file that cannot be read, or not to its end. --skip-bad skips the rest of it."""


@contextlib.contextmanager
def opened(path: Path, packed: str | None) -> Iterator[BinaryIO]:
    """Open the unpacked bytes of a file. What cannot be read or unpacked raises an error that names the file."""
    try:
        with path.open("rb", buffering=0) as raw, _unpacked(path, raw, packed) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as problem:
        why = getattr(problem, "strerror", None) or first_line(problem)
        verb = "unpacked" if packed else "read"
        raise BadFile(f"'{path}' cannot be {verb} ({why})") from None


def _unpacked(path: Path, raw: BinaryIO, packed: str | None) -> BinaryIO:
    if packed == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if packed == "zstd":
        pyarrow = import_pyarrow(path)
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), CHUNK)
    return io.BufferedReader(cast(io.RawIOBase, raw), CHUNK)


def import_pyarrow(path: Path) -> Any:
    """Return pyarrow, which is optional."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading '{path}' needs pyarrow: pip install 'ithaca[parquet]'") from None
    return pyarrow


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the bytes of a stream about a mebibyte at a time, without a byte order mark of UTF-8 at the start."""
    chunk = stream.read(CHUNK).removeprefix(codecs.BOM_UTF8)
    while chunk:
        yield chunk
        chunk = stream.read(CHUNK)


def not_utf8(where: str, offset: int, byte: int) -> BadFile:
    """Return the error about a byte that is not UTF-8."""
    return BadFile(f"{where} is not UTF-8 at byte offset {offset} (0x{byte:02x}): {TO_UTF8}")
