"""Tapes on the device, on the host and on the disk are one interface, and copies that run beside the computation change
nothing. (What only the disk's have: test_disk.py.)

The host's copies are made by threads here, delayed at random, with slots that turn to NaN as soon as they are free:
what is read too early or kept too long does not go unseen. That this would find a missing wait is held, too.
"""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ithaca.base.tiles import Tiles
from ithaca.tape.disk import DiskTape
from ithaca.tape.engine import Engine, Mark, ThreadEngine, make_engine
from ithaca.tape.tape import DeviceTape, HostTape, Slots, Tape
from tests.tape.disks import disk_tapes, read_all

CPU = torch.device("cpu")
TILES = Tiles(11, 4)  # three tiles, the last of three rows
FEATURES = (2, 3)
LAST = TILES.count - 1


def numbers(seed: int = 0) -> Tensor:
    return torch.randn(TILES.length, *FEATURES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_slots(engine: Engine, count: int) -> Slots:
    return Slots(engine, TILES.size, FEATURES, torch.float64, count)


def host_tape(engine: Engine, count: int) -> tuple[HostTape, Slots]:
    slots = make_slots(engine, count)
    return HostTape(numbers(), TILES, slots), slots


@pytest.fixture
def engine() -> Iterator[ThreadEngine]:
    engine = ThreadEngine(CPU)
    yield engine
    engine.settle()


@pytest.fixture(params=["device", "host", "host, poisoned", "disk", "disk, poisoned"])
def tape(request: pytest.FixtureRequest, engine: ThreadEngine, tmp_path: Path) -> Tape:
    """A tape that holds numbers(0)."""
    if request.param == "device":
        return DeviceTape(numbers(), TILES)
    engine.poison = "poisoned" in request.param
    if "disk" in request.param:
        return disk_tapes([numbers()], TILES, make_slots(engine, 3), tmp_path)[0]
    return host_tape(engine, 3)[0]


def content(tape: Any, engine: Engine) -> Tensor:
    engine.settle()
    return read_all(tape) if isinstance(tape, DiskTape) else tape.memory


def in_thread(way: str, act: Callable[[], object]) -> Callable[[], None]:
    """For `before_copy`: act in copies of one direction."""

    def before_copy() -> None:
        if threading.current_thread().name == f"copy-{way}":
            act()

    return before_copy


# All kinds


def test_a_cpu_has_threads_for_copies() -> None:
    assert isinstance(make_engine(CPU), ThreadEngine)


def test_every_tile_is_read_as_it_lies(tape: Tape) -> None:
    for index, rows in enumerate(TILES.slices()):
        tile = tape.read(index)
        assert torch.equal(tile, numbers()[rows])
        tape.release(tile)


def test_what_is_written_is_read(tape: Tape, engine: ThreadEngine) -> None:
    for index, rows in enumerate(TILES.slices()):
        tape.write(index, tape.blank(index).copy_(numbers(1)[rows]))
    for index, rows in enumerate(TILES.slices()):
        tile = tape.read(index)
        assert torch.equal(tile, numbers(1)[rows])
        tape.release(tile)
    assert torch.equal(content(tape, engine), numbers(1))


def test_a_tile_is_changed_and_written_back(tape: Tape, engine: ThreadEngine) -> None:
    for _ in range(2):
        for index in range(TILES.count):
            tape.write(index, tape.read(index).mul_(2))
    assert torch.equal(content(tape, engine), 4 * numbers())


def test_the_last_tile_is_as_short_as_its_rows(tape: Tape, engine: ThreadEngine) -> None:
    tile = tape.blank(LAST)
    assert tile.shape == (3, *FEATURES)
    tape.write(LAST, tile.fill_(5))
    tile = tape.read(LAST)
    assert tile.shape == (3, *FEATURES)
    tape.release(tile)
    wanted = numbers()
    wanted[8:] = 5
    assert torch.equal(content(tape, engine), wanted)


@pytest.mark.parametrize("toward", [1, -1])
def test_passes_in_both_directions_read_what_lies_there(tape: Tape, engine: ThreadEngine, toward: int) -> None:
    """Each tile is read and written back, with the next one fetched ahead, at the borders none."""
    for index in range(TILES.count)[::toward]:
        tile = tape.read(index, toward)
        assert torch.equal(tile, numbers()[TILES.rows(index)])
        tape.write(index, tile.add_(index))
    steps = torch.tensor([TILES.holding(row) for row in range(TILES.length)], dtype=torch.float64)
    assert torch.equal(content(tape, engine), numbers() + steps[:, None, None])


def test_prefetched_tiles_are_read_in_any_order(tape: Tape) -> None:
    for index in (-1, 0, LAST, LAST + 1, 0):  # beyond the borders there is nothing, and once is enough
        tape.prefetch(index)
    for index in (LAST, 0):
        tile = tape.read(index)
        assert torch.equal(tile, numbers()[TILES.rows(index)])
        tape.release(tile)


def test_tiles_are_read_after_what_was_fetched_ahead_is_dropped(tape: Tape, engine: ThreadEngine) -> None:
    for index in range(TILES.count):
        tape.prefetch(index)
    tape.drop()
    tape.write(1, tape.blank(1).fill_(7))
    tile = tape.read(1)
    assert torch.equal(tile, torch.full_like(tile, 7))
    tape.release(tile)
    wanted = numbers()
    wanted[TILES.rows(1)] = 7
    assert torch.equal(content(tape, engine), wanted)


def test_a_device_tape_takes_only_its_own_tiles() -> None:
    tape = DeviceTape(numbers(), TILES)
    assert tape.read(1).data_ptr() == tape.blank(1).data_ptr()
    with pytest.raises(AssertionError):
        tape.write(1, tape.read(1).clone())


# What only the host's have


@pytest.mark.parametrize(("index", "toward"), [(0, 1), (1, 1), (1, -1), (LAST, -1)])
def test_the_neighbour_is_fetched_ahead(engine: ThreadEngine, index: int, toward: int) -> None:
    tape, slots = host_tape(engine, 2)
    tape.release(tape.read(index, toward))
    assert slots.held == 1
    engine.settle()
    # What is fetched already does not see this
    tape.memory.zero_()
    assert torch.equal(tape.read(index + toward), numbers()[TILES.rows(index + toward)])


@pytest.mark.parametrize(("index", "toward"), [(0, -1), (LAST, 1), (1, 0)])
def test_nothing_is_fetched_beyond_the_borders(engine: ThreadEngine, index: int, toward: int) -> None:
    tape, slots = host_tape(engine, 2)
    tape.read(index, toward)
    assert slots.held == 1


def test_a_tile_is_fetched_once(engine: ThreadEngine) -> None:
    copies = []
    engine.before_copy = lambda: copies.append(1)
    tape, slots = host_tape(engine, 2)
    tape.prefetch(0)
    tape.prefetch(0)
    tape.read(0)
    assert (len(copies), slots.held) == (1, 1)


def test_a_tile_is_not_written_while_it_is_fetched(engine: ThreadEngine) -> None:
    tape, _ = host_tape(engine, 2)
    tile = tape.blank(0)
    tape.prefetch(0)
    with pytest.raises(AssertionError, match="while its old content is being fetched"):
        tape.write(0, tile)


def test_every_way_to_give_up_a_tile_frees_its_slot(engine: ThreadEngine) -> None:
    tape, slots = host_tape(engine, 1)
    for _ in range(3):  # one slot is enough when it always comes back
        tape.release(tape.read(0))
        tape.write(LAST, tape.blank(LAST).zero_())
        tape.prefetch(1)
        assert slots.held == 1
        tape.drop()
        assert slots.held == 0


def test_a_dropped_slot_is_free_when_its_copy_is_over(engine: ThreadEngine) -> None:
    engine.before_copy = in_thread("in", lambda: time.sleep(0.02))
    tape, _ = host_tape(engine, 1)
    tape.prefetch(0)
    tape.drop()
    tile = tape.blank(1).fill_(7)
    engine.settle()  # a copy that was still under way would arrive now
    assert torch.equal(tile, torch.full_like(tile, 7))


def test_no_more_slots_than_there_are(engine: ThreadEngine) -> None:
    tape, slots = host_tape(engine, 2)
    tape.read(0)
    tape.blank(1)
    for take in (tape.read, tape.blank, tape.prefetch):
        with pytest.raises(AssertionError, match="all slots are in use"):
            take(2)
    assert slots.held == 2


def test_slots_come_back_in_the_order_they_were_given_with_their_marks(engine: ThreadEngine) -> None:
    """The one that was given first is free first: its mark is waited for the shortest."""
    slots = make_slots(engine, 2)
    (first, _), (second, _) = slots.take(4), slots.take(3)
    assert (len(first), len(second)) == (4, 3)
    slots.give(second, "second")
    slots.give(first, "first")
    for tile, mark in ((second, "second"), (first, "first")):
        taken, free = slots.take(4)  # all rows, though the last tile that was there had fewer
        assert (taken.data_ptr(), len(taken), free) == (tile.data_ptr(), 4, mark)


def test_a_released_slot_is_poisoned(engine: ThreadEngine) -> None:
    engine.poison = True
    tape, _ = host_tape(engine, 2)
    assert tape.blank(1).isnan().all()  # before its first use as well
    tile = tape.read(0)
    assert torch.equal(tile, numbers()[:4])
    tape.release(tile)
    assert tile.isnan().all()
    assert torch.equal(content(tape, engine), numbers())


def test_a_written_slot_is_poisoned_after_its_copy(engine: ThreadEngine) -> None:
    engine.poison = True
    copying, may_copy = threading.Event(), threading.Event()

    def wait() -> None:
        copying.set()
        may_copy.wait()

    engine.before_copy = in_thread("out", wait)
    tape, _ = host_tape(engine, 2)
    tile = tape.read(0).fill_(3)
    tape.write(0, tile)  # returns at once: the copy waits
    assert copying.wait(timeout=60)
    before_copy = tile.clone(), tape.memory.clone()
    may_copy.set()
    assert torch.equal(before_copy[0], torch.full_like(tile, 3))
    assert torch.equal(before_copy[1], numbers())
    wanted = numbers()
    wanted[:4] = 3
    assert torch.equal(content(tape, engine), wanted)
    assert tile.isnan().all()


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("poison", [False, True])
def test_a_single_tile_stays_in_its_slot(engine: ThreadEngine, poison: bool, changed: bool) -> None:
    """It is read where it was written, copied out once and never back, and what comes after waits for the copy."""
    engine.poison, ways = poison, list[str]()
    slots, memory = Slots(engine, 4, (3,), torch.float64, 1), torch.zeros(4, 3, dtype=torch.float64)

    def before_copy() -> None:
        ways.append(threading.current_thread().name)
        time.sleep(0.02)

    engine.before_copy = before_copy
    tape = HostTape(memory, Tiles(4, 4), slots)
    written = tape.blank(0).fill_(7)
    tape.write(0, written, again=True)
    tape.prefetch(0)
    tile = tape.read(0, changed=changed)
    assert tile.data_ptr() == written.data_ptr()
    assert torch.equal(tile, torch.full_like(tile, 7))
    if changed:
        tile.fill_(9)
        tape.write(0, tile)
        engine.settle()
        assert torch.equal(memory, torch.full_like(memory, 9))
    else:
        tape.release(tile)
        tape.blank(0).fill_(8)
        engine.settle()
        assert torch.equal(memory, torch.full_like(memory, 7))
    assert ways == ["copy-out"] * (1 + changed)


def test_a_tile_that_stays_is_changed_after_its_copy(engine: ThreadEngine) -> None:
    slots, memory = Slots(engine, 4, (3,), torch.float64, 1), torch.zeros(4, 3, dtype=torch.float64)
    engine.before_copy = lambda: time.sleep(0.02)
    tape = HostTape(memory, Tiles(4, 4), slots)
    tape.write(0, tape.blank(0).fill_(7), again=True)
    tape.release(tape.read(0).fill_(9))
    engine.settle()
    assert torch.equal(memory, torch.full_like(memory, 7))


def test_a_tile_that_stays_is_dropped_with_its_pass(engine: ThreadEngine) -> None:
    tape = HostTape(torch.zeros(4, 3), Tiles(4, 4), Slots(engine, 4, (3,), torch.float32, 1))
    tape.write(0, tape.blank(0).fill_(7), again=True)
    tape.drop()
    tape.release(tape.blank(0))


def test_one_of_several_tiles_does_not_stay(engine: ThreadEngine) -> None:
    tape, slots = host_tape(engine, 2)
    tape.write(0, tape.blank(0).fill_(7), again=True)
    assert slots.held == 0


def test_nothing_is_poisoned_unasked(engine: ThreadEngine) -> None:
    tape, _ = host_tape(engine, 2)
    tile, other = tape.read(0), tape.read(1)
    tape.release(tile)
    tape.write(1, other)
    assert torch.equal(content(tape, engine), numbers())
    assert not tile.isnan().any()
    assert not other.isnan().any()


class Lost(Exception):
    pass


def lose() -> None:
    raise Lost("the host's memory is gone")


def test_a_copy_in_that_fails_is_raised_where_it_is_waited_for(engine: ThreadEngine) -> None:
    engine.before_copy = lose
    tape, _ = host_tape(engine, 2)
    tape.prefetch(0)  # nothing waits yet
    with pytest.raises(Lost):
        tape.read(0)


@pytest.mark.parametrize("count", [1, 2])
def test_a_copy_out_that_fails_is_raised_at_the_next_hold(engine: ThreadEngine, count: int) -> None:
    """With one slot the next blank waits for that copy; with two it is told of it all the same."""
    engine.before_copy = in_thread("out", lose)
    tape, _ = host_tape(engine, count)
    tape.write(0, tape.blank(0).zero_())
    if count > 1:
        engine.settle()
    with pytest.raises(Lost):
        tape.blank(1)


def test_a_failure_is_raised_once(engine: ThreadEngine) -> None:
    """The next pass, with copies that succeed, has nothing to do with it."""
    engine.before_copy = lose
    tape, slots = host_tape(engine, 1)
    with pytest.raises(Lost):
        tape.read(0)
    engine.before_copy = None
    engine.settle()
    slots.reclaim()
    assert torch.equal(tape.read(0), numbers()[:4])


def test_threads_end_with_their_engine() -> None:
    """And keep nothing of the last copy, which may be of gigabytes."""
    engine = ThreadEngine(CPU)
    before = set(threading.enumerate())
    tape, slots = host_tape(engine, 1)
    tape.write(0, tape.read(0))
    engine.settle()
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"copy-in", "copy-out"}
    del engine, tape, slots
    gc.collect()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()


