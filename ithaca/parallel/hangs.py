"""Which rank is missing, once a collective has failed: the survivors call the roll through the job's store.

What fails on a survivor tells that some connection broke or was silent too long, not whose. So the first to notice
calls the roll, and every rank answers: by a thread of its own, since a rank may compute for minutes between two
collectives, and is well. Who gives no answer has ended or is stopped. Where a collective took too long though all
answer, the ranks whose main thread waits in no collective are those that the others wait for.

The thread costs one small request to the store a second. Answers stay in the store, so whoever notices late, because
the first one has ended meanwhile, still finds it among the living. A job calls the roll once; it cannot go on after it.

Under NCCL torch's watchdog ends the process where a collective took too long: no error reaches this module.
"""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ithaca.base.errors import LostRankError
from ithaca.base.sizes import MOST_SECONDS
from ithaca.base.torch_private import job_store, set_group_timeout

# FLOP/s that a step reaches even where it is slow, by the plain count that gives recomputation no credit
GPU_RATE = 200e12  # 20 % of Hopper's peak in bfloat16; with STEPS, any rank at 7 % of it is still waited for
CPU_CORE_RATE = 5e9  # a tenth of what a core's vector units do in float32

FLOOR = 600.0  # seconds that have nothing to do with a step's length: kernels are compiled, memory is taken, disks wait
STEPS = 3


def step_seconds(flops: float, device: torch.device, cores: int) -> float:
    """An upper estimate of the time of a step that has a rank compute `flops`, on a GPU or on `cores`."""
    return flops / (GPU_RATE if device.type == "cuda" else CPU_CORE_RATE * cores)


def timeout(step: float) -> float:
    """Seconds to wait for another rank where a step is expected to take `step` seconds."""
    return min(FLOOR + STEPS * step, MOST_SECONDS)


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """From now on, let collectives over these groups fail after so many seconds. Nothing collective."""
    for group in groups:
        set_group_timeout(group, seconds)


POLL_SECONDS = 1.0  # between two looks whether the roll is called
ANSWER_SECONDS = 5.0  # that ranks have to answer it
ASK_SECONDS = 0.2  # between two looks who has answered
STORE_SECONDS = 5.0  # after which a store that says nothing is gone

# What gloo says where a connection broke or was silent too long; it has no class of errors for that
_BROKEN = ("gloo/transport", "closed by peer", "reset by peer", "Timed out waiting")
_LATE = ("Timed out", "timed out", "timeout", "Timeout")

# Keys of the store; an attempt to run the job has a store, or a part of one, of its own
_CALLED = "ithaca/roll/called"
_TOO_LONG = "ithaca/roll/too-long"  # beside it, where the reason is a collective that took too long
_HERE, _WAITING = "ithaca/roll/here/", "ithaca/roll/waiting/"  # and a rank: it answers; it waits in a collective

_TORCH = Path(torch.__file__).parent


def lost_touch(error: BaseException) -> bool:
    """Whether this is a collective's failure that another rank may have caused."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _BROKEN)
    )


@contextmanager
def answering(group: dist.ProcessGroup) -> Iterator[None]:
    """Answer for this rank while the body works; an error that another rank caused becomes one that names it, after
    some seconds."""
    roll = _Roll(group)
    try:
        yield
    except RuntimeError as error:
        if lost := roll.explain(error):
            raise lost from error
        raise
    finally:
        roll.end()


class _Roll:
    def __init__(self, group: dist.ProcessGroup):
        self._ranks = dist.get_process_group_ranks(group)
        self._rank, self._store = dist.get_rank(), job_store()
        self._worker = threading.get_ident()  # whose whereabouts the others may want to know
        self._failed, self._ended = threading.Event(), False
        self._too_long = False
        self._verdict: LostRankError | None = None
        self._called = False  # the roll, to its end
        self._thread = threading.Thread(target=self._listen, name="roll call", daemon=True)
        if len(self._ranks) > 1:
            self._thread.start()

    def end(self) -> None:
        self._ended = True
        self._failed.set()
        if self._thread.is_alive():
            self._thread.join(POLL_SECONDS)  # a thread that comes back from the store while Python ends would abort it

    def explain(self, error: BaseException) -> LostRankError | None:
        if len(self._ranks) == 1 or not lost_touch(error):
            return None
        self._too_long = any(word in str(error) for word in _LATE)
        self._failed.set()
        self._thread.join(ANSWER_SECONDS + STORE_SECONDS)
        if self._verdict:
            return self._verdict
        if not self._called and self._rank != 0:
            return _silent([0], len(self._ranks))  # which the store lives in or, under a launcher, beside
        if isinstance(error, dist.DistError):
            return None  # NCCL has a reason of its own, and says it
        text = f"rank {self._rank} has lost the connection to others of the {len(self._ranks)} ranks"
        return LostRankError(f"{text}: their own output says why", [])

    def _listen(self) -> None:
        """Wait until someone calls the roll, here or elsewhere, and take part. A store that is gone ends it."""
        try:
            while True:
                here = self._failed.wait(POLL_SECONDS)
                if self._ended:
                    return
                if here or self._store.check([_CALLED]):
                    self._verdict = self._call()
                    self._called = True
                    return
        except RuntimeError:
            return

    def _call(self) -> LostRankError | None:
        """Answer, and wait for what the others answer."""
        place = _whereabouts(self._worker)
        self._store.set(f"{_HERE}{self._rank}", place or "-")
        if self._too_long:
            self._store.set(_TOO_LONG, "-")
        self._store.set(_CALLED, "-")
        until = time.monotonic() + ANSWER_SECONDS
        while not self._all_answered() and time.monotonic() < until:
            time.sleep(ASK_SECONDS)
        if silent := self._without(_HERE, self._ranks):
            return _silent(silent, len(self._ranks))
        if self._store.check([_TOO_LONG]) and (absent := self._without(_WAITING, self._ranks)):
            place = self._store.get(f"{_HERE}{absent[0]}").decode()
            return _absent(absent, len(self._ranks), place)
        return None

    def _all_answered(self) -> bool:
        """Whether nobody's answer can change the verdict any more."""
        # A collective that has failed was waited in; a rank seen on its way into one will wait a moment later
        if self._failed.is_set() or _whereabouts(self._worker) is None:
            self._store.set(f"{_WAITING}{self._rank}", "-")
        needed = _WAITING if self._store.check([_TOO_LONG]) else _HERE
        return self._store.check([f"{needed}{rank}" for rank in self._ranks])

    def _without(self, kind: str, ranks: list[int]) -> list[int]:
        """The ranks that have not set such a key, by halves: a request for each of a thousand takes too long."""
        if self._store.check([f"{kind}{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return self._without(kind, ranks[:middle]) + self._without(kind, ranks[middle:])


def _whereabouts(thread: int) -> str | None:
    """The innermost line outside of torch that a thread is at; None while it waits in a collective."""
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
    if len(ranks) == 1:
        text = f"{_named(ranks)} of {world} does not answer any more (it has ended or hangs): its own output says why"
    else:
        text = f"{_named(ranks)} of {world} do not answer any more (they have ended or hang): their own output says why"
    return LostRankError(text, ranks)


def _absent(ranks: list[int], world: int, place: str) -> LostRankError:
    come = "answers, but has not come" if len(ranks) == 1 else "answer, but have not come"
    text = f"{_named(ranks)} of {world} {come} to where the others wait: rank {ranks[0]} is at {place}"
    return LostRankError(text, ranks)


def _named(ranks: list[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
