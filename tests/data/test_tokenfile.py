"""The token file: what is written is read, and damage of every kind is one sentence."""

import dataclasses
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from ithaca.base.errors import DataError
from ithaca.data.inputs import standard_library
from ithaca.data.prepare import prepare
from ithaca.data.tokenfile import HEADER_BYTES, MAGIC, open_tokens, smallest_dtype


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [{"prompt": "abc", "completion": "de"}, {"text": "fgh"}]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    prepare([source], tmp_path / "a.tokens")
    return tmp_path / "a.tokens"


def test_format(file: Path) -> None:
    raw = file.read_bytes()
    magic, version, length, crc32 = struct.unpack_from("<8sIII", raw)
    header = raw[20 : 20 + length]
    assert (magic, version, crc32) == (MAGIC, 1, zlib.crc32(header))
    assert set(raw[20 + length : HEADER_BYTES]) == {0}
    assert json.loads(header) == {
        "dtype": "uint8",
        "tokens": 8,
        "documents": 2,
        "vocab": 256,
        "tokenizer": "bytes",
        "learned_from": True,
        "bounds_crc32": zlib.crc32(raw[HEADER_BYTES + 8 :]),
    }
    assert raw[HEADER_BYTES : HEADER_BYTES + 8] == b"abcdefgh"
    assert struct.unpack("<3q2q", raw[HEADER_BYTES + 8 :]) == (0, 5, 8, 3, 5)


def test_open(file: Path) -> None:
    data = open_tokens(file)
    assert (data.path, data.tokenizer, data.vocab, data.documents) == (file, "bytes", 256, 2)
    assert data.tokens.tobytes() == b"abcdefgh"
    assert data.bounds.tolist() == [0, 5, 8]
    assert data.learned_from is not None
    assert data.learned_from.tolist() == [3, 5]
    assert not data.tokens.flags.writeable


def test_bounds_are_aligned_behind_odd_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    assert data.bounds.flags.aligned
    assert data.bounds.tolist() == [0, 3]
    assert data.learned_from is None


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (2**32, "uint32")],
)
def test_smallest_dtype(vocab: int, dtype: str) -> None:
    assert smallest_dtype(vocab) == dtype


def _with_header(raw: bytes, **changes: object) -> bytes:
    """The file with other values in its header and a checksum that agrees."""
    length = struct.unpack_from("<I", raw, 12)[0]
    header = json.dumps(json.loads(raw[20 : 20 + length]) | changes).encode()
    fixed = struct.pack("<8sIII", MAGIC, 1, len(header), zlib.crc32(header))
    return (fixed + header).ljust(HEADER_BYTES, b"\0") + raw[HEADER_BYTES:]


def _with_bounds(raw: bytes, *bounds: int) -> bytes:
    """The file with other bounds and a checksum that agrees."""
    packed = struct.pack(f"<{len(bounds)}q", *bounds)
    return _with_header(raw[: HEADER_BYTES + 8] + packed, bounds_crc32=zlib.crc32(packed))


DAMAGE = {
    "truncated": (lambda raw: raw[:-1], "has 4143 bytes where its header promises 4144"),
    "longer": (lambda raw: raw + b"\0", "has 4145 bytes where its header promises 4144"),
    "truncated header": (lambda raw: raw[:100], "ends after 100 of the header's 4096 bytes"),
    "empty": (lambda _: b"", "is not a token file: make one"),
    "another kind": (lambda raw: b"PK" + raw[2:], "is not a token file: make one"),
    "unfinished": (lambda raw: bytes(HEADER_BYTES) + raw[HEADER_BYTES:], "is not a token file"),
    "newer": (lambda raw: raw[:8] + struct.pack("<I", 2) + raw[12:], "is of version 2, and this Ithaca reads up to 1"),
    "header": (lambda raw: raw.replace(b'"vocab": 256', b'"vocab": 257'), "has a damaged header"),
    "field": (lambda raw: _with_header(raw, more=1), "has a damaged header"),
    "dtype": (lambda raw: _with_header(raw, dtype="object"), "has a damaged header"),
    "type": (lambda raw: _with_header(raw, tokens="8"), "has a damaged header"),
    "negative": (lambda raw: _with_header(raw, documents=-1), "has a damaged header"),
    "bounds": (lambda raw: raw[:-8] + bytes(8), "has damaged document bounds"),
    "falling": (lambda raw: _with_bounds(raw, 0, 9, 8, 3, 8), "has damaged document bounds"),
    "empty document": (lambda raw: _with_bounds(raw, 0, 8, 8, 3, 8), "has damaged document bounds"),
    "not from 0": (lambda raw: _with_bounds(raw, 1, 5, 8, 3, 5), "has damaged document bounds"),
    "beyond the end": (lambda raw: _with_bounds(raw, 0, 5, 9, 3, 5), "has damaged document bounds"),
    "learned before": (lambda raw: _with_bounds(raw, 0, 5, 8, 3, 4), "has damaged document bounds"),
    "learned behind": (lambda raw: _with_bounds(raw, 0, 5, 8, 6, 5), "has damaged document bounds"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(file: Path, kind: str) -> None:
    damage, sentence = DAMAGE[kind]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=sentence) as error:
        open_tokens(file)
    assert "\n" not in str(error.value)


def test_agreeing_changes_open(file: Path) -> None:
    # What DAMAGE changes with a new checksum is refused for its content, not for the checksum
    file.write_bytes(_with_bounds(file.read_bytes(), 0, 4, 8, 0, 8))
    assert open_tokens(file).bounds.tolist() == [0, 4, 8]


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read as a token file \(No such file"):
        open_tokens(tmp_path / "none")
    with pytest.raises(DataError, match=r"cannot be read as a token file \(Is a directory"):
        open_tokens(tmp_path)


def test_standard_library() -> None:
    data = standard_library()
    assert (data.path, data.vocab, data.tokenizer, data.learned_from) == (None, 256, "bytes", None)
    assert data.bounds[0] == 0
    assert data.bounds[-1] == len(data.tokens) > 5_000_000
    assert (np.diff(data.bounds) > 0).all()
    dataclass_source = Path(dataclasses.__file__).read_bytes()
    place = data.tokens.tobytes().find(dataclass_source)
    assert {place, place + len(dataclass_source)} <= set(data.bounds.tolist())


@pytest.mark.parametrize(
    ("found", "wrong"),
    [((0, 5, 8), (0, 4, 8)), ((0, 5, 8), (0, 6, 8)), ((3, 5), (2, 5)), ((3, 5), (3, 6))],
    ids=["a shorter document", "a longer document", "a shorter prompt", "a part of a document not learned"],
)
def test_bounds_that_are_in_order_but_not_those_of_the_file(
    file: Path, found: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    """Other documents and other labels with the same tokens: only the checksum tells."""
    raw = file.read_bytes()
    old, new = (struct.pack(f"<{len(numbers)}q", *numbers) for numbers in (found, wrong))
    assert raw.count(old) == 1
    file.write_bytes(raw.replace(old, new))
    with pytest.raises(DataError, match="damaged document bounds"):
        open_tokens(file)
