"""Tapes on the disk give what device tapes give, whatever is late; what a disk does not do is one sentence; and nothing
is left behind.

Threads read and write the file, delayed at random, through staging that turns to NaN when it is taken.
"""

import errno
import fcntl
import gc
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ithaca.base.errors import PlanError, RunError
from ithaca.base.tiles import Tiles
from ithaca.tape import disk as disk_module
from ithaca.tape.disk import DiskTape, Fetching
from ithaca.tape.engine import Engine, Mark, ThreadEngine, make_engine
from ithaca.tape.file import TapeFile, free_space
from ithaca.tape.spec import BLOCK
from ithaca.tape.tape import DeviceTape, HostTape, Slots
from tests.tape.disks import disk_tapes, make_disk, open_files, read_all
from tests.tape.test_tape import CPU, SLOTS, TAPES, TILES, make_program, make_slots, numbers, run


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    engine = ThreadEngine(CPU)
    engine.poison = True
    yield engine
    engine.settle()


def goes_wrong(seed: int, engine: Engine, folder: Path | list[Path]) -> bool:
    """Whether a random program over disk tapes, and a host tape that shares their slots, differs in any bit from device
    tapes."""
    program = make_program(random.Random(seed))
    wanted = run(program, [DeviceTape(numbers(number).to(engine.device), TILES) for number in range(TAPES)])
    slots = make_slots(engine, SLOTS)
    first, *others = (numbers(number) for number in range(TAPES))
    tapes = [HostTape(first, TILES, slots), *disk_tapes(others, TILES, slots, folder, staged=3)]
    found = run(program, tapes)
    engine.settle()
    assert slots.held == 0
    assert not any(os.listdir(each) for each in ([folder] if isinstance(folder, Path) else folder))
    return not all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_disk_tapes_give_what_device_tapes_give(engine: ThreadEngine, tmp_path: Path, seed: int) -> None:
    delays = random.Random(seed)
    engine.before_copy = lambda: time.sleep(delays.choice((0, 0, 0.002)))
    engine.before_disk = lambda: time.sleep(delays.choice((0, 0, 0.004)))
    assert not goes_wrong(seed, engine, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_disk_tapes_on_a_gpu(tmp_path: Path, seed: int) -> None:
    engine, delays = make_engine(torch.device("cuda", torch.cuda.current_device())), random.Random(seed)
    engine.poison = True
    engine.before_copy = lambda: torch.cuda._sleep(delays.randrange(3_000_000))  # up to 1.5 ms
    engine.before_disk = lambda: time.sleep(delays.choice((0, 0, 0.004)))
    assert not goes_wrong(seed, engine, tmp_path)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 40),
    features=st.sampled_from([1, 7, 511, 512, 513, 1500]),
    staged=st.integers(1, 3),
)
def test_tiles_of_any_length(tmp_path_factory, length: int, size: int, features: int, staged: int) -> None:
    """Less than a block, a block exactly, and more; parts of several threads."""
    tiles, engine = Tiles(length, size), ThreadEngine(CPU)
    slots = Slots(engine, min(size, length), (features,), torch.float64, 3)
    contents = [torch.randn(length, features, dtype=torch.float64) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.tape.file.PART", 2 * BLOCK)
        tapes = disk_tapes(contents, tiles, slots, tmp_path_factory.getbasetemp(), staged)
        for tape, content in zip(tapes, contents, strict=True):
            assert torch.equal(read_all(tape), content)


def test_a_stretch_is_lent_to_narrower_tiles(engine: ThreadEngine, tmp_path: Path) -> None:
    """As an o's to an x: tile by tile, while others are still the lender's."""
    wide = make_slots(engine, 2)
    narrow = Slots(engine, TILES.size, (5,), torch.float64, 2)
    (lender,) = disk_tapes([numbers()], TILES, wide, tmp_path)
    borrower, content = DiskTape(lender.disk, lender.stretch, TILES, narrow), torch.randn(TILES.length, 5).double()
    engine.before_disk = lambda: time.sleep(0.003)
    for index in reversed(range(TILES.count)):
        tile = lender.read(index, toward=-1)
        assert torch.equal(tile, numbers()[TILES.rows(index)])
        lender.release(tile)
        borrower.write(index, borrower.blank(index).copy_(content[TILES.rows(index)]))
    assert torch.equal(read_all(borrower), content)


def test_reading_begins_ahead_of_its_use(engine: ThreadEngine, tmp_path: Path) -> None:
    (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 3), tmp_path)
    read_all(tape)
    reads = threading.Semaphore(0)
    engine.before_disk = reads.release
    tape.release(tape.read(0, toward=1))
    assert all(reads.acquire(timeout=60) for _ in range(2))


def test_writing_returns_before_the_disk_has_written(engine: ThreadEngine, tmp_path: Path) -> None:
    (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 3), tmp_path, staged=2)
    read_all(tape)
    may_write = threading.Event()
    engine.before_disk = lambda: may_write.wait(60) and None
    for index in range(2):  # as many as are staged
        tape.write(index, tape.blank(index).fill_(index))
    may_write.set()
    assert torch.equal(read_all(tape)[:8:4, 0, 0], torch.tensor([0.0, 1.0], dtype=torch.float64))


