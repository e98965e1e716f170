"""Tapes striped over several folders: the same content, even shares, and each folder's own mistakes."""

import errno
import mmap
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.base.errors import PlanError, RunError
from ithaca.tape import file as file_module
from ithaca.tape.engine import ThreadEngine
from ithaca.tape.file import TapeFile, shares
from ithaca.tape.spec import BLOCK
from tests.tape.disks import disk_tapes, open_files, read_all
from tests.tape.test_disk import goes_wrong
from tests.tape.test_tape import CPU, TILES, make_slots, numbers


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("one", "two", "three")]
    for folder in found:
        folder.mkdir()
    return found


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "PART", 2 * BLOCK)


def named(folders: list[Path]) -> tuple[str, ...]:
    return tuple(map(str, folders))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 40 * BLOCK), count=st.integers(1, 5))
def test_shares(size: int, count: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_module, "PART", 2 * BLOCK)
        found = shares(size, count)
    assert sum(found) == size
    assert max(found) - min(found) <= 2 * BLOCK


@settings(max_examples=25, deadline=None)
@given(data=st.data(), blocks=st.integers(1, 23), count=st.integers(1, 3))
def test_bytes_come_back_from_where_they_went(tmp_path_factory, data: st.DataObject, blocks: int, count: int) -> None:
    """Against a plain list of bytes, at any place and length of whole blocks."""
    top = tmp_path_factory.mktemp("striped")
    folders = tuple(str(top / str(number)) for number in range(count))
    for folder in folders:
        os.mkdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_module, "PART", 2 * BLOCK)
        file, wanted = TapeFile(folders, blocks * BLOCK), bytearray(blocks * BLOCK)
        file.write(0, aligned(wanted))
        for turn in range(1, 4):
            start = data.draw(st.integers(0, blocks - 1))
            stop = data.draw(st.integers(start + 1, blocks))
            content = bytes([turn]) * ((stop - start) * BLOCK)
            wanted[start * BLOCK : stop * BLOCK] = content
            file.write(start * BLOCK, aligned(content))
        found = aligned(bytes(len(wanted)))
        file.read(0, found)
        assert bytes(found) == bytes(wanted)
        assert [os.fstat(part.file).st_size for part in file._parts] == [
            max(share, BLOCK if part.direct else 0)
            for share, part in zip(shares(blocks * BLOCK, count), file._parts, strict=True)
        ]
        file.close()


def aligned(content: bytes | bytearray) -> memoryview:
    """Memory that begins at a page, as direct access wants."""
    memory = memoryview(mmap.mmap(-1, len(content)))
    memory[:] = content
    return memory


@pytest.mark.parametrize("seed", range(6))
def test_striped_tapes_give_what_device_tapes_give(folders: list[Path], seed: int) -> None:
    engine, delays = ThreadEngine(CPU), random.Random(seed)
    engine.poison = True
    engine.before_copy = lambda: time.sleep(delays.choice((0, 0, 0.002)))
    engine.before_disk = lambda: time.sleep(delays.choice((0, 0, 0.004)))
    assert not goes_wrong(seed, engine, folders)
    engine.settle()


def test_every_folder_takes_part_in_a_tile(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same time: a folder waits until all the others have begun."""
    file, all_begun, move = TapeFile(named(folders), 6 * BLOCK), threading.Barrier(3, timeout=60), os.pwritev

    def write(*given) -> int:
        all_begun.wait()
        return move(*given)

    monkeypatch.setattr(os, "pwritev", write)
    file.write(0, aligned(bytes(6 * BLOCK)))
    assert [os.fstat(part.file).st_size for part in file._parts] == 3 * [2 * BLOCK]


def test_the_folder_that_fails_is_named(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file, move = TapeFile(named(folders), 6 * BLOCK), os.pwritev

    def write(descriptor: int, *given) -> int:
        if descriptor == file._parts[1].file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return move(descriptor, *given)

    monkeypatch.setattr(os, "pwritev", write)
    with pytest.raises(RunError, match=r"24 KiB of a tape could not be written to .*/two' \(Input/output error\): try"):
        file.write(0, aligned(bytes(6 * BLOCK)))


def test_a_folder_without_room_leaves_no_other_open(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, calls = os.posix_fallocate, []

    def full(*given) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(*given)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PlanError, match=r"/two' has no room for the 8 KiB of a rank's tapes \(No space left"):
        TapeFile(named(folders), 6 * BLOCK)
    assert not open_files(tmp_path)


def test_killed_in_the_middle_nothing_is_left(folders: list[Path]) -> None:
    """SIGKILL while tiles are under way: no name was ever there, and the space is free again."""
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        engine = ThreadEngine(CPU)
        engine.before_disk = lambda: time.sleep(0.01)
        (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 3), folders)
        for index in range(TILES.count):
            tape.write(index, tape.blank(index).fill_(index))
        os.write(tell, b"x")
        time.sleep(600)
    os.read(ready, 1)
    assert len([link for folder in folders for link in files_of(child, folder)]) == 3
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert [os.listdir(folder) for folder in folders] == [[], [], []]


def files_of(process: int, folder: Path) -> list[str]:
    links = Path(f"/proc/{process}/fd").iterdir()
    return [target for link in links if str(folder) in (target := os.readlink(link))]


def test_a_tape_over_three_folders(folders: list[Path]) -> None:
    engine, content = ThreadEngine(CPU), numbers()
    (tape,) = disk_tapes([content], TILES, make_slots(engine, 3), folders)
    assert torch.equal(read_all(tape), content)
