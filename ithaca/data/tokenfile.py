"""The token file: the tokens of all documents end to end, and the offset of each document.

    4096 bytes   header: magic, version, length and crc32 of a JSON object, the object, zeros
    tokens       uint8, uint16 or uint32, the smallest that the vocabulary allows; zeros up to a multiple of 8 bytes
    bounds       int64 [documents + 1]: offsets of the documents, 0 and the number of tokens included
    learned_from int64 [documents], only if there are prompts: the offset from which labels count

All numbers are little-endian. Opening a file maps it into memory and checks the header and the bounds, 8 or 16 bytes a
document. Tokens are read on use, and all processes of a machine share the mapping.
"""

import contextlib
import json
import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ithaca.base.errors import DataError

MAGIC = b"\x89ithaca\n"  # neither text nor any other format
VERSION = 1
HEADER_BYTES = 4096
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "uint32")}
INT64 = np.dtype("<i8")

_FIXED = struct.Struct("<8sIII")  # magic, version, length of the JSON, its crc32


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Documents as one stream of tokens. `path` is None if they exist in memory only."""

    path: Path | None
    tokens: np.ndarray  # [tokens], unsigned
    bounds: np.ndarray  # int64 [documents + 1], rising
    learned_from: np.ndarray | None  # int64 [documents], within each document's bounds
    tokenizer: str  # 'bytes', 'sha256:<of tokenizer.json>', or 'unknown' for ready tokens
    vocab: int  # ids are below it

    @property
    def documents(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class Header:
    """The JSON object in the header."""

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


def padded(count: int) -> int:
    """Return a number of bytes rounded up to a multiple of 8, which aligns the int64 behind them."""
    return count + -count % INT64.itemsize


def smallest_dtype(vocab: int) -> str:
    """Return 'uint8' for a vocabulary of at most 256, else 'uint16' or 'uint32'."""
    return next(name for name, dtype in DTYPES.items() if vocab <= 1 << 8 * dtype.itemsize)


def pack_header(header: Header) -> bytes:
    content = json.dumps(asdict(header), sort_keys=True).encode()
    packed = _FIXED.pack(MAGIC, VERSION, len(content), zlib.crc32(content)) + content
    assert len(packed) <= HEADER_BYTES
    return packed.ljust(HEADER_BYTES, b"\0")


def open_tokens(path: Path) -> TokenFile:
    """Map a token file into memory, and check its header and bounds."""
    header, raw = _read(path)
    bounds = raw[header.bounds_at : header.learned_at].view(INT64)
    learned_from = raw[header.learned_at :].view(INT64) if header.learned_from else None
    if zlib.crc32(raw[header.bounds_at :].data) != header.bounds_crc32 or not _in_order(header, bounds, learned_from):
        raise DataError(f"'{path}' has damaged document bounds: prepare it again with `ithaca data`")
    dtype = DTYPES[header.dtype]
    tokens = raw[HEADER_BYTES : HEADER_BYTES + header.tokens * dtype.itemsize].view(dtype)
    return TokenFile(path, tokens, bounds, learned_from, header.tokenizer, header.vocab)


def _read(path: Path) -> tuple[Header, np.ndarray]:
    """Return the header and all bytes of the file. Their number must be what the header says."""
    try:
        with path.open("rb") as file:
            header = _unpack_header(path, file.read(HEADER_BYTES))
        size = path.stat().st_size
        if size != header.file_bytes:
            raise DataError(
                f"'{path}' has {size} bytes where its header promises {header.file_bytes}: "
                "copy it again, or prepare it again with `ithaca data`"
            )
        return header, np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as problem:
        raise DataError(f"'{path}' cannot be read as a token file ({problem.strerror})") from None


def _unpack_header(path: Path, packed: bytes) -> Header:
    if packed[: len(MAGIC)] != MAGIC:
        raise DataError(f"'{path}' is not a token file: make one with `ithaca data '{path}' --out FILE`")
    if len(packed) < HEADER_BYTES:
        raise DataError(f"'{path}' ends after {len(packed)} of the header's {HEADER_BYTES} bytes: copy it again")
    _, version, length, crc32 = _FIXED.unpack_from(packed)
    if version > VERSION:
        raise DataError(f"'{path}' is of version {version}, and this Ithaca reads up to {VERSION}: install a newer one")
    content = packed[_FIXED.size : _FIXED.size + length]
    if zlib.crc32(content) == crc32:
        with contextlib.suppress(TypeError, ValueError):
            header = Header(**json.loads(content))
            if header.dtype in DTYPES and header.tokens >= header.documents >= 1:
                return header
    raise DataError(f"'{path}' has a damaged header: copy it again, or prepare it again with `ithaca data`")


def _in_order(header: Header, bounds: np.ndarray, learned_from: np.ndarray | None) -> bool:
    whole = bounds[0] == 0 and bounds[-1] == header.tokens and bool((bounds[1:] > bounds[:-1]).all())
    if learned_from is None:
        return whole
    return whole and bool(((bounds[:-1] <= learned_from) & (learned_from <= bounds[1:])).all())