def test_threads_go_on_where_the_system_stopped_short(engine: ThreadEngine, monkeypatch, tmp_path: Path) -> None:
    for name in ("preadv", "pwritev"):
        move = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, parts, place, move=move: move(file, [parts[0][:BLOCK]], place))
    tiles, content = Tiles(5, 2), torch.randn(5, 1500, dtype=torch.float64)
    (tape,) = disk_tapes([content], tiles, Slots(engine, 2, (1500,), torch.float64, 2), tmp_path)
    assert torch.equal(read_all(tape), content)


def test_the_slot_of_a_dropped_tile_is_free_when_it_was_before(engine: ThreadEngine, tmp_path: Path) -> None:
    (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 1), tmp_path, staged=3)
    engine.before_copy = lambda: time.sleep(0.02)
    tape.write(0, tape.blank(0).fill_(3))
    tape.prefetch(1)
    tape.drop()
    tile = tape.blank(2).fill_(7)
    engine.settle()  # a copy out of the slot that was still under way would leave NaN
    assert torch.equal(tile, torch.full_like(tile, 7))


@pytest.mark.parametrize("settled", [False, True])
def test_the_staging_of_a_dropped_tile_is_free_when_it_is_read(
    engine: ThreadEngine, tmp_path: Path, settled: bool
) -> None:
    """Or when the pass that broke off is settled."""
    (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 2), tmp_path, staged=1)
    read_all(tape)
    engine.before_disk = lambda: time.sleep(0.02 if threading.current_thread().name.startswith("disk-in") else 0.04)
    tape.prefetch(0)
    tape.drop()
    if settled:
        tape.disk.settle()
    tape.write(1, tape.blank(1).fill_(7))
    tile = tape.read(1)
    assert torch.equal(tile, torch.full_like(tile, 7))


# Each of these waits is needed


def without_staging_waits(patch: pytest.MonkeyPatch, _: ThreadEngine) -> None:
    patch.setattr(disk_module, "_free", lambda piece: setattr(piece, "use", None))


def without_waiting_for_what_was_written(patch: pytest.MonkeyPatch, _: ThreadEngine) -> None:
    read = disk_module._read
    patch.setattr(disk_module, "_read", lambda *given: read(*given[:-1], None))


def without_waiting_for_the_disk(patch: pytest.MonkeyPatch, _: ThreadEngine) -> None:
    def wait(self: Fetching) -> Mark:
        self._arrived = self._engine.copy_in(self._tile, self._staged, after=(self._free,))
        return self._arrived

    patch.setattr(Fetching, "wait", wait)


def without_waiting_for_copies_to_staging(patch: pytest.MonkeyPatch, engine: ThreadEngine) -> None:
    patch.setattr(engine, "wait", lambda _: None)


def without_waiting_for_a_slot(patch: pytest.MonkeyPatch, engine: ThreadEngine) -> None:
    copy_in = engine.copy_in
    patch.setattr(engine, "copy_in", lambda target, source, after: copy_in(target, source, (None, *after[1:])))


def without_a_fault(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("fault", "slow"),
    [
        (without_a_fault, ""),
        (without_staging_waits, "disk-out"),
        (without_waiting_for_what_was_written, "disk-out"),
        (without_waiting_for_the_disk, "disk-in"),
        (without_waiting_for_copies_to_staging, "copy-out"),
        (without_waiting_for_a_slot, "copy-out"),
    ],
)
def test_a_missing_wait_is_noticed(monkeypatch, tmp_path: Path, fault: Callable, slow: str) -> None:
    def delay() -> None:
        if threading.current_thread().name.startswith(slow):
            time.sleep(0.005)

    def tries() -> list[bool]:
        outcomes = []
        for seed in range(3):
            engine = ThreadEngine(CPU)
            engine.poison, engine.before_copy, engine.before_disk = True, delay, delay
            fault(patch, engine)
            outcomes.append(goes_wrong(seed, engine, tmp_path))
        return outcomes

    with monkeypatch.context() as patch:
        assert any(tries()) == (fault is not without_a_fault)


# What a disk does not do


