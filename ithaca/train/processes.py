"""The ranks of one node as processes: started, watched, and ended as soon as one of them dies.

What a user did wrong is told through a file: the rank leaves its sentence there. Signals are blocked while ranks start,
so that none is lost or kills a rank that cannot handle it yet. No rank outlives its launcher.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import torch

from ithaca.config import Config
from ithaca.errors import IthacaError, LostRankError, RunError
from ithaca.train.loop import train
from ithaca.train.stop import SAME_SECONDS, SIGNALS

POLL_SECONDS = 0.2


class Watch:
    """Ctrl-C and SIGTERM at the launcher: the first is passed on to the ranks, the second kills them.

    While it watches, the main thread blocks the signals, so that processes it starts begin with them blocked; a thread
    that does not block them is there to receive them, and Python runs the handler in the main thread all the same.
    """

    def __init__(self) -> None:
        self.asked, self._last, self._number = 0, -SAME_SECONDS, signal.SIGINT

    def __enter__(self) -> "Watch":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        resource_tracker.ensure_running()  # it unblocks signals when it starts, so it must have started before
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if time.monotonic() - self._last > SAME_SECONDS:
            self.asked += 1
        self._last, self._number = time.monotonic(), signal.Signals(number)
        self.pass_on()

    def pass_on(self) -> None:
        """Tell the ranks that are there what was asked, if anything was."""
        for child in psutil.Process().children() if self.asked else []:
            with contextlib.suppress(psutil.Error):  # it may end just now
                if "spawn_main" in " ".join(child.cmdline()):
                    child.send_signal(self._number if self.asked == 1 else signal.SIGKILL)


def run_ranks(
    config: Config, path: Path, environment: list[dict[str, str]], watch: Watch, elsewhere: Callable[[], bool]
) -> str | None:
    """Run ranks to their end, each with its environment; how the first that died did so, None where none has.

    When `elsewhere` tells of trouble on another node they are ended too. A user's mistake is raised.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ithaca-") as notes:
        ranks = [spawn.Process(target=worker, args=(config, path, one, Path(notes))) for one in environment]
        try:
            for rank in ranks:
                rank.start()
            watch.pass_on()  # a signal may have come before they were there
            how = None
            while not how and any(rank.exitcode is None for rank in ranks) and not elsewhere():
                time.sleep(POLL_SECONDS)
                how = _death(ranks, environment)
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        if watch.asked and any(rank.exitcode for rank in ranks):
            raise KeyboardInterrupt
        if how:
            _raise_sentence(Path(notes))
    return how


def _death(ranks: list, environment: list[dict[str, str]]) -> str | None:
    """Killed ones first: those that end with a code may do so because they miss them."""
    died = [(rank.exitcode, one["RANK"]) for rank, one in zip(ranks, environment, strict=True) if rank.exitcode]
    if not died:
        return None
    code, rank = min(died)
    return f"rank {rank} was killed by signal {-code}" if code < 0 else f"rank {rank} ended with code {code}"


def _raise_sentence(notes: Path) -> None:
    """What the first rank that met a user's mistake said of it, as that error."""
    for file in sorted(notes.glob("*.sentence"), key=lambda file: file.stat().st_mtime_ns):
        code, _, text = file.read_text(encoding="utf-8").partition(" ")
        error = RunError(text) if code == "1" else IthacaError(text)
        raise error from None


def worker(config: Config, path: Path, environment: dict[str, str], notes: Path) -> None:
    """One rank of the job; what it has to say of a user's mistake goes into a file of `notes`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    launcher = multiprocessing.parent_process()
    if launcher and launcher.pid != os.getppid():
        _exit(1)  # which has died before
    os.environ.update(environment)
    if not torch.cuda.is_available():
        torch.set_num_threads(max((os.cpu_count() or 1) // int(environment["LOCAL_WORLD_SIZE"]), 1))
    try:
        train(config, path)
        return
    except LostRankError as lost:
        leave(str(lost))
    except IthacaError as error:
        code, text = error.code, str(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        code, text = 1, out_of_memory(error)
    except Exception:
        traceback.print_exc()
        _exit(1)
    partial = notes / f"{environment['RANK']}.partial"
    partial.write_text(f"{code} {text}", encoding="utf-8")
    partial.rename(partial.with_suffix(".sentence"))
    _exit(code)


def leave(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """At once: while Python takes itself apart, a thread of gloo that comes back to it now and then aborts it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def out_of_memory(error: Exception) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"out of memory ({first}): a smaller train.micro or train.tokens, or plan.checkpoint=full, takes less"