def test_a_pass_that_broke_off_is_mended(engine: ThreadEngine) -> None:
    """Tiles in hand, on their way in and on their way out; then all slots are there, each once."""
    engine.poison = True
    delays = random.Random(0)
    engine.before_copy = lambda: time.sleep(delays.uniform(0, 0.003))
    tape, slots = host_tape(engine, 4)
    tape.read(0, toward=1)
    tape.blank(2).zero_()
    tape.write(0, tape.blank(0).fill_(2))
    assert slots.held == 3
    tape.drop()
    assert slots.held == 2  # those of tiles that nobody has any more
    engine.settle()
    slots.reclaim()
    assert slots.held == 0
    assert len({slots.take(4)[0].data_ptr() for _ in range(4)}) == 4
    slots.reclaim()
    wanted = numbers()
    wanted[:4] = 2
    for index, rows in enumerate(TILES.slices()):
        assert torch.equal(tape.read(index), wanted[rows])
    assert torch.equal(content(tape, engine), wanted)


def test_settling_waits_for_all_copies(engine: ThreadEngine) -> None:
    engine.before_copy = lambda: time.sleep(0.01)
    tape, _ = host_tape(engine, 3)
    for index in range(TILES.count):
        tape.write(index, tape.blank(index).zero_())
    tape.prefetch(0)
    engine.settle()
    assert torch.equal(tape.memory, torch.zeros_like(tape.memory))
    assert torch.equal(tape.read(0), torch.zeros(4, *FEATURES, dtype=torch.float64))


