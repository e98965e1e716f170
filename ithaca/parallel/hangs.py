"""Ranks that hang or end: how long the others wait for them, and how they find out which one it was.

**The timeout.** Collectives fail after a timeout that is longer than any step: ten minutes and three times the time
that a slow step takes (`timeout`, `set_timeout`). `run.timeout` overrides it.

**The roll call.** The error of a failed collective says that some connection broke or was silent too long, but not
whose. So the first rank that sees such an error calls the roll through the job's store, and every rank answers
(`answering`). A thread of each rank answers, because a healthy rank may compute for minutes between two collectives. A
rank that does not answer has ended or is stopped. If all answer and a collective timed out, the ranks whose main thread
is in no collective are those that the others wait for.

Answers stay in the store, so a rank that notices late still finds the answer of one that has ended meanwhile. A job
calls the roll once; it cannot go on afterwards.

**The limit.** Under NCCL no error comes: the main thread waits for the GPU, in C++, and torch's watchdog takes long to
end the process. So the thread also watches how long a step takes (`Roll.limit`), calls the roll after the timeout, and
ends the process with the verdict. It needs nothing of NCCL. Main threads that wait for the GPU are in no collective, so
if all ranks answer, those that are elsewhere than most are the ones that the others wait for.

**The watch.** Between steps a rank may wait long for good reasons: a disk is slow, another rank draws a picture. There
no time is too long as long as all ranks are there (`Roll.watch`): the thread of each counts in the store, the next rank
looks whether it still does, and calls the roll if not.

The thread costs three small requests to the store a second.
"""

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ithaca.base.errors import LostRankError
from ithaca.base.sizes import MOST_SECONDS
from ithaca.base.torch_private import job_store, set_group_timeout
from ithaca.parallel.loopback import NAME as LOOPBACK

# FLOP/s that even a slow step reaches, without credit for recomputation
GPU_RATE = 200e12  # 20 % of Hopper's bfloat16 peak; with STEPS, a rank may be as slow as 7 % of the peak
CPU_CORE_RATE = 5e9  # a tenth of what the vector units of a core do in float32

FLOOR = 600.0  # seconds for work that does not depend on the step: compiling kernels, allocating memory, slow disks
STEPS = 3


def step_seconds(flops: float, device: torch.device, cores: int) -> float:
    """An upper estimate of the seconds that a rank needs for `flops`, on a GPU or on `cores` CPU cores."""
    return flops / (GPU_RATE if device.type == "cuda" else CPU_CORE_RATE * cores)


def timeout(step: float) -> float:
    """Seconds to wait for another rank if a step takes at most `step` seconds."""
    return min(FLOOR + STEPS * step, MOST_SECONDS)


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """Let later collectives over these groups fail after this many seconds. Not collective itself."""
    for group in groups:
        if dist.get_backend(group) != LOOPBACK:  # it waits for nobody, and torch warns that it has no timeout
            set_group_timeout(group, seconds)


POLL_SECONDS = 1.0  # between two checks whether the roll is called
ANSWER_SECONDS = 5.0  # that ranks have to answer
ASK_SECONDS = 0.2  # between two checks who has answered
STORE_SECONDS = 5.0  # after which a store that does not respond counts as gone
LATE_SECONDS = 5.0  # after the timeout, in which a collective's own error may come
END_SECONDS = 10.0  # after the verdict, in which the main thread may end by itself

# gloo has no error class of its own for a connection that broke or was silent too long, only these words
_BROKEN = ("gloo/transport", "closed by peer", "reset by peer", "Timed out waiting")
_LATE = ("Timed out", "timed out", "timeout", "Timeout")

# Keys of the store. Every attempt to run the job has a store, or a prefix in one, of its own
_CALLED = "ithaca/roll/called"
_TOO_LONG = "ithaca/roll/too-long"  # set as well if a collective timed out
_HERE, _WAITING = "ithaca/roll/here/", "ithaca/roll/waiting/"  # + rank: it answers; it waits in a collective
_COUNT = "ithaca/roll/count/"  # + rank: how often its thread has come by

_TORCH = Path(torch.__file__).parent


