"""Read a token file: every block that is read is compared with its checksum, every time.

Opening reads the header and 16 bytes for each block of 65,536 tokens. After that, memory and time depend only on what
is read: a window of tokens costs the blocks that it touches, hashed at about 1 GB/s. Because blocks are checked on
every read, a file that changes under a run is noticed before the changed tokens are learned.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError, RunError
from ithaca.data import version1
from ithaca.data.tokenfile import (
    BLOCK,
    BLOCKS,
    DTYPES,
    HEADER_BYTES,
    INT64,
    Header,
    Part,
    Parts,
    blocks_sha256,
    check_size,
    checksum,
    from_bytes,
    from_file,
    index_blocks,
    pack_header,
    padded,
    quoted,
    read_fields,
    read_version,
    rising,
    smallest_dtype,
    unpack_mask,
)


@dataclass(frozen=True)
class Window:
    """Some consecutive tokens."""

    tokens: np.ndarray  # unsigned
    learned: np.ndarray | None  # bool; None: all are
    documents: np.ndarray  # int64: the number of each token's document in the file


class TokenFile:
    """Documents as one stream of tokens. `path` is None if they exist in memory only; they may have a name then."""

    name: str | None = None
    divisible = False  # whether any part of a document is a document of the same kind

    def __init__(self, path: Path | None, header: Header, parts: Parts, blocks: np.ndarray):
        self.path, self.header = path, header
        self._parts, self._checksums = parts, blocks["checksum"]
        self._before = np.append(blocks["documents"], header.documents)  # documents that begin before each block
        counts = np.diff(self._before)
        begun = self._before[0] == 0 and counts[0] >= 1
        if not begun or counts.min() < 0 or counts.max() > BLOCK or blocks_sha256(blocks) != header.blocks_sha256:
            raise DataError(f"{quoted(path)} has damaged checksums: copy it again, or prepare it again")

    @property
    def tokens(self) -> int:
        return self.header.tokens

    @property
    def documents(self) -> int:
        return self.header.documents

    @property
    def tokenizer(self) -> str:
        return self.header.tokenizer

    @property
    def vocab(self) -> int:
        return self.header.vocab

    def identity(self) -> dict[str, Any]:
        """Return what tells these data from any other: counts, tokenizer, and a digest of tokens, bounds and mask."""
        head = self.header
        return {
            "tokens": head.tokens,
            "documents": head.documents,
            "vocab": head.vocab,
            "tokenizer": head.tokenizer,
            "masked": head.masked,
            "sha256": head.blocks_sha256,
        }

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` to before `stop`, after their blocks have been checked."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        low, high = first * BLOCK, min(last * BLOCK, self.tokens)
        tokens = self._parts.tokens.read(low, high)
        mask = self._parts.mask.read(low // 8, -(-high // 8)) if self._parts.mask else None
        begins = self._parts.bounds.read(int(self._before[first]), int(self._before[last]))
        self._check(first, last, tokens, begins, mask)
        steps = np.zeros(high - low, np.int64)
        steps[begins - low] = 1
        documents = np.cumsum(steps)[start - low : stop - low] + self._before[first] - 1
        learned = None if mask is None else unpack_mask(mask, high - low)[start - low : stop - low]
        return Window(tokens[start - low : stop - low], learned, documents)

    def bounds(self) -> np.ndarray:
        """Return the offsets of all documents, int64 [documents + 1]. They are not compared with the checksums."""
        bounds = self._parts.bounds.read(0, self.documents + 1)
        if bounds[0] != 0 or bounds[-1] != self.tokens or not rising(bounds, 0):
            raise DataError(f"{quoted(self.path)} has damaged document bounds: prepare it again with `ithaca data`")
        return bounds

    def _check(self, first: int, last: int, tokens: np.ndarray, begins: np.ndarray, mask: np.ndarray | None) -> None:
        """Compare the blocks from `first` to before `last`, which all arrays cover, with their checksums."""
        offset = self._before[first]
        for block in range(first, last):
            low, stop = (block - first) * BLOCK, min((block + 1) * BLOCK, self.tokens)
            own = begins[self._before[block] - offset : self._before[block + 1] - offset]
            bits = None if mask is None else mask[low // 8 : (low + BLOCK) // 8]
            inside = rising(own, block * BLOCK) and (len(own) == 0 or own[-1] < stop)
            if not inside or checksum(tokens[low : low + BLOCK], own, bits) != self._checksums[block]:
                raise RunError(
                    f"{quoted(self.path)} has changed since it was prepared: its tokens {block * BLOCK} to {stop - 1}, "
                    f"their document bounds or their mask do not match their checksum; {self._advice()}"
                )

    def _advice(self) -> str:
        if self.path is None or not isinstance(self.header, version1.IndexHeader):
            return "copy the file again"
        return f"copy the file again or, if it was replaced on purpose, remove {self.path.name}.index, its checksums"


def open_tokens(path: Path, indexes: Path | None = None) -> TokenFile:
    """Open a token file and check its header and its table of checksums.

    A file of version 1 has no checksums: version1.py computes them once and keeps them beside the file, or in the
    folder `indexes`.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"'{path}' is a device or a pipe: name a token file")
        file = path.open("rb", buffering=0)
        read = from_file(file)
        name, packed, size = quoted(path), read(HEADER_BYTES, 0), os.fstat(file.fileno()).st_size
    except OSError as problem:
        raise DataError(f"'{path}' cannot be read as a token file ({problem.strerror})") from None
    if read_version(name, packed) == 1:
        old = read_fields(name, packed, version1.Header)
        check_size(name, size, old.file_bytes)
        header, parts, blocks = version1.read_with_index(path, read, old, indexes)
        return TokenFile(path, header, parts, blocks)
    header = read_fields(name, packed, Header)
    check_size(name, size, header.file_bytes)
    mask = Part(name, read, header.mask_at, np.dtype(np.uint8)) if header.masked else None
    tokens = Part(name, read, HEADER_BYTES, DTYPES[header.dtype])
    blocks = Part(name, read, header.blocks_at, BLOCKS).read(0, header.blocks)
    return TokenFile(path, header, Parts(tokens, mask, Part(name, read, header.bounds_at, INT64)), blocks)


