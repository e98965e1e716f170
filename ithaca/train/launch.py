"""Processes for a run: one per GPU, or a few on a CPU, by torch's elastic launcher; under torchrun this one joins.

A rank that dies takes the job down, and all of it is started again from the last checkpoint, a few times. What a user
did wrong is no reason to start again: the rank leaves its sentence in a file. A rank that hangs is killed by those that
wait for it in vain, and all start again likewise. Ctrl-C reaches the ranks, which finish their step and save; a second
one kills them, also where they hang. Signals are blocked while ranks start, so that none is lost or kills a rank that
cannot handle it yet.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ithaca.config import Config
from ithaca.errors import ConfigError, IthacaError, LostRankError, RunError
from ithaca.model.source import load_model
from ithaca.train.loop import train
from ithaca.train.run import RunFolder
from ithaca.train.stop import SAME_SECONDS, SIGNALS

RESTARTS = 3


def launch(config: Config, ranks: int | None, path: Path | None, fresh: bool) -> None:
    """Train on this machine's GPUs, or on `ranks` processes; raises what ended the job."""
    if "RANK" in os.environ:
        _join(config, ranks, path, fresh)
        return
    count = _count(config, ranks)
    folder = RunFolder(path or _new_folder(config))
    if fresh and (aside := folder.set_aside()):
        print(f"the old run is now {aside}")
    if not folder.has_checkpoints():
        load_model(config.model.source, config.model.dtype)  # its mistakes are better told before processes start
    if count == 1:
        train(config, folder.path)
    else:
        _start(config, folder.path, count)


def _join(config: Config, ranks: int | None, path: Path | None, fresh: bool) -> None:
    """Be one rank of a job that torchrun started."""
    if ranks is not None:
        raise ConfigError(f"--ranks {ranks} cannot be given under torchrun, which started {os.environ['WORLD_SIZE']}")
    if path is None:
        raise ConfigError("--run is missing: under torchrun name the run folder, on a disk that all nodes share")
    if fresh:
        raise ConfigError("--fresh cannot be given under torchrun, which may start ranks again: name a new --run")
    try:
        train(config, path)
    except LostRankError as lost:
        _leave(f"error: {lost}; the run goes on from its last checkpoint with ithaca train --run {path}")


def _count(config: Config, ranks: int | None) -> int:
    gpus = torch.cuda.device_count() if config.train.device != "cpu" else 0
    if config.train.device == "cuda" and not gpus:
        raise ConfigError("train.device is 'cuda', but there is no CUDA GPU here: 'cpu' or 'auto' works")
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks {count} cannot be started: 1 or more can")
    if gpus and count > gpus:
        raise ConfigError(f"--ranks {count} cannot be started: this machine has {gpus} GPUs, so 1 to {gpus} can")
    return count


def _new_folder(config: Config) -> Path:
    """runs/<model>-001, or the first number that is free."""
    name, number = Path(config.model.source).name, 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path


def _start(config: Config, path: Path, ranks: int) -> None:
    # The launcher's own reports of a failure repeat, at length, what the failing rank has said
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _Watch() as watch:
        for attempt in range(RESTARTS + 1):
            if _attempt(config, path, ranks, attempt, watch):
                return


def _attempt(config: Config, path: Path, ranks: int, attempt: int, watch: "_Watch") -> bool:
    """Run the job once. True when it has ended, False when it died and may be started again."""
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ithaca",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGQUIT",  # the others are handled here
    )
    with tempfile.TemporaryDirectory(prefix="ithaca-") as notes:
        try:
            elastic_launch(settings, worker)(config, path, ranks, Path(notes))
            return True
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if watch.asked:
                raise KeyboardInterrupt from None
            _raise_sentence(Path(notes))
    how = f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else f"ended with code {failure.exitcode}"
    if attempt == RESTARTS:
        raise RunError(
            f"rank {rank} {how}, the {RESTARTS + 1}th time over: mend the cause, then ithaca train --run {path}"
        )
    print(f"rank {rank} {how}: starting again from the last checkpoint ({attempt + 1} of {RESTARTS})", file=sys.stderr)
    return False


def _raise_sentence(notes: Path) -> None:
    """What the first rank that met a user's mistake said of it, as that error."""
    for file in sorted(notes.glob("*.sentence"), key=lambda file: file.stat().st_mtime_ns):
        code, _, text = file.read_text(encoding="utf-8").partition(" ")
        error = RunError(text) if code == "1" else IthacaError(text)
        raise error from None


class _Watch:
    """Ctrl-C and SIGTERM at the launcher: the first is passed on to the ranks, the second kills them.

    While it watches, the main thread blocks the signals, so that processes it starts begin with them blocked; a thread
    that does not block them is there to receive them, and Python runs the handler in the main thread all the same.
    """

    def __init__(self) -> None:
        self.asked, self._last = 0, -SAME_SECONDS

    def __enter__(self) -> "_Watch":
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
        self._last = time.monotonic()
        for child in psutil.Process().children():
            if "spawn_main" in " ".join(child.cmdline()):
                child.send_signal(number if self.asked == 1 else signal.SIGKILL)


def worker(config: Config, path: Path, ranks: int, notes: Path) -> None:
    """One rank of the job; what it has to say of a user's mistake goes into a file of `notes`, and so does its id."""
    rank = os.environ["RANK"]
    (notes / f"{rank}.process").write_text(str(os.getpid()))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its launcher
    if not torch.cuda.is_available():
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    try:
        train(config, path)
        return
    except LostRankError as lost:
        _kill(notes, lost.ranks)
        _leave(str(lost))
    except IthacaError as error:
        code, text = error.code, str(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        code, text = 1, out_of_memory(error)
    except Exception:
        traceback.print_exc()  # the launcher would keep it to itself
        sys.exit(1)
    (notes / f"{rank}.sentence").write_text(f"{code} {text}", encoding="utf-8")
    _exit(code)


def _kill(notes: Path, ranks: list[int]) -> None:
    """End ranks that hang: the launcher would first ask them to end, and wait half a minute for it."""
    theirs = {int(file.read_text()) for rank in ranks if (file := notes / f"{rank}.process").exists()}
    for sibling in psutil.Process(os.getppid()).children():
        if sibling.pid in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):
                sibling.kill()


def _leave(text: str) -> NoReturn:
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
