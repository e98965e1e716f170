"""A token file while it is written, with a journal from which a killed run continues.

    FILE.partial          space for the header, then tokens
    FILE.partial.bounds   for each document: where it ends, and the first token that is learned (int64 pairs)
    FILE.partial.journal  JSON: a digest of the inputs, the place in them, and the valid lengths of the two files above

The journal is replaced as a whole, after the other two files have reached the disk. When a run continues, it cuts off
what lies beyond the journal, so the result has the same bytes however often it was killed. At the end the bounds are
appended to the tokens, the header is written, and the file gets its name. Tokens are written once; twice if their
vocabulary was unknown and they fit a smaller dtype.
"""

import contextlib
import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.sources import Place
from ithaca.data.tokenfile import DTYPES, HEADER_BYTES, INT64, Header, pack_header, padded, smallest_dtype

_PIECE = 1 << 22  # tokens or documents converted at a time
_PAIR = 2 * INT64.itemsize


@dataclass(frozen=True)
class Journal:
    """How far a run has come. `identity` is a digest of its inputs and its tokenizer."""

    identity: str
    place: Place = field(default_factory=Place)
    tokens: int = 0
    documents: int = 0
    empty: int = 0  # documents without a token, skipped
    largest: int = 0  # the largest id among ready tokens
    prompted: bool = False  # whether a document has a prompt


def partial_files(out: Path) -> list[Path]:
    """Return the paths of tokens, bounds, journal, the next journal, and the copy in a smaller dtype."""
    endings = ("", ".bounds", ".journal", ".journal.new", ".copy")
    return [out.with_name(f"{out.name}.partial{ending}") for ending in endings]


class Partial:
    """A token file that is being written. `begun`: whether it continues an earlier run; None if there was none."""

    def __init__(self, out: Path, identity: str, dtype: str, seconds: float):
        self._out, self._width, self._seconds = out, DTYPES[dtype], seconds
        self._tokens_at, self._bounds_at, self._journal_at, self._fresh_at, self._copy_at = partial_files(out)
        with self._writing():
            self._tokens = _open(self._tokens_at)
            self._bounds = _open(self._bounds_at)
        earlier = self._read_journal()
        self.begun = None if earlier is None else earlier.identity == identity and self._covers(earlier)
        self.now = earlier if earlier and self.begun else Journal(identity)
        self._cut()
        self._marked = time.monotonic()

    def __enter__(self) -> "Partial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._tokens, self._bounds):
            with contextlib.suppress(OSError):  # a full disk: it was reported at the first write
                file.close()

    def add(self, parts: Sequence[np.ndarray], learned: int, largest: int) -> None:
        """Append one document. Its labels count from token `learned` on."""
        start = self.now.tokens
        end = start + sum(map(len, parts))
        with self._writing():
            for part in parts:
                for at in range(0, len(part), _PIECE):
                    self._tokens.write(part[at : at + _PIECE].astype(self._width).data)
            self._bounds.write(np.array([end, start + learned], INT64).data)
        self.now = replace(
            self.now,
            tokens=end,
            documents=self.now.documents + 1,
            largest=max(self.now.largest, largest),
            prompted=self.now.prompted or learned > 0,
        )

    def skip(self) -> None:
        """Count a document without tokens."""
        self.now = replace(self.now, empty=self.now.empty + 1)

    def reach(self, place: Place, force: bool = False) -> None:
        """Note that everything before `place` was added. Write the journal if the last one is some seconds old."""
        self.now = replace(self.now, place=place)
        if force or time.monotonic() - self._marked >= self._seconds:
            with self._writing():
                for file in (self._tokens, self._bounds):
                    _to_disk(file)
                with self._fresh_at.open("wb") as fresh:
                    fresh.write(json.dumps(asdict(self.now)).encode())
                    _to_disk(fresh)
                self._fresh_at.replace(self._journal_at)
            self._marked = time.monotonic()

    def finish(self, tokenizer: str, vocab: int) -> Header:
        """Add bounds and header to the tokens, in the smallest dtype, and give the file its name."""
        dtype, now = smallest_dtype(vocab), self.now
        header = Header(dtype, now.tokens, now.documents, vocab, tokenizer, now.prompted, bounds_crc32=0)
        with self._writing():
            _to_disk(self._tokens)
            _to_disk(self._bounds)
            if DTYPES[dtype] == self._width:
                header = self._complete(self._tokens, header)
                self._tokens_at.rename(self._out)
            else:
                with self._narrowed(DTYPES[dtype]) as copy:
                    header = self._complete(copy, header)
                self._copy_at.rename(self._out)
            self.discard()
        return header

    def discard(self) -> None:
        """Delete the partial files."""
        for file in partial_files(self._out):
            file.unlink(missing_ok=True)

    def _complete(self, file: BinaryIO, header: Header) -> Header:
        """Write the bounds behind the tokens, and the header before them."""
        file.write(bytes(padded(file.tell()) - file.tell()))
        crc32 = 0
        for piece in self._sections():
            crc32 = zlib.crc32(piece, crc32)
            file.write(piece)
        header = replace(header, bounds_crc32=crc32)
        file.seek(0)
        file.write(pack_header(header))
        _to_disk(file)
        assert os.fstat(file.fileno()).st_size == header.file_bytes
        return header

    def _sections(self) -> Iterator[bytes]:
        """Yield the bytes of bounds and learned_from."""
        pairs = np.memmap(self._bounds_at, INT64, "r", shape=(self.now.documents, 2))
        yield bytes(INT64.itemsize)
        for column in (0, 1) if self.now.prompted else (0,):
            for at in range(0, len(pairs), _PIECE):
                yield pairs[at : at + _PIECE, column].tobytes()

    def _narrowed(self, dtype: np.dtype) -> BinaryIO:
        copy = self._copy_at.open("wb")
        copy.write(bytes(HEADER_BYTES))
        wide = np.memmap(self._tokens_at, self._width, "r", HEADER_BYTES, (self.now.tokens,))
        for at in range(0, len(wide), _PIECE):
            copy.write(wide[at : at + _PIECE].astype(dtype).data)
        return copy

    def _read_journal(self) -> Journal | None:
        try:
            content = json.loads(self._journal_at.read_bytes())
            return Journal(place=Place(**content.pop("place")), **content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return Journal("unreadable")

    def _covers(self, journal: Journal) -> bool:
        """Return whether the files hold as much as the journal says."""
        tokens, bounds = (os.fstat(file.fileno()).st_size for file in (self._tokens, self._bounds))
        whole = HEADER_BYTES + journal.tokens * self._width.itemsize
        return tokens >= whole and bounds >= journal.documents * _PAIR

    def _cut(self) -> None:
        """Cut off what lies beyond the journal, and continue to write there."""
        with self._writing():
            self._tokens.truncate(HEADER_BYTES + self.now.tokens * self._width.itemsize)
            self._bounds.truncate(self.now.documents * _PAIR)
            for file in (self._tokens, self._bounds):
                file.seek(0, os.SEEK_END)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise DataError(f"'{self._out}' is being written by another process: wait, or name another --out") from None
        except OSError as problem:
            raise DataError(
                f"'{self._tokens_at}' cannot be written ({problem.strerror or problem}): fix that and run the same "
                "command again, which continues where it stopped"
            ) from None


def _open(path: Path) -> BinaryIO:
    """Open a file for writing without truncating it, and lock it against other processes."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=1 << 20)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
