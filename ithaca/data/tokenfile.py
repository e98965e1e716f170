"""The format of a token file, version 2: all documents end to end, which tokens are learned, and checksums.

    4096 bytes   header: magic, version, length and crc32 of a JSON object, the object, zeros
    tokens       uint8, uint16 or uint32, the smallest that the vocabulary allows
    mask         only if some tokens are not learned: one bit a token, lowest bit first; a set bit is learned
    bounds       int64 [documents + 1]: offsets of the documents, 0 and the number of tokens included
    blocks       for each block of 65,536 tokens: int64, the documents that begin before it; 8 bytes of SHA-256

Each part is padded with zeros to a multiple of 8 bytes. All numbers are little-endian. The checksum of a block covers
its tokens, the offsets of the documents that begin in it, and its part of the mask. The header has a digest of all
blocks, which identifies every token, bound and label. reader.py reads the file; preparation/partial.py writes it.
"""

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from ithaca.base.errors import DataError, RunError

MAGIC = b"\x89ithaca\n"  # neither text nor any other format
VERSION = 2
HEADER_BYTES = 4096
BLOCK = 1 << 16  # tokens that one checksum covers; a multiple of 8, so that a block's mask is whole bytes
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32")}
INT64 = np.dtype("<i8")
BLOCKS = np.dtype([("documents", "<i8"), ("checksum", "<u8")])

_FIXED = struct.Struct("<8sIII")  # magic, version, length of the JSON, its crc32

Fields = TypeVar("Fields")
Read = Callable[[int, int], bytes]  # (size, offset) -> bytes, fewer at the end of the file


