"""The ranks of one node as processes: started, watched, and ended when one of them dies.

A rank reports a user's mistake through a pipe. Signals are blocked while ranks start, so that none is lost and none
kills a rank that has no handlers yet. A rank that has finished ignores them. No rank outlives its launcher.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

import torch
import torch.distributed as dist

from ithaca.base.errors import IthacaError, LostRankError, RunError, first_line
from ithaca.base.parent import end_with_parent
from ithaca.train.ranks.elastic import exit_now, leave
from ithaca.train.ranks.stop import SIGNALS, Requests, stop_signals

POLL_SECONDS = 0.2
GONE_SECONDS = 10.0  # that the launcher waits at its end for ranks that it has killed
SENTENCE = 2000  # characters, which a pipe takes at once: no rank waits for its launcher to read


class Watch:
    """Ctrl-C, SIGTERM and SIGHUP at the launcher: the first is forwarded to the ranks, the second kills them.

    While it watches, the main thread blocks the signals, so that processes it starts begin with them blocked; a thread
    that does not block them is there to receive them, and Python runs the handler in the main thread all the same.
    """

    def __init__(self) -> None:
        self.ranks: list[BaseProcess] = []  # those that have been started
        self._requests = Requests()

    @property
    def asked(self) -> int:
        """How often a user has asked to stop."""
        return self._requests.count

    def __enter__(self) -> "Watch":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        with _starting("multiprocessing's resource tracker"):
            resource_tracker.ensure_running()  # it unblocks signals when it starts, so it must have started before
        self._handlers = {number: signal.signal(number, self._handle) for number in stop_signals()}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._requests.add(number):
            self.forward_request()

    def forward_request(self) -> None:
        """Forward the requests so far to the ranks that run."""
        for rank in self.ranks if self.asked else []:
            rank.terminate() if self.asked == 1 else rank.kill()


@dataclass(frozen=True)
class Rank:
    """A rank, seen from its launcher."""

    number: str
    process: BaseProcess
    pipe: Connection  # on which it reports a user's mistake


def run_ranks(work: Callable[[], None], environments: list[dict[str, str]], watch: Watch) -> str | None:
    """Do work on ranks to its end, each with its environment. Return how the first rank died; None if none did.

    A user's mistake is raised.
    """
    ranks: list[Rank] = []
    try:
        for environment in environments:
            ranks.append(_start(work, environment))
            watch.ranks.append(ranks[-1].process)
        watch.forward_request()  # a signal may have come before the ranks had started
        while not _death(ranks) and _alive(ranks):
            time.sleep(POLL_SECONDS)
        how = _death(ranks)
        _kill(ranks)
        while _alive(ranks) and watch.asked < 2:  # a rank that waits for a disk or a driver takes its time
            time.sleep(POLL_SECONDS)
    finally:
        _kill(ranks)
        until = time.monotonic() + GONE_SECONDS
        for rank in ranks:
            rank.process.join(max(until - time.monotonic(), 0))
        watch.ranks.clear()
    _raise_sentence(ranks)
    if watch.asked and any(rank.process.exitcode != 0 for rank in ranks):
        raise KeyboardInterrupt
    return how


def _start(work: Callable[[], None], environment: dict[str, str]) -> Rank:
    spawn = multiprocessing.get_context("spawn")
    with _starting(f"rank {environment['LOCAL_RANK']} of the {environment['LOCAL_WORLD_SIZE']} on this node"):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=worker, args=(work, environment, theirs))
        process.start()
        theirs.close()
    return Rank(environment["RANK"], process, ours)


@contextlib.contextmanager
def _starting(process: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise RunError(
            f"{process} could not be started ({problem.strerror}): "
            "allow more files and processes, as ulimit -n 4096 -u 4096, or fewer --ranks"
        ) from None


def _alive(ranks: list[Rank]) -> bool:
    return any(rank.process.exitcode is None for rank in ranks)


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.process.kill()


def _death(ranks: list[Rank]) -> str | None:
    """Return how a rank died. Killed ranks come first: the others may have failed because of them."""
    died = [(rank.process.exitcode, rank.number) for rank in ranks if rank.process.exitcode]
    if not died:
        return None
    code, number = min(died)
    return f"rank {number} was killed by signal {-code}" if code < 0 else f"rank {number} ended with code {code}"


def _raise_sentence(ranks: list[Rank]) -> None:
    """Raise the user's mistake that a rank reported first, if one did."""
    said = []
    for rank in ranks:
        with contextlib.suppress(EOFError, OSError):  # it reported nothing
            if rank.pipe.poll():
                said.append(rank.pipe.recv())
    if said:
        _, code, text = min(said)
        raise RunError(text) if code == RunError.code else IthacaError(text)


def worker(work: Callable[[], None], environment: dict[str, str], pipe: Connection) -> None:
    """Run one rank of the job. It reports a user's mistake through the pipe."""
    launcher = multiprocessing.parent_process()
    if launcher is not None and not end_with_parent(launcher.pid or 0):
        exit_now(1)
    for number in stop_signals():
        signal.signal(number, _ignore)  # a signal after the last step must not kill a rank
    os.environ.update(environment)
    if not torch.cuda.is_available():
        torch.set_num_threads(max((os.cpu_count() or 1) // int(environment["LOCAL_WORLD_SIZE"]), 1))
    try:
        work()
        dist.destroy_process_group()  # NCCL warns about a group that is not destroyed
        exit_now(0)
    except LostRankError as lost:
        leave(str(lost))
    except IthacaError as error:
        code, text = error.code, str(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        code, text = 1, out_of_memory(error)
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        exit_now(1)
    pipe.send((time.monotonic(), code, text[:SENTENCE]))
    exit_now(code)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore a signal. SIG_IGN would drop a blocked one, which StopRequest must still get."""


def out_of_memory(error: Exception) -> str:
    advice = "a smaller train.micro_batch or train.tokens, or plan.checkpoint=full, takes less"
    return f"out of memory ({first_line(error)}): {advice}"
