"""The tapes that a schedule needs: names, tile sizes, bytes by place. Arithmetic; nothing is allocated here.

A tape lives on the device, in host memory or on disk. Tiles of a host or disk tape pass through a few slots on the
device, and tiles of a disk tape also through staging in host memory. On disk each tile starts at a block boundary,
so that reading and writing can bypass the page cache.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ithaca.base.tiles import Tiles

DISK_RATE = 4e9  # bytes/s that a disk reads, and as many that it writes, where nothing was measured: assumed
BLOCK = 4096  # bytes; a disk reads and writes this much at a time, or a part of it
STAGED = 6  # tiles of a rank in host memory on their way to or from the disk: three of a chunk, three of the next
KV_STAGED = 8  # the same of K and V: both, and the sums of both gradients, of a visit and of the next


@dataclass(frozen=True)
class TapeSpec:
    """Tapes of one kind in one place."""

    name: str
    option: str  # the option of the Plan that says where they live
    place: str  # device, host or disk
    layers: tuple[int, ...]  # that have one; for tapes that layers share, one number per tape
    features: tuple[int, ...]  # of one token
    itemsize: int  # bytes of one number
    exact: bool  # numbers are at least fp32, whatever the dtype of the computation
    slots: int  # tiles on the device at a time if the tape lives elsewhere; tapes of one name share them
    training: bool  # needed only if a backward pass follows
    ranks: int = 1  # 1: a tape holds this rank's own tokens; C: those of all its C Ulysses ranks

    def tiles(self, local: Tiles) -> Tiles:
        """How the tape is cut, given how this rank's own tokens are cut."""
        return Tiles(local.length * self.ranks, local.size * self.ranks)

    def bytes_of(self, tokens: int) -> int:
        """Bytes of all these tapes for this many tokens of each rank."""
        return len(self.layers) * tokens * self.ranks * self.row

    @property
    def row(self) -> int:
        """Bytes of one token in one tape."""
        return math.prod(self.features) * self.itemsize


@dataclass(frozen=True)
class Budget:
    """Bytes of a rank in each place, allowed or used; and the passes of a step, which add to the same gradients."""

    device: int
    host: int
    disk: int
    passes: int = 1

    def within(self, other: "Budget") -> bool:
        return self.device <= other.device and self.host <= other.host and self.disk <= other.disk


def host_bytes(tapes: Sequence[TapeSpec], tiles: Tiles, gpu: bool) -> int:
    """Host memory of a rank's tapes and of the staging of disk tapes. Without a GPU that includes device tapes."""
    hosted = sum(tape.bytes_of(tiles.length) for tape in tapes if tape.place == "host") + staging_bytes(tapes, tiles)
    return hosted if gpu else hosted + device_bytes(tapes, tiles)


def disk_bytes(tapes: Iterable[TapeSpec], tiles: Tiles) -> int:
    """Bytes of a rank's tapes on disk."""
    return sum(len(tape.layers) * stretch_bytes(tape.tiles(tiles), tape.row) for tape in tapes if tape.place == "disk")


def staging_bytes(tapes: Iterable[TapeSpec], tiles: Tiles) -> int:
    """Host memory that tiles pass through on their way to the disk and back."""
    return sum(staging_pieces(tapes, tiles))


def staging_pieces(tapes: Iterable[TapeSpec], tiles: Tiles) -> list[int]:
    """The sizes of the pieces that staging is cut into. K and V have pieces of their own: they move at every visit."""
    sizes: dict[int, list[int]] = {STAGED: [], KV_STAGED: []}
    for tape in (tape for tape in tapes if tape.place == "disk"):
        sizes[KV_STAGED if tape.option == "kv" else STAGED].append(staged_bytes(tape.tiles(tiles), tape.row))
    return [max(group) for count, group in sizes.items() if group for _ in range(count)]


def device_bytes(tapes: Sequence[TapeSpec], tiles: Tiles) -> int:
    """Device memory of a rank's tapes: those that live there, and the slots of the others."""
    return slot_bytes(tapes, tiles) + device_tape_bytes(tapes, tiles)


def device_tape_bytes(tapes: Iterable[TapeSpec], tiles: Tiles) -> int:
    """Bytes of the tapes that live on the device."""
    return sum(tape.bytes_of(tiles.length) for tape in tapes if tape.place == "device")


def slot_bytes(tapes: Iterable[TapeSpec], tiles: Tiles) -> int:
    """Device memory of the slots that tiles of host and disk tapes pass through."""
    rows = min(tiles.size, tiles.length)
    slots = {tape.name: tape.slots * rows * tape.ranks * tape.row for tape in tapes if tape.place != "device"}
    return sum(slots.values())


# Where tiles lie in a file


def whole_blocks(size: int) -> int:
    """The size rounded up to whole blocks."""
    return size + -size % BLOCK


@dataclass(frozen=True)
class Stretch:
    """The part of a file that holds one tape."""

    start: int
    stride: int  # from one tile to the next

    def place(self, index: int) -> int:
        """The offset of a tile in the file."""
        return self.start + index * self.stride


def stretch_bytes(tiles: Tiles, row: int) -> int:
    """Bytes of a tape in its file, with `row` bytes per token."""
    last = tiles.count - 1
    return last * whole_blocks(tiles.size * row) + whole_blocks(tiles.rows_in(last) * row)


def staged_bytes(tiles: Tiles, row: int) -> int:
    """Bytes of one tile in staging."""
    return whole_blocks(min(tiles.size, tiles.length) * row)
