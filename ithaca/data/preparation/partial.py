"""A token file while it is written, with a journal from which a killed run continues.

    FILE.partial          space for the header, then tokens
    FILE.partial.bounds   int64: where each document ends
    FILE.partial.ignored  int64 pairs: ranges of tokens that are not learned
    FILE.partial.journal  JSON: a digest of the inputs, the place in them, and the valid lengths of the files above

The journal is replaced as a whole, after the other files have reached the disk. When a run continues, it cuts off what
lies beyond the journal, so the result has the same bytes however often it was killed. At the end mask, bounds and
checksums are appended to the tokens, the header is written, and the file gets its name. Tokens are written once, twice
if their vocabulary was unknown and they fit a smaller dtype, and read once for the checksums.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from ithaca.base.disk import is_full, reason
from ithaca.base.errors import DataError, RunError
from ithaca.data.preparation.sources import Place
from ithaca.data.preparation.tokenizer import Numbers
from ithaca.data.tokenfile import (
    DTYPES,
    HEADER_BYTES,
    INT64,
    Header,
    Part,
    Parts,
    blocks_sha256,
    from_file,
    index_blocks,
    pack_header,
    padded,
    quoted,
    smallest_dtype,
)

VERSION = 2  # 2: special tokens of the post-processor are added; 1: only the end token was
FIRST_BAD = 3
PIECE = 1 << 22  # tokens or documents converted at a time; a multiple of 8, so that a mask's pieces are whole bytes


@dataclass(frozen=True)
class Journal:
    """The progress of a run. `identity` is a digest of its inputs and its tokenizer."""

    identity: str
    version: int = 1  # of the rules by which documents become tokens; older journals do not have it
    place: Place = field(default_factory=Place)
    tokens: int = 0
    documents: int = 0
    empty: int = 0  # documents without a token, skipped
    largest: int = 0  # the largest id among ready tokens
    ignored: int = 0  # ranges of tokens that are not learned
    bad: int = 0  # files and records that could not be read, skipped
    first_bad: tuple[str, ...] = ()  # sentences about the first of them
    forced: int = 0  # places where a long text was cut and its pieces did not agree
    conversations: int = 0
    samples: int = 0  # of conversations
    divided: int = 0  # conversations of several samples
    unlearned: int = 0  # conversations without a learned token
    first_unlearned: str = ""


def partial_files(out: Path) -> list[Path]:
    """Return the paths of tokens, bounds, ignored, journal, the next journal, and the copy in a smaller dtype."""
    endings = ("", ".bounds", ".ignored", ".journal", ".journal.new", ".copy")
    return [out.with_name(f"{out.name}.partial{ending}") for ending in endings]


class Partial:
    """A token file that is being written. `begun`: whether it continues an earlier run; None if there was none."""

    def __init__(self, out: Path, identity: str, dtype: str, seconds: float, skip_bad: bool = False):
        self._out, self._width, self._seconds = out, DTYPES[dtype], seconds
        self._tokens_at, bounds_at, ignored_at, self._journal_at, self._fresh_at, self._copy_at = partial_files(out)
        with self._writing():
            self._tokens, self._bounds, self._ignored = map(_open, (self._tokens_at, bounds_at, ignored_at))
        self._files = (self._tokens, self._bounds, self._ignored)
        earlier = self._read_journal()
        known = earlier is not None and (earlier.identity, earlier.version) == (identity, VERSION)
        known = known and (skip_bad or earlier.bad == 0)
        self.begun = None if earlier is None else known and self._covers(earlier)
        self.outdated = earlier is not None and earlier.version != VERSION
        self.now = earlier if earlier and self.begun else Journal(identity, VERSION)
        self._cut()
        self._marked, self._journaled = time.monotonic(), bool(self.begun)

    def __enter__(self) -> "Partial":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk: it was reported at the first write
                file.close()

    def add(self, parts: Sequence[Numbers], ignored: Sequence[range], largest: int) -> None:
        """Append one document. `ignored`: its tokens that are not learned, in rising ranges."""
        length = sum(map(len, parts))
        for part in parts:
            self.append(part)
        self.end_document(length, ignored, largest)

    def append(self, tokens: Numbers) -> None:
        """Append tokens of a document that `end_document` will end."""
        with self._writing():
            for at in range(0, len(tokens), PIECE):
                self._tokens.write(tokens[at : at + PIECE].astype(self._width).data)

    def end_document(self, length: int, ignored: Sequence[range] = (), largest: int = 0, forced: int = 0) -> None:
        """End the document whose `length` tokens were appended."""
        start = self.now.tokens
        ranges = [(start + tokens.start, start + tokens.stop) for tokens in ignored if tokens]
        with self._writing():
            self._bounds.write(np.array([start + length], INT64).data)
            self._ignored.write(np.array(ranges, INT64).tobytes())
        self.now = replace(
            self.now,
            tokens=start + length,
            documents=self.now.documents + 1,
            largest=max(self.now.largest, largest),
            ignored=self.now.ignored + len(ranges),
            forced=self.now.forced + forced,
        )

    def drop_document(self) -> None:
        """Remove the tokens that were appended since the last document ended."""
        with self._writing():
            self._tokens.flush()
        self._cut()

    def skip(self) -> None:
        """Count a document without tokens."""
        self.now = replace(self.now, empty=self.now.empty + 1)

    def skip_bad(self, sentence: str) -> None:
        """Count a file or record that could not be read."""
        first = (*self.now.first_bad, sentence)[:FIRST_BAD]
        self.now = replace(self.now, bad=self.now.bad + 1, first_bad=first)

    def count(self, sample: int, where: str, learns: bool) -> None:
        """Count a sample of the conversation `where`, its first being 1."""
        now = self.now
        self.now = replace(
            now,
            conversations=now.conversations + (sample == 1),
            samples=now.samples + 1,
            divided=now.divided + (sample == 2),
            unlearned=now.unlearned + (not learns),
            first_unlearned=now.first_unlearned or ("" if learns else where),
        )

    def reach(self, place: Place, force: bool = False) -> None:
        """Note that everything before `place` was added. Write the journal if the last one is some seconds old."""
        self.now = replace(self.now, place=place)
        if force or time.monotonic() - self._marked >= self._seconds:
            with self._writing():
                for file in self._files:
                    _to_disk(file)
                with self._fresh_at.open("wb") as fresh:
                    fresh.write(json.dumps(asdict(self.now)).encode())
                    _to_disk(fresh)
                self._fresh_at.replace(self._journal_at)
            self._marked, self._journaled = time.monotonic(), True

    def finish(self, tokenizer: str, vocab: int) -> Header:
        """Add mask, bounds, checksums and header to the tokens, in the smallest dtype, and give the file its name."""
        dtype, now = smallest_dtype(vocab), self.now
        header = Header(dtype, now.tokens, now.documents, vocab, tokenizer, now.ignored > 0, labels=0, blocks_sha256="")
        with self._writing():
            for file in self._files:
                _to_disk(file)
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

    def discard_unless_journaled(self) -> None:
        """Delete the partial files of a run that an error has ended at once. There is nothing to continue."""
        if not self._journaled:
            self.discard()

    def _complete(self, file: BinaryIO, header: Header) -> Header:
        """Write the other parts behind the tokens, and the header before them."""
        _pad(file)
        for piece in self._mask() if header.masked else ():
            file.write(piece)
        _pad(file)
        file.write(bytes(INT64.itemsize))  # the first document begins at 0
        bounds = _part(self._bounds, 0, INT64)
        for start in range(0, self.now.documents, PIECE):
            file.write(bounds.read(start, min(start + PIECE, self.now.documents)).data)
        file.flush()
        parts = Parts(
            _part(file, HEADER_BYTES, DTYPES[header.dtype]),
            _part(file, header.mask_at, np.dtype(np.uint8)) if header.masked else None,
            _part(file, header.bounds_at, INT64),
        )
        blocks, labels = index_blocks(quoted(self._out), parts, header.tokens, header.documents, header.vocab)
        file.write(blocks.tobytes())
        header = replace(header, labels=labels, blocks_sha256=blocks_sha256(blocks))
        file.seek(0)
        file.write(pack_header(header))
        _to_disk(file)
        assert os.fstat(file.fileno()).st_size == header.file_bytes
        return header

    def _mask(self) -> Iterator[bytes]:
        """Yield the bytes of the mask. The ranges of ignored tokens rise and do not overlap."""
        ignored, total = _part(self._ignored, 0, INT64), self.now.ignored
        done = 0  # ranges that end before this piece
        for start in range(0, self.now.tokens, PIECE):
            size = min(PIECE, self.now.tokens - start)
            ranges = ignored.read(2 * done, 2 * min(done + size, total)).reshape(-1, 2) - start
            first, last = ranges[ranges[:, 0] < size].clip(0, size).T
            steps = np.zeros(size + 1, np.int8)
            steps[first] += 1
            steps[last] -= 1
            yield np.packbits(np.cumsum(steps[:-1], dtype=np.int8) == 0, bitorder="little").tobytes()
            done += int((ranges[:, 1] <= size).sum())

    def _narrowed(self, dtype: np.dtype) -> BinaryIO:
        copy = self._copy_at.open("w+b")
        copy.write(bytes(HEADER_BYTES))
        wide = _part(self._tokens, HEADER_BYTES, self._width)
        for start in range(0, self.now.tokens, PIECE):
            copy.write(wide.read(start, min(start + PIECE, self.now.tokens)).astype(dtype).data)
        return copy

    def _read_journal(self) -> Journal | None:
        try:
            content = json.loads(self._journal_at.read_bytes())
            first_bad = tuple(content.pop("first_bad", ()))
            return Journal(place=Place(**content.pop("place")), first_bad=first_bad, **content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return Journal("unreadable", VERSION)

    def _covers(self, journal: Journal) -> bool:
        """Return whether the files hold as much as the journal says."""
        sizes = (os.fstat(file.fileno()).st_size for file in self._files)
        return all(size >= wanted for size, wanted in zip(sizes, self._lengths(journal), strict=True))

    def _lengths(self, journal: Journal) -> tuple[int, int, int]:
        """Return the bytes of each file that a journal vouches for."""
        tokens = HEADER_BYTES + journal.tokens * self._width.itemsize
        return tokens, journal.documents * INT64.itemsize, journal.ignored * 2 * INT64.itemsize

    def _cut(self) -> None:
        """Cut off what lies beyond the journal, and continue to write there."""
        with self._writing():
            for file, length in zip(self._files, self._lengths(self.now), strict=True):
                file.truncate(length)
                file.seek(0, os.SEEK_END)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise DataError(f"'{self._out}' is being written by another process: wait, or name another --out") from None
        except OSError as problem:
            kind = RunError if is_full(problem) else DataError
            raise kind(
                f"'{self._tokens_at}' cannot be written ({reason(problem, self._out.parent)}): fix that and run the "
                "same command again, which continues where it stopped"
            ) from None


def _pad(file: BinaryIO) -> None:
    file.write(bytes(padded(file.tell()) - file.tell()))


def _part(file: BinaryIO, offset: int, dtype: np.dtype) -> Part:
    return Part("the partial file", from_file(file), offset, dtype)


def _open(path: Path) -> BinaryIO:
    """Open a file for writing without truncating it, and lock it against other processes."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=1 << 20)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