@dataclass(frozen=True)
class Header:
    """The JSON object in the header."""

    dtype: str
    tokens: int
    documents: int
    vocab: int
    tokenizer: str  # 'bytes', 'sha256:<of tokenizer.json>', or 'unknown' for ready tokens
    masked: bool  # whether there is a mask
    labels: int  # learned tokens that another one of the same document precedes
    blocks_sha256: str

    @property
    def mask_at(self) -> int:
        return HEADER_BYTES + padded(self.tokens * DTYPES[self.dtype].itemsize)

    @property
    def bounds_at(self) -> int:
        return self.mask_at + padded(-(-self.tokens // 8)) * self.masked

    @property
    def blocks_at(self) -> int:
        return self.bounds_at + (self.documents + 1) * INT64.itemsize

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK)

    @property
    def file_bytes(self) -> int:
        return self.blocks_at + self.blocks * BLOCKS.itemsize


def padded(count: int) -> int:
    """Return a number of bytes rounded up to a multiple of 8."""
    return count + -count % INT64.itemsize


def smallest_dtype(vocab: int) -> str:
    """Return 'uint8' for a vocabulary of at most 256, else 'uint16' or 'uint32'."""
    return next(name for name, dtype in DTYPES.items() if vocab <= 1 << 8 * dtype.itemsize)


def pack_header(header: Header, magic: bytes = MAGIC) -> bytes:
    content = json.dumps(asdict(header), sort_keys=True).encode()
    packed = _FIXED.pack(magic, VERSION, len(content), zlib.crc32(content)) + content
    assert len(packed) <= HEADER_BYTES
    return packed.ljust(HEADER_BYTES, b"\0")


def read_version(name: str, packed: bytes) -> int:
    """Return the version of a file whose first `HEADER_BYTES` bytes are given. `name` is used in errors."""
    if packed[: len(MAGIC)] != MAGIC:
        raise DataError(f"{name} is not a token file: make one with `ithaca data {name} --out FILE`")
    if len(packed) < HEADER_BYTES:
        raise DataError(f"{name} ends after {len(packed)} of the header's {HEADER_BYTES} bytes: copy it again")
    version = _FIXED.unpack_from(packed)[1]
    if not 1 <= version <= VERSION:
        raise DataError(f"{name} is of version {version}, and this Ithaca reads 1 to {VERSION}: install a newer one")
    return version


def read_fields(name: str, packed: bytes, kind: type[Fields]) -> Fields:
    """Return the header's JSON as a dataclass. Every field must be there and have its type."""
    _, _, length, crc32 = _FIXED.unpack_from(packed)
    content = packed[_FIXED.size : _FIXED.size + length]
    try:
        values = json.loads(content) if zlib.crc32(content) == crc32 else None
    except (ValueError, RecursionError):
        values = None
    wanted = {field.name: field.type for field in fields(kind)}  # pyrefly: ignore
    typed = isinstance(values, dict) and {key: type(value) for key, value in values.items()} == wanted
    if not typed or not _plausible(values):
        raise DataError(f"{name} has a damaged header: copy it again, or prepare it again with `ithaca data`")
    return kind(**values)


def _plausible(values: dict) -> bool:
    """Return whether the fields that all versions share have values that a writer could have given them."""
    counts = values["tokens"] >= values["documents"] >= 1 and 0 <= values.get("labels", 0) <= values["tokens"]
    ids = 1 <= values["vocab"] <= 1 << 32 and values["dtype"] == smallest_dtype(values["vocab"])
    return counts and ids


def check_size(name: str, size: int, wanted: int) -> None:
    if size != wanted:
        raise DataError(
            f"{name} has {size} bytes where its header promises {wanted}: "
            "copy it again, or prepare it again with `ithaca data`"
        )


def from_file(file: BinaryIO) -> Read:
    return lambda size, offset: os.pread(file.fileno(), size, offset)


def from_bytes(content: bytes) -> Read:
    return lambda size, offset: content[offset : offset + size]


class Part:
    """Numbers of one dtype in a file, from a byte offset on.

    They are read, not mapped into memory: if the file shrinks, this raises an error. A mapping would end the process
    with SIGBUS.
    """

    def __init__(self, name: str, read: Read, offset: int, dtype: np.dtype):
        self._name, self._read, self._offset, self.dtype = name, read, offset, dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers from `start` to before `stop`."""
        at, size = self._offset + start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        try:
            found = self._read(size, at)
            while 0 < len(found) < size and (more := self._read(size - len(found), at + len(found))):
                found += more  # the system may return less than it was asked for
        except OSError as problem:
            raise RunError(f"{self._name} cannot be read any more ({problem.strerror})") from None
        if len(found) < size:
            raise RunError(
                f"{self._name} ends at byte {at + len(found)} where byte {at + size} was reached before: "
                "it has shrunk while it was in use; copy it again"
            )
        return np.frombuffer(found, self.dtype)


class Stored:
    """A range of the numbers of a Part, read when they are sliced."""

    def __init__(self, part: Part, start: int, stop: int):
        self._part, self._start, self._stop = part, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, numbers: slice) -> np.ndarray:
        start, stop, _ = numbers.indices(len(self))
        return self._part.read(self._start + start, self._start + max(start, stop))


@dataclass(frozen=True)
class Parts:
    """The parts of a token file that blocks are made of."""

    tokens: Part
    mask: Part | None  # uint8, 8 tokens each
    bounds: Part


def checksum(tokens: np.ndarray, starts: np.ndarray, mask: np.ndarray | None) -> int:
    """Return the checksum of a block. `starts`: the offsets of the documents that begin in it."""
    digest = hashlib.sha256(tokens.data)
    digest.update(starts.data)
    if mask is not None:
        digest.update(mask.data)
    return int.from_bytes(digest.digest()[:8], "little")


def blocks_sha256(blocks: np.ndarray) -> str:
    return hashlib.sha256(blocks.tobytes()).hexdigest()


def index_blocks(name: str, parts: Parts, tokens: int, documents: int, vocab: int) -> tuple[np.ndarray, int]:
    """Return the blocks of a file and its number of labels. Reads everything once.

    Raises an error unless the bounds rise from 0 to the number of tokens, and all ids are below `vocab`.
    """
    blocks = np.empty(-(-tokens // BLOCK), BLOCKS)
    first, labels, sound = 0, tokens - documents, True
    for number in range(len(blocks)):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, tokens)
        begins = parts.bounds.read(first, min(first + stop - start, documents))
        begins = begins[: np.searchsorted(begins, stop)]
        sound = sound and rising(begins, start) and (first > 0 or (len(begins) > 0 and begins[0] == 0))
        mask = parts.mask.read(start // 8, -(-stop // 8)) if parts.mask else None
        if sound and mask is not None:
            ignored = ~unpack_mask(mask, stop - start)
            labels -= int(ignored.sum() - ignored[begins - start].sum())
        ids = parts.tokens.read(start, stop)
        if int(ids.max()) >= vocab:
            raise DataError(f"{name} has token id {ids.max()}, but its header says that ids are below {vocab}")
        blocks[number] = first, checksum(ids, begins, mask)
        first += len(begins)
    if not sound or first != documents or parts.bounds.read(documents, documents + 1)[0] != tokens:
        raise DataError(f"{name} has damaged document bounds: prepare it again with `ithaca data`")
    return blocks, labels


def rising(starts: np.ndarray, least: int) -> bool:
    """Return whether the offsets rise, from `least` or above it."""
    return len(starts) == 0 or bool(starts[0] >= least and (starts[1:] > starts[:-1]).all())


def unpack_mask(mask: np.ndarray, tokens: int) -> np.ndarray:
    """Return one bool a token from a mask's bytes."""
    return np.unpackbits(mask, count=tokens, bitorder="little").view(bool)


def quoted(path: Path | None) -> str:
    return f"'{path}'" if path else "the data"