def is_collective_error(error: BaseException) -> bool:
    """Whether this is the error of a collective that another rank may have caused."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _BROKEN)
    )


End = Callable[[LostRankError], object]


def answering(group: dist.ProcessGroup, end: End | None = None) -> AbstractContextManager["Roll"]:
    """Answer roll calls among the ranks of a group while the body runs, as `roll_call` does."""
    return roll_call(dist.get_process_group_ranks(group), dist.get_rank(), job_store(), end)


@contextmanager
def roll_call(ranks: list[int], rank: int, store: dist.Store, end: End | None = None) -> Iterator["Roll"]:
    """Answer roll calls for this rank, through the job's store, while the body runs.

    If the body raises an error that another rank caused, find out which one, and raise a LostRankError that names it.
    `end` is called with that error, in another thread, if the body does not come back after a roll call.
    """
    roll = Roll(ranks, rank, store, end)
    try:
        yield roll
    except RuntimeError as error:
        if lost := roll.explain(error):
            raise lost from error
        raise
    finally:
        roll.end()


class Roll:
    """A rank's part in roll calls."""

    def __init__(self, ranks: list[int], rank: int, store: dist.Store, end: End | None):
        self._ranks, self._rank, self._store, self._end_process = ranks, rank, store, end
        self._deadline = math.inf
        self._patience = math.inf  # seconds for which the next rank may be silent
        self._next, self._heard, self._silence = ranks[(ranks.index(rank) + 1) % len(ranks)], 0, 0.0
        self._worker = threading.get_ident()  # the thread that computes
        self._failed, self._ended = threading.Event(), False
        self._too_long = False
        self._verdict: LostRankError | None = None
        self._called = False  # whether the roll was called to its end
        self._thread = threading.Thread(target=self._listen, name="roll call", daemon=True)
        if len(self._ranks) > 1:
            self._thread.start()

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Call the roll if the body takes longer than this, and a little more."""
        self._deadline = time.monotonic() + seconds + LATE_SECONDS
        try:
            yield
        finally:
            self._deadline = math.inf

    @contextmanager
    def watch(self, seconds: float) -> Iterator[None]:
        """Call the roll if another rank's thread is silent for this long while the body runs."""
        self._patience = seconds
        try:
            yield
        finally:
            self._patience = math.inf

    def end(self) -> None:
        self._ended = True
        self._failed.set()
        if self._thread.is_alive():
            self._thread.join(POLL_SECONDS)  # a thread that returns from the store while Python ends would crash it

    def explain(self, error: BaseException) -> LostRankError | None:
        if len(self._ranks) == 1 or not is_collective_error(error):
            return None
        self._too_long = any(word in str(error) for word in _LATE)
        self._failed.set()
        self._thread.join(ANSWER_SECONDS + STORE_SECONDS)
        if self._verdict:
            return self._verdict
        if not self._called and self._rank != 0:
            return _silent([0], len(self._ranks))  # the store lives in rank 0 or beside it, and does not respond
        if isinstance(error, dist.DistError):
            return None  # NCCL's own error says the reason
        return self._lost_connection()

    def _lost_connection(self) -> LostRankError:
        text = f"rank {self._rank} has lost the connection to others of the {len(self._ranks)} ranks"
        return LostRankError(f"{text}: their own output says why", [])

    def _listen(self) -> None:
        """Wait until this rank or another calls the roll, then take part."""
        try:
            # A connection of its own: the main thread may hold the other one while it waits for a key
            self._store = self._store.clone()  # pyrefly: ignore
            while not (self._failed.wait(POLL_SECONDS) or self._late() or self._store.check([_CALLED])):
                if self._next_is_silent():
                    break
            if self._ended:
                return
            self._too_long |= self._late()
            self._verdict = self._call()
            self._called = True
            if self._rank == 0:  # the store may live here, and ranks that came later to the roll still ask it
                time.sleep(POLL_SECONDS + ASK_SECONDS)
        except RuntimeError:  # the store is gone, maybe because the job is at its end
            while not (self._failed.wait(POLL_SECONDS) or self._late()):
                pass
            if self._rank != 0:
                self._verdict = _silent([0], len(self._ranks))
        self._end_if_stuck()

    def _next_is_silent(self) -> bool:
        """Count for the rank before, and look whether the next one has counted within the watch's seconds.

        Only time in which this thread ran is counted: a job that was stopped as a whole goes on.
        """
        self._store.add(f"{_COUNT}{self._rank}", 1)
        count = self._store.add(f"{_COUNT}{self._next}", 0)
        self._silence = self._silence + POLL_SECONDS if count == self._heard else 0.0
        self._heard = count
        return self._silence > self._patience

    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _end_if_stuck(self) -> None:
        """End the process unless its main thread fails or leaves the roll within `END_SECONDS`."""
        if self._failed.wait(END_SECONDS) or self._end_process is None:
            return
        self._end_process(self._verdict or self._lost_connection())

    def _call(self) -> LostRankError | None:
        """Answer, wait for the answers of the others, and return the verdict."""
        place = _whereabouts(self._worker)
        self._store.set(f"{_HERE}{self._rank}", place or "-")
        if self._too_long:
            self._store.set(_TOO_LONG, "-")
        self._store.set(_CALLED, "-")
        until = time.monotonic() + ANSWER_SECONDS
        while not self._all_answered() and time.monotonic() < until:
            time.sleep(ASK_SECONDS)
        if silent := without_key(self._store, _HERE, self._ranks):
            return _silent(silent, len(self._ranks))
        if not self._store.check([_TOO_LONG]):
            return None
        absent = without_key(self._store, _WAITING, self._ranks)
        if len(absent) == len(self._ranks):
            return _elsewhere({rank: self._store.get(f"{_HERE}{rank}").decode() for rank in self._ranks})
        if absent:
            place = self._store.get(f"{_HERE}{absent[0]}").decode()
            return _absent(absent, len(self._ranks), place)
        return None

    def _all_answered(self) -> bool:
        """Whether no further answer can change the verdict."""
        # A rank whose collective failed was waiting in it
        if self._failed.is_set() or _whereabouts(self._worker) is None:
            self._store.set(f"{_WAITING}{self._rank}", "-")
        needed = _WAITING if self._store.check([_TOO_LONG]) else _HERE
        return self._store.check([f"{needed}{rank}" for rank in self._ranks])


