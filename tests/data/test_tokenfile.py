"""The token file: what is written is read, every block is checked, and damage of every kind is one sentence."""

import dataclasses
import hashlib
import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.base.errors import DataError, RunError
from ithaca.data import reader, tokenfile
from ithaca.data.preparation.inputs import standard_library
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import in_memory, open_tokens
from ithaca.data.tokenfile import HEADER_BYTES, MAGIC, smallest_dtype


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [{"prompt": "abc", "completion": "de"}, {"text": "fgh"}]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    prepare([source], tmp_path / "a.tokens")
    return tmp_path / "a.tokens"


def _sections(tokens: bytes, mask: int, bounds: list[int]) -> tuple[bytes, str]:
    """The bytes of a file with one block behind its header, and the digest of its blocks, by hand."""
    starts, bits = struct.pack(f"<{len(bounds)}q", *bounds), bytes([mask])
    checksum = hashlib.sha256(tokens + starts[:-8] + bits).digest()[:8]
    blocks = bytes(8) + checksum
    return tokens + bits.ljust(8, b"\0") + starts + blocks, hashlib.sha256(blocks).hexdigest()


def test_format(file: Path) -> None:
    raw = file.read_bytes()
    magic, version, length, crc32 = struct.unpack_from("<8sIII", raw)
    header = raw[20 : 20 + length]
    assert (magic, version, crc32) == (MAGIC, 2, zlib.crc32(header))
    assert set(raw[20 + length : HEADER_BYTES]) == {0}
    behind, digest = _sections(b"abcdefgh", 0b11111000, [0, 5, 8])
    assert json.loads(header) == {
        "dtype": "uint8",
        "tokens": 8,
        "documents": 2,
        "vocab": 256,
        "tokenizer": "bytes",
        "masked": True,
        "labels": 4,  # d, e, g, h: f has no token before it
        "blocks_sha256": digest,
    }
    assert raw[HEADER_BYTES:] == behind


def test_open(file: Path) -> None:
    data = open_tokens(file)
    assert (data.path, data.tokenizer, data.vocab, data.documents, data.tokens) == (file, "bytes", 256, 2, 8)
    window = data.read(1, 7)
    assert window.tokens.tobytes() == b"bcdefg"
    assert window.documents.tolist() == [0, 0, 0, 0, 1, 1]
    assert window.learned is not None
    assert window.learned.tolist() == [False, False, True, True, True, True]
    assert data.bounds().tolist() == [0, 5, 8]