# Random programs over tapes that share their slots

TAPES, AHEAD = 3, 2
SLOTS = AHEAD + 2  # what a program fetches ahead, and two tiles in hand


@dataclass(frozen=True)
class Step:
    do: str
    tape: int
    index: int
    toward: int
    other: int  # another tape


def make_program(choose: random.Random) -> list[Step]:
    def step() -> Step:
        tape = choose.randrange(TAPES)
        other = (tape + choose.randrange(1, TAPES)) % TAPES
        do = choose.choice(("look", "change", "change", "fill", "fill", "join", "fetch", "drop"))
        return Step(do, tape, choose.randrange(TILES.count), choose.choice((-1, 0, 1)), other)

    return [step() for _ in range(choose.randint(10, 25))]


def run(program: list[Step], tapes: Sequence[Tape]) -> list[Tensor]:
    """Everything that was seen, then everything that was left. Does the same with whatever tapes it is given."""
    seen: list[Tensor] = []
    ahead: set[tuple[int, int]] = set()

    def read(tape: int, index: int, toward: int = 0) -> Tensor:
        ahead.discard((tape, index))
        toward = toward if len(ahead) < AHEAD else 0
        if toward and 0 <= index + toward < TILES.count:
            ahead.add((tape, index + toward))
        return tapes[tape].read(index, toward)

    for number, step in enumerate(program):
        tape = tapes[step.tape]
        match step.do:
            case "look":
                tile = read(step.tape, step.index, step.toward)
                seen.append(tile.clone())
                tape.release(tile)
            case "change":
                tape.write(step.index, read(step.tape, step.index, step.toward).mul_(0.5).add_(number))
            case "fill" if (step.tape, step.index) not in ahead:
                tape.write(step.index, tape.blank(step.index).copy_(numbers(number)[TILES.rows(step.index)]))
            case "join":
                target, source = read(step.tape, step.index), read(step.other, step.index, step.toward)
                tape.write(step.index, target.add_(source))
                tapes[step.other].release(source)
            case "fetch" if len(ahead) < AHEAD:
                tape.prefetch(step.index)
                ahead.add((step.tape, step.index))
            case "drop":
                tape.drop()
                ahead -= {(step.tape, index) for index in range(TILES.count)}
    for tape in tapes:
        for index in range(TILES.count):
            tile = tape.read(index)
            seen.append(tile.clone())
            tape.release(tile)
    return seen


