"""Tapes on a disk, with content, for tests."""

import os
from pathlib import Path

import torch
from torch import Tensor

from ithaca.base.tiles import Tiles
from ithaca.tape.disk import Disk, DiskTape
from ithaca.tape.file import TapeFile
from ithaca.tape.slab import Slab
from ithaca.tape.spec import Stretch, staged_bytes, stretch_bytes, whole_blocks
from ithaca.tape.tape import Slots, Tape


def make_disk(tapes: int, tiles: Tiles, row: int, slots: Slots, folder: Path | list[Path], staged: int) -> Disk:
    staging = Slab(staged * [staged_bytes(tiles, row)], slots.engine.device, lambda _: None)
    folders = tuple(map(str, [folder] if isinstance(folder, Path) else folder))
    disk = Disk(TapeFile(folders, tapes * stretch_bytes(tiles, row)), staging.parts, slots.engine)
    staging.belong_to(disk, slots.engine)
    return disk


def disk_tapes(
    contents: list[Tensor], tiles: Tiles, slots: Slots, folder: Path | list[Path], staged: int = 2
) -> list[DiskTape]:
    """One of each content, in one file."""
    row = contents[0][0].nbytes
    disk, tapes = make_disk(len(contents), tiles, row, slots, folder, staged), []
    for number, content in enumerate(contents):
        stretch = Stretch(number * stretch_bytes(tiles, row), whole_blocks(tiles.size * row))
        tapes.append(DiskTape(disk, stretch, tiles, slots))
        for index, rows in enumerate(tiles.slices()):
            tapes[-1].write(index, tapes[-1].blank(index).copy_(content[rows]))
    return tapes


def read_all(tape: Tape) -> Tensor:
    """What a tape holds."""
    tiles = []
    for index in range(tape.tiles.count):
        tile = tape.read(index)
        tiles.append(tile.clone())
        tape.release(tile)
    return torch.cat(tiles)


def open_files(folder: Path) -> list[str]:
    """Those that this process has in a folder, without a name among them."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return [target for link in links if os.path.lexists(link) and str(folder) in (target := os.readlink(link))]
