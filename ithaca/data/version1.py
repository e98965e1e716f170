"""Token files of version 1, which have no checksums and mark prompts by one offset a document.

    4096 bytes   header
    tokens       as in version 2
    bounds       int64 [documents + 1]
    learned_from int64 [documents], only if there are prompts: the offset from which labels count

On first use, what version 2 has in addition (mask and blocks) is computed once and kept as FILE.index: beside the file
or, if that folder cannot be written, in a folder that the caller names. Everything after that is as with version 2.
"""

import contextlib
import os
import secrets
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ithaca.base.errors import DataError, RunError
from ithaca.base.sizes import format_bytes
from ithaca.data import tokenfile
from ithaca.data.tokenfile import BLOCK, BLOCKS, DTYPES, HEADER_BYTES, INT64, Part, Parts, Read, padded, quoted

INDEX_MAGIC = b"\x89ithacx\n"
_PIECE = 1 << 20  # numbers read at a time


@dataclass(frozen=True)
class Header:
    """The JSON object in the header of version 1."""

    dtype: str
    tokens: int
    documents: int
    vocab: int
    tokenizer: str
    learned_from: bool
    bounds_crc32: int  # of bounds and learned_from

    @property
    def bounds_at(self) -> int:
        return HEADER_BYTES + padded(self.tokens * DTYPES[self.dtype].itemsize)

    @property
    def learned_at(self) -> int:
        return self.bounds_at + (self.documents + 1) * INT64.itemsize

    @property
    def file_bytes(self) -> int:
        return self.learned_at + self.documents * INT64.itemsize * self.learned_from


@dataclass(frozen=True)
class IndexHeader(tokenfile.Header):
    """The header of an index: that of version 2, and the checksum that says which file it belongs to."""

    bounds_crc32: int

    @property
    def index_bytes(self) -> int:
        return HEADER_BYTES + self.bounds_at - self.mask_at + self.blocks * BLOCKS.itemsize


Opened = tuple[tokenfile.Header, Parts, np.ndarray]


def read_with_index(path: Path, read: Read, old: Header, folder: Path | None) -> Opened:
    """Return header, parts and blocks of a file, with those of its index; make the index if there is none."""
    places = [path.with_name(f"{path.name}.index"), *([folder / f"{path.name}.index"] if folder else [])]
    for place in places:
        if found := _read_index(place, path, read, old):
            return found
    _tell(f"'{path}' is of version 1, without checksums: computing them once ({format_bytes(old.file_bytes)})")
    content = _make_index(path, read, old)
    kept = next((place for place in places if _keep(content, place)), None)
    _tell(f"Checksums: {kept}" if kept else f"The checksums cannot be written to '{places[-1]}': kept in memory only")
    return _opened(content[:HEADER_BYTES], tokenfile.from_bytes(content), path, read, old)


def is_index(path: Path) -> bool:
    """Return whether a file is an index, or one whose writing was cut short."""
    if ".index" not in path.name or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(INDEX_MAGIC)) in (INDEX_MAGIC, b"")


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _read_index(place: Path, path: Path, read: Read, old: Header) -> Opened | None:
    """Return what an index holds; None if there is none, or if it belongs to another file."""
    try:
        file = place.open("rb", buffering=0)
        packed = file.read(HEADER_BYTES)
        if packed[: len(INDEX_MAGIC)] != INDEX_MAGIC or len(packed) < HEADER_BYTES:
            return None
        header = tokenfile.read_fields(quoted(place), packed, IndexHeader)
        if _describes(header, old) and os.fstat(file.fileno()).st_size == header.index_bytes:
            return _opened(packed, tokenfile.from_file(file), path, read, old)
    except (OSError, DataError, RunError):
        pass  # a damaged index is made again, with a message
    return None


def _describes(index: IndexHeader, old: Header) -> bool:
    shared = asdict(index).items() & asdict(old).items()
    return {name for name, _ in shared} == {"dtype", "tokens", "documents", "vocab", "tokenizer", "bounds_crc32"}