def fail_with(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


def disk_of_one(engine: ThreadEngine, folder: Path, slots: int = 3) -> tuple[DiskTape, Slots]:
    made = make_slots(engine, slots)
    return disk_tapes([numbers()], TILES, made, folder)[0], made


def change_all(tape: DiskTape) -> None:
    """With two pieces of staging what fails is met within these."""
    for index in range(TILES.count):
        tape.write(index, tape.read(index).add_(1))


@pytest.mark.parametrize(
    ("name", "broken", "sentence"),
    [
        (
            "pwritev",
            fail_with(errno.ENOSPC),
            "4 KiB of a tape could not be written to .* \\(No space left on device\\)",
        ),
        ("preadv", fail_with(errno.EIO), "4 KiB of a tape could not be read from .* \\(Input/output error\\)"),
        ("preadv", lambda *_: 0, "could not be read from .* \\(the file has ended\\)"),
    ],
)
def test_a_failing_disk_is_a_sentence_and_the_next_pass_has_nothing_to_do_with_it(
    engine: ThreadEngine, monkeypatch, tmp_path: Path, name: str, broken: Callable, sentence: str
) -> None:
    tape, slots = disk_of_one(engine, tmp_path)
    read_all(tape)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        with pytest.raises(RunError, match=sentence) as raised:
            change_all(tape)
        assert str(tmp_path) in str(raised.value)
        assert "\n" not in str(raised.value)
        tape.drop()
        engine.settle()
        tape.disk.settle()
        slots.reclaim()
    for index, rows in enumerate(TILES.slices()):
        tape.write(index, tape.blank(index).copy_(numbers(1)[rows]))
    assert torch.equal(read_all(tape), numbers(1))


def test_a_part_that_fails_is_told_when_no_other_is_under_way(monkeypatch, tmp_path: Path) -> None:
    """Since the memory has another use then."""
    monkeypatch.setattr("ithaca.tape.file.PART", BLOCK)
    file, ended = TapeFile((str(tmp_path),), 2 * BLOCK), []

    def read(_: int, parts: list[memoryview], place: int) -> int:
        if place == 0:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.05)
        ended.append(place)
        return len(parts[0])

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(RunError, match="could not be read"):
        file.read(0, memoryview(bytearray(2 * BLOCK)))
    assert ended == [BLOCK]


def test_a_tile_that_was_not_written_is_not_read(engine: ThreadEngine, monkeypatch, tmp_path: Path) -> None:
    """Even when nothing else has been asked of the disk since."""
    tape, _ = disk_of_one(engine, tmp_path)
    read_all(tape)
    monkeypatch.setattr(os, "pwritev", fail_with(errno.ENOSPC))
    engine.before_disk = lambda: time.sleep(0.02)
    tape.write(0, tape.blank(0).fill_(3))
    with pytest.raises(RunError, match="No space left"):
        tape.read(0)
    tape.disk.settle()


@contextmanager
def short_files() -> Iterator[None]:
    """Files end at one block; not beyond the body, since what the tests say may go to a file as well."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_the_system_limits(engine: ThreadEngine, tmp_path: Path) -> None:
    tape, _ = disk_of_one(engine, tmp_path)
    read_all(tape)  # all of it is written
    with short_files():
        tape.write(1, tape.blank(1).fill_(7))
        with pytest.raises(RunError, match=r"could not be written .* \(File too large\)"):
            read_all(tape)
        with pytest.raises(
            PlanError, match=r"has no room for the 8 KiB of a rank's tapes \(File too large; .* are free\)"
        ):
            TapeFile((str(tmp_path),), 2 * BLOCK)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("folder", ["missing", "file", "/proc", "nul\0l"])
def test_a_folder_that_is_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"is not a folder that a file can be made in \(.+\): name one that exists"):
        free_space(str(tmp_path / folder))


def test_a_file_system_without_direct_access(engine: ThreadEngine, monkeypatch, tmp_path: Path) -> None:
    """One that refuses the flag, and one that takes it and refuses to write."""
    control, write = fcntl.fcntl, os.pwritev

    def no_flag(file: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    def no_write(file: int, *given) -> int:
        if control(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, *given)

    for module, name, refuse in ((fcntl, "fcntl", no_flag), (os, "pwritev", no_write)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            assert not TapeFile((str(tmp_path),), BLOCK).direct
            tape, _ = disk_of_one(engine, tmp_path)
            assert torch.equal(read_all(tape), numbers())


# What is left


def disk_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("disk")}


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_outlives_the_tapes(tmp_path: Path, closed: bool) -> None:
    """Whether they are closed or forgotten, with tiles under way: no name, no file, no thread."""
    before, engine = disk_threads(), ThreadEngine(CPU)
    tape, slots = disk_of_one(engine, tmp_path)
    assert not os.listdir(tmp_path)
    assert len(open_files(tmp_path)) == 1
    engine.before_disk = lambda: time.sleep(0.005)
    tape.write(0, tape.read(0, toward=1))
    if closed:
        tape.disk.close()
        assert not open_files(tmp_path)
    threads = disk_threads() - before
    del tape, slots
    gc.collect()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert not open_files(tmp_path)


def test_the_file_is_allocated_before_anything_is_written(engine: ThreadEngine, tmp_path: Path) -> None:
    disk = make_disk(3, TILES, 48, make_slots(engine, 1), tmp_path, 1)
    status = os.fstat(disk._file._parts[0].file)
    assert status.st_size == 3 * TILES.count * BLOCK
    assert status.st_blocks * 512 >= status.st_size


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int64)


def test_taken_staging_is_poisoned(engine: ThreadEngine, tmp_path: Path) -> None:
    (tape,) = disk_tapes([numbers()], TILES, make_slots(engine, 2), tmp_path, staged=1)
    (piece,) = tape.disk._pieces
    read_all(tape)
    may_read = threading.Event()
    engine.before_disk = lambda: may_read.wait(300) and None
    tape.prefetch(0)
    assert bits(piece.memory).eq(-1).all()
    may_read.set()
    tape.drop()