def without_key(store: dist.Store, kind: str, ranks: list[int]) -> list[int]:
    """The ranks that have not set such a key, found by halving: a request for each of a thousand takes too long."""
    if store.check([f"{kind}{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return ranks
    middle = len(ranks) // 2
    return without_key(store, kind, ranks[:middle]) + without_key(store, kind, ranks[middle:])


def _whereabouts(thread: int) -> str | None:
    """The line of code outside of torch that a thread is at; None while it waits in a collective."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_TORCH / "distributed"):
            return None
        if not file.is_relative_to(_TORCH):
            return f"{file.name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "its end"


def _silent(ranks: list[int], world: int) -> LostRankError:
    one = "does not answer any more (it has ended or hangs)"
    several = "do not answer any more (they have ended or hang)"
    text = f"{named(ranks)} of {world} {one if len(ranks) == 1 else several}: {own_output(ranks)} says why"
    return LostRankError(text, ranks)


def _absent(ranks: list[int], world: int, place: str) -> LostRankError:
    come = "answers, but has not come" if len(ranks) == 1 else "answer, but have not come"
    text = f"{named(ranks)} of {world} {come} to where the others wait: rank {ranks[0]} is at {place}"
    return LostRankError(text, ranks)


def _elsewhere(places: dict[int, str]) -> LostRankError:
    """The ranks that are elsewhere than most: no main thread is in a collective, as where all wait for their GPUs."""
    ((most, count),) = Counter(places.values()).most_common(1)
    others = [rank for rank, place in places.items() if place != most]
    if 2 * count > len(places) and others:
        return _absent(others, len(places), places[others[0]])
    found = {place: [rank for rank, at in places.items() if at == place] for place in places.values()}
    each = ", ".join(f"{named(ranks)} at {place}" for place, ranks in found.items())
    return LostRankError(f"all {len(places)} ranks answer, but a step takes longer than run.timeout: {each}", [])


def named(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def own_output(ranks: list[int]) -> str:
    return "its own output" if len(ranks) == 1 else "their own output"