def _opened(packed: bytes, read_index: Read, path: Path, read: Read, old: Header) -> Opened:
    """Return tokens and bounds from the file, and header, mask and blocks from its index."""
    name = quoted(path)
    index = tokenfile.read_fields(name, packed, IndexHeader)
    mask_bytes = index.bounds_at - index.mask_at
    blocks = Part(name, read_index, HEADER_BYTES + mask_bytes, BLOCKS).read(0, index.blocks)
    mask = Part(name, read_index, HEADER_BYTES, np.dtype(np.uint8)) if index.masked else None
    return index, Parts(Part(name, read, HEADER_BYTES, DTYPES[old.dtype]), mask, _bounds(name, read, old)), blocks


def _bounds(name: str, read: Read, old: Header) -> Part:
    return Part(name, read, old.bounds_at, INT64)


def _make_index(path: Path, read: Read, old: Header) -> bytes:
    """Return the bytes of an index. Reads the whole file once."""
    name = quoted(path)
    _check_bounds(name, read, old)
    bits = b"".join(bits.tobytes() for bits in _mask(name, read, old)) if old.learned_from else b""
    bits = bits.ljust(padded(len(bits)), b"\0")
    mask = Part(name, tokenfile.from_bytes(bits), 0, np.dtype(np.uint8)) if bits else None
    parts = Parts(Part(name, read, HEADER_BYTES, DTYPES[old.dtype]), mask, _bounds(name, read, old))
    blocks, labels = tokenfile.index_blocks(name, parts, old.tokens, old.documents, old.vocab)
    header = IndexHeader(
        old.dtype,
        old.tokens,
        old.documents,
        old.vocab,
        old.tokenizer,
        old.learned_from,
        labels,
        tokenfile.blocks_sha256(blocks),
        old.bounds_crc32,
    )
    return tokenfile.pack_header(header, INDEX_MAGIC) + bits + blocks.tobytes()


def _check_bounds(name: str, read: Read, old: Header) -> None:
    """Raise an error unless bounds and learned_from are those that were written."""
    numbers, crc32 = Part(name, read, old.bounds_at, INT64), 0
    count = old.documents + 1 + old.documents * old.learned_from
    for start in range(0, count, _PIECE):
        crc32 = zlib.crc32(numbers.read(start, min(start + _PIECE, count)).data, crc32)
    if crc32 != old.bounds_crc32:
        raise _damaged(name)


def _mask(name: str, read: Read, old: Header) -> Iterator[np.ndarray]:
    """Yield the mask of each block, made from the offsets from which documents are learned."""
    bounds, learned_from = _bounds(name, read, old), Part(name, read, old.learned_at, INT64)
    first, current = 0, 0  # documents that begin before the block; from where the last of them is learned
    for start in range(0, old.tokens, BLOCK):
        stop = min(start + BLOCK, old.tokens)
        offsets = bounds.read(first, min(first + stop - start, old.documents) + 1)
        begins = offsets[:-1][: np.searchsorted(offsets[:-1], stop)]
        ends = offsets[1 : len(begins) + 1]
        learned = learned_from.read(first, first + len(begins))
        inside = tokenfile.rising(begins, start) and bool(((begins <= learned) & (learned <= ends)).all())
        if not inside or (first == 0 and (len(begins) == 0 or begins[0] != 0)):
            raise _damaged(name)
        lengths = np.diff(np.concatenate(([start], begins, [stop])))
        limits = np.repeat(np.concatenate(([current], learned)), lengths)
        yield np.packbits(np.arange(start, stop) >= limits, bitorder="little")
        first, current = first + len(begins), int(learned[-1]) if len(learned) else current


def _damaged(name: str) -> DataError:
    return DataError(f"{name} has damaged document bounds: prepare it again with `ithaca data`")


def _keep(content: bytes, place: Path) -> bool:
    """Write an index. Return False if the folder cannot be written."""
    fresh = place.with_name(f"{place.name}.{secrets.token_hex(4)}.partial")  # several nodes may write at once
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(place)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        return False
    return True