def test_without_prompts_there_is_no_mask(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    prepare([tmp_path / "a.txt"], tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    assert data.read(0, 3).learned is None
    assert data.bounds().tolist() == [0, 3]
    assert data.header.labels == 2
    assert (tmp_path / "out").stat().st_size == HEADER_BYTES + 8 + 16 + 16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.data())
def test_windows_over_many_blocks(lengths: list[int], draw: st.DataObject) -> None:
    """Blocks of 16 tokens: a window reads what stands there, wherever it begins and ends."""
    size = sum(lengths)
    learned = np.array(draw.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenfile, "BLOCK", 16)
        patch.setattr(reader, "BLOCK", 16)
        data = in_memory(np.arange(size) + 1000, np.cumsum([0, *lengths]), learned)
        start = draw.draw(st.integers(0, size - 1))
        stop = draw.draw(st.integers(start + 1, size))
        window = data.read(start, stop)
    assert window.tokens.tolist() == list(range(1000 + start, 1000 + stop))
    assert window.documents.tolist() == np.repeat(np.arange(len(lengths)), lengths)[start:stop].tolist()
    assert window.learned is not None
    assert window.learned.tolist() == learned[start:stop].tolist()
    firsts = np.cumsum([0, *lengths[:-1]])
    assert data.header.labels == learned.sum() - learned[firsts].sum()


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
    fixed = struct.pack("<8sIII", MAGIC, 2, len(header), zlib.crc32(header))
    return (fixed + header).ljust(HEADER_BYTES, b"\0") + raw[HEADER_BYTES:]


def _with_bounds(raw: bytes, *bounds: int) -> bytes:
    """The file with other bounds and checksums that agree."""
    behind, digest = _sections(b"abcdefgh", 0b11111000, list(bounds))
    return _with_header(raw[:HEADER_BYTES] + behind, blocks_sha256=digest)


def _with_blocks(raw: bytes, first: int) -> bytes:
    """The file with another number of documents before its first block, and a digest that agrees."""
    blocks = struct.pack("<q", first) + raw[-8:]
    return _with_header(raw[:-16] + blocks, blocks_sha256=hashlib.sha256(blocks).hexdigest())


DAMAGE = {
    "truncated": (lambda raw: raw[:-1], "has 4151 bytes where its header promises 4152"),
    "longer": (lambda raw: raw + b"\0", "has 4153 bytes where its header promises 4152"),
    "truncated header": (lambda raw: raw[:100], "ends after 100 of the header's 4096 bytes"),
    "empty": (lambda _: b"", "is not a token file: make one"),
    "another kind": (lambda raw: b"PK" + raw[2:], "is not a token file: make one"),
    "unfinished": (lambda raw: bytes(HEADER_BYTES) + raw[HEADER_BYTES:], "is not a token file"),
    "newer": (lambda raw: raw[:8] + struct.pack("<I", 3) + raw[12:], "is of version 3, and this Ithaca reads 1 to 2"),
    "older": (lambda raw: raw[:8] + struct.pack("<I", 0) + raw[12:], "is of version 0, and this Ithaca reads 1 to 2"),
    "header": (lambda raw: raw.replace(b'"vocab": 256', b'"vocab": 255'), "has a damaged header"),
    "field": (lambda raw: _with_header(raw, more=1), "has a damaged header"),
    "dtype": (lambda raw: _with_header(raw, dtype="object"), "has a damaged header"),
    "unhashable dtype": (lambda raw: _with_header(raw, dtype=["uint8"]), "has a damaged header"),
    "larger dtype": (lambda raw: _with_header(raw, dtype="uint16"), "has a damaged header"),
    "type": (lambda raw: _with_header(raw, tokens="8"), "has a damaged header"),
    "float": (lambda raw: _with_header(raw, tokens=8.0), "has a damaged header"),
    "bool for int": (lambda raw: _with_header(raw, documents=True), "has a damaged header"),
    "int for bool": (lambda raw: _with_header(raw, masked=1), "has a damaged header"),
    "null": (lambda raw: _with_header(raw, tokenizer=None), "has a damaged header"),
    "vocab": (lambda raw: _with_header(raw, vocab=-1), "has a damaged header"),
    "labels": (lambda raw: _with_header(raw, labels=9), "has a damaged header"),
    "negative": (lambda raw: _with_header(raw, documents=-1), "has a damaged header"),
    "many": (lambda raw: _with_header(raw, tokens=10**30), "has 4152 bytes where its header promises 1\\d+"),
    "no mask": (lambda raw: _with_header(raw, masked=False), "has 4152 bytes where its header promises 4144"),
    "blocks": (lambda raw: raw[:-8] + bytes(8), "has damaged checksums"),
    "documents before": (lambda raw: _with_blocks(raw, 1), "has damaged checksums"),
    "fewer documents before": (lambda raw: _with_blocks(raw, -1), "has damaged checksums"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(file: Path, kind: str) -> None:
    damage, sentence = DAMAGE[kind]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=sentence) as error:
        open_tokens(file)
    assert "\n" not in str(error.value)


BAD_BOUNDS = {
    "falling": (0, 9, 8),
    "empty document": (0, 0, 8),
    "before the block": (-1, 5, 8),
    "beyond the end": (0, 70000, 8),
}


@pytest.mark.parametrize("kind", BAD_BOUNDS)
def test_bounds_that_no_writer_made_are_refused_though_their_checksum_agrees(file: Path, kind: str) -> None:
    file.write_bytes(_with_bounds(file.read_bytes(), *BAD_BOUNDS[kind]))
    data = open_tokens(file)
    with pytest.raises(RunError, match="tokens 0 to 7, their document bounds or their mask do not match"):
        data.read(0, 8)
    with pytest.raises(DataError, match="has damaged document bounds"):
        data.bounds()


def test_agreeing_changes_open(file: Path) -> None:
    # What is changed with a new checksum is refused for its content, not for the checksum
    file.write_bytes(_with_bounds(file.read_bytes(), 0, 4, 8))
    assert open_tokens(file).read(0, 8).documents.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("place", range(HEADER_BYTES, HEADER_BYTES + 8 + 8 + 16), ids=str)
def test_any_changed_byte_of_tokens_mask_and_bounds_is_noticed(file: Path, place: int) -> None:
    """Also while the file is open: every read compares. Padding of the mask is not covered; it is not read."""
    raw = bytearray(file.read_bytes())
    raw[place] ^= 2
    for data in (open_tokens(file), None):
        file.write_bytes(raw)
        if HEADER_BYTES + 9 <= place < HEADER_BYTES + 16:
            (data or open_tokens(file)).read(0, 8)
            continue
        with pytest.raises(RunError, match=r"has changed since it was prepared: its tokens 0 to 7"):
            (data or open_tokens(file)).read(2, 5)


def test_a_file_that_shrinks_while_it_is_open(file: Path) -> None:
    data = open_tokens(file)
    os.truncate(file, HEADER_BYTES + 3)
    with pytest.raises(RunError, match=r"ends at byte 4099 where byte 4104 was reached before: it has shrunk"):
        data.read(0, 4)


def test_a_file_that_is_replaced_while_it_is_open(file: Path) -> None:
    """The opened file stays what it was."""
    data = open_tokens(file)
    (file.parent / "other").write_bytes(b"other")
    (file.parent / "other").rename(file)
    assert data.read(0, 8).tokens.tobytes() == b"abcdefgh"


def test_identity_covers_tokens_bounds_and_mask() -> None:
    tokens, bounds, learned = np.arange(100_000) % 50, np.array([0, 70_000, 100_000]), np.ones(100_000, bool)
    same = in_memory(tokens, bounds, learned).identity()
    assert same == in_memory(tokens.copy(), bounds.copy(), learned.copy()).identity()
    changed = tokens.copy()
    changed[68_000] ^= 1
    unlearned = learned.copy()
    unlearned[99_999] = False
    others = [
        in_memory(changed, bounds, learned),
        in_memory(tokens, np.array([0, 70_001, 100_000]), learned),
        in_memory(tokens, np.array([0, 70_000, 90_000, 100_000]), learned),
        in_memory(tokens, bounds, unlearned),
        in_memory(tokens, bounds),
        in_memory(tokens, bounds, learned, tokenizer="bytes"),
        in_memory(tokens, bounds, learned, vocab=60),
        in_memory(tokens[:-1], np.array([0, 70_000, 99_999]), learned[:-1]),
    ]
    assert all(other.identity() != same for other in others)


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read as a token file \(No such file"):
        open_tokens(tmp_path / "none")
    with pytest.raises(DataError, match=r"cannot be read as a token file \(Is a directory"):
        open_tokens(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe' is a device or a pipe: name a token file"):
        open_tokens(tmp_path / "pipe")


def test_standard_library() -> None:
    data = standard_library()
    assert (data.path, data.vocab, data.tokenizer, data.header.masked) == (None, 256, "bytes", False)
    bounds = data.bounds()
    assert bounds[-1] == data.tokens > 5_000_000
    dataclass_source = Path(dataclasses.__file__).read_bytes()
    place = data.read(0, data.tokens).tokens.tobytes().find(dataclass_source)
    assert {place, place + len(dataclass_source)} <= set(bounds.tolist())