def goes_wrong(program: list[Step], engine: Engine, count: int = SLOTS) -> bool:
    """Whether host tapes that share their slots differ in any bit from device tapes."""
    twins = [DeviceTape(numbers(seed), TILES) for seed in range(TAPES)]
    slots = make_slots(engine, count)
    hosted = [HostTape(numbers(seed), TILES, slots) for seed in range(TAPES)]
    wanted, found = run(program, twins), run(program, hosted)
    engine.settle()
    assert slots.held == 0
    pairs = [*zip(found, wanted, strict=True), *((a.memory, b.memory) for a, b in zip(hosted, twins, strict=True))]
    return not all(torch.equal(*pair) for pair in pairs)


@pytest.fixture(scope="module")
def shared_engine() -> ThreadEngine:
    """One for all examples, and two threads."""
    engine = ThreadEngine(CPU)
    engine.poison = True
    return engine


@settings(max_examples=30, deadline=None)
@given(choose=st.randoms(use_true_random=False), seed=st.integers(0, 2**32))
def test_host_tapes_give_what_device_tapes_give(shared_engine: ThreadEngine, choose: random.Random, seed: int) -> None:
    delays = random.Random(seed)
    shared_engine.before_copy = lambda: time.sleep(delays.uniform(0, 0.003))
    assert not goes_wrong(make_program(choose), shared_engine)