def in_memory(
    tokens: np.ndarray,
    bounds: np.ndarray,
    learned: np.ndarray | None = None,
    tokenizer: str = "unknown",
    vocab: int | None = None,
    name: str | None = None,
    divisible: bool = False,
) -> TokenFile:
    """Return documents in memory as a TokenFile. `learned`: bool for each token; None: all are learned.

    `divisible`: any part of a document is a document of the same kind.
    """
    header, arrays, blocks = _described(tokens, bounds, learned, tokenizer, vocab)
    data = TokenFile(None, header, _in_parts(arrays), blocks)
    data.name, data.divisible = name, divisible
    return data


def save_tokens(path: Path, tokens: np.ndarray, bounds: np.ndarray, learned: np.ndarray | None, vocab: int) -> None:
    """Write documents in memory as a token file; `learned` as for `in_memory`."""
    header, arrays, blocks = _described(tokens, bounds, learned, "unknown", vocab)
    with path.open("wb") as file:
        file.write(pack_header(header))
        for part in (array.tobytes() for array in (*arrays, blocks) if array is not None):
            file.write(part.ljust(padded(len(part)), b"\0"))
    assert path.stat().st_size == header.file_bytes


Arrays = tuple[np.ndarray, np.ndarray | None, np.ndarray]  # tokens, packed mask, bounds


def _described(
    tokens: np.ndarray, bounds: np.ndarray, learned: np.ndarray | None, tokenizer: str, vocab: int | None
) -> tuple[Header, Arrays, np.ndarray]:
    """Return the header, the arrays and the blocks of a token file."""
    vocab = vocab or int(tokens.max()) + 1
    dtype = DTYPES[smallest_dtype(vocab)]
    mask = None if learned is None else np.packbits(learned, bitorder="little")
    arrays = (tokens.astype(dtype), mask, bounds.astype(INT64))
    header = Header(dtype.name, len(tokens), len(bounds) - 1, vocab, tokenizer, mask is not None, 0, "")
    parts = _in_parts(arrays)
    blocks, labels = index_blocks("the data", parts, header.tokens, header.documents, header.vocab)
    return replace(header, labels=labels, blocks_sha256=blocks_sha256(blocks)), arrays, blocks


def _in_parts(arrays: Arrays) -> Parts:
    held, bits, offsets = (None if array is None else _part(array) for array in arrays)
    return Parts(held, bits, offsets)  # pyrefly: ignore


def _part(array: np.ndarray) -> Part:
    return Part("the data", from_bytes(array.tobytes()), 0, array.dtype)
