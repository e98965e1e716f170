"""Write token files of version 1, which Ithaca no longer writes but still reads."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

HEADER_BYTES = 4096


def write_version1(
    file: Path,
    tokens: bytes,
    bounds: Sequence[int],
    learned_from: Sequence[int] | None = None,
    dtype: str = "uint8",
    changes: Mapping[str, object] | None = None,
) -> None:
    """Write a file of version 1. `changes` are other values for its header, whose checksum agrees with them."""
    numbers = np.array([*bounds, *(learned_from or ())], "<i8").tobytes()
    content = {
        "dtype": dtype,
        "tokens": len(tokens) // np.dtype(dtype).itemsize,
        "documents": len(bounds) - 1,
        "vocab": 256 if dtype == "uint8" else 65536,
        "tokenizer": "bytes",
        "learned_from": learned_from is not None,
        "bounds_crc32": zlib.crc32(numbers),
    }
    packed = json.dumps(content | dict(changes or {}), sort_keys=True).encode()
    header = struct.pack("<8sIII", b"\x89ithaca\n", 1, len(packed), zlib.crc32(packed)) + packed
    file.write_bytes(header.ljust(HEADER_BYTES, b"\0") + tokens + bytes(-len(tokens) % 8) + numbers)