class Careless(ThreadEngine):
    """Leaves out one kind of wait."""

    def __init__(self, missing: str):
        super().__init__(CPU)
        self.poison = True
        self._missing = missing
        self._arrivals: list[Mark] = []

    def copy_in(self, target: Tensor, source: Tensor, after: Sequence[Mark | None]) -> Mark:
        free, written = after
        after = (None if self._missing == "slot is free" else free, None if self._missing == "written" else written)
        self._arrivals.append(super().copy_in(target, source, after))
        return self._arrivals[-1]

    def hold(self, mark: Mark | None) -> None:
        kind = "arrived" if mark in self._arrivals else "blank is free"
        super().hold(None if self._missing == kind else mark)


# Two more waits cannot be missed on a CPU, where what was asked for is done: a tile is copied out after it is computed,
# and a slot is filled after its last reader. Both wait for computed(), which is no mark there.
@pytest.mark.parametrize(
    ("missing", "slow", "count"),
    [
        ("arrived", "in", SLOTS),
        ("written", "out", 5 * SLOTS),  # with few slots the wait for a free one often comes after the write as well
        ("slot is free", "out", SLOTS),
        ("blank is free", "out", SLOTS),
    ],
)
def test_a_missing_wait_is_noticed(missing: str, slow: str, count: int) -> None:
    def tries(make: Callable[[], Engine]) -> list[bool]:
        outcomes = []
        for seed in range(3):
            engine = make()
            engine.before_copy = in_thread(slow, lambda: time.sleep(0.02))
            outcomes.append(goes_wrong(make_program(random.Random(seed)), engine, count))
        return outcomes

    assert any(tries(lambda: Careless(missing)))
    assert not any(tries(lambda: Careless("nothing")))
