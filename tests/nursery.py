"""Whole commands and whole jobs for tests, forked from a process that has run nothing: 0.2 s instead of 5.

The nursery is forked before the first test; each request forks from it again, so that every job begins as fresh as a
started program, with torch imported already. Ranks that a command starts are forked too, not spawned as for users.
"""

import functools
import gc
import io
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.run import main as torchrun

from ithaca.base import torch_private
from ithaca.base.parent import end_with_parent
from ithaca.cli import main
from ithaca.train.ranks import launch, processes
from ithaca.train.ranks.stop import SIGNALS
from ithaca.train.setup import start

SECONDS = 900  # a job that takes longer hangs, however busy the machine is


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it said."""

    code: int  # negative: the signal that killed it
    out: str
    err: str


class Nursery:
    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, os.getpid()))
        self._process.start()

    def job(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        kill_after: float | None = None,
        signals: tuple[tuple[float, int], ...] = (),
    ) -> list[Ended]:
        """Call a function in every rank of a gloo job; signals, as (seconds, which), go to all of them."""
        timed = (*signals, (kill_after, signal.SIGKILL)) if kill_after is not None else signals
        return self._ask(_run, function, args, ranks, tuple(sorted(timed)))

    def command(self, *words: str, folder: Path, **more: Any) -> Ended:
        """`ithaca …` as a user types it, in a folder."""
        return self.job(_command, words, folder, **more)[0]

    def commands(
        self, *commands: tuple[list[str], dict[str, str]], folder: Path, disturb: Callable[[list[int]], None]
    ) -> list[Ended]:
        """Several commands at the same time, each with variables of its environment; `disturb` is given their ids."""
        return self._ask(_run_commands, commands, folder, disturb)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        self._pipe.send((function, args))
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise AssertionError(answer)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Any, parent: int) -> None:
    if not end_with_parent(parent):
        return
    _do_once()
    gc.collect()
    gc.freeze()
    while True:
        try:
            function, args = pipe.recv()
            pipe.send(function(*args))
        except EOFError:
            return
        except Exception:
            pipe.send(traceback.format_exc())


def _do_once() -> None:
    """Import, read and draw here what every job would import, read and draw again."""
    import matplotlib.pyplot as pyplot

    import ithaca.train.ranks.launch  # noqa: F401

    start.standard_library = functools.cache(start.standard_library)  # pyrefly: ignore
    start.standard_library()
    pyplot.switch_backend("Agg")
    pyplot.plot([1])
    pyplot.savefig(io.BytesIO())
    pyplot.close()


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], ranks: int, signals: tuple[tuple[float, int], ...]
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        children = {rank: _fork(function, args, rank, ranks, Path(folder)) for rank in range(ranks)}
        codes: dict[int, int] = {}
        waiting = list(signals)
        while len(codes) < ranks:
            if time.monotonic() - began > SECONDS:
                waiting = [(0, signal.SIGKILL)]
            if waiting and time.monotonic() - began >= waiting[0][0]:
                _, number = waiting.pop(0)
                for rank, child in children.items():
                    if rank not in codes:
                        os.kill(child, number)
            for rank, child in children.items():
                if rank not in codes and (code := _code(child)) is not None:
                    codes[rank] = code
            time.sleep(0.005)
        return [_ended(Path(folder), rank, codes[rank]) for rank in range(ranks)]


def _run_commands(
    commands: list[tuple[list[str], dict[str, str]]], folder: Path, disturb: Callable[[list[int]], None]
) -> list[Ended]:
    with tempfile.TemporaryDirectory() as notes:
        children = [
            _fork(_command, (words, folder, environ), number, 1, Path(notes))
            for number, (words, environ) in enumerate(commands)
        ]
        codes: dict[int, int] = {}
        try:
            disturb(children)
            until = time.monotonic() + SECONDS
            while len(codes) < len(children) and time.monotonic() < until:
                for child in children:
                    if child not in codes and (code := _code(child)) is not None:
                        codes[child] = code
                time.sleep(0.02)
        finally:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
                    codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [_ended(Path(notes), number, codes[child]) for number, child in enumerate(children)]


def _code(child: int) -> int | None:
    """How a process ended, as `Ended.code` has it; None while it runs."""
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # what pytest put there is not theirs
        torch.set_num_threads(1)
        if ranks > 1:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
            )
            # A rank that ends while others still connect would be their error
            store = torch_private.job_store()
            store.set(f"connected/{rank}", "yes")
            store.wait([f"connected/{other}" for other in range(ranks)], timedelta(seconds=SECONDS))
        function(*args)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ended(folder: Path, rank: int, code: int) -> Ended:
    files = [folder / f"{name}{rank}" for name in ("out", "err")]
    said = [file.read_text(errors="replace") if file.exists() else "" for file in files]  # killed before it had them
    return Ended(code, *said)


def _command(words: tuple[str, ...], folder: Path, environ: dict[str, str] | None = None) -> None:
    """`ithaca …`, `torchrun …` or a module (`-m …`), in a session of its own as a terminal gives it."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(environ or {})
    sys.argv = ["ithaca", *words]
    if words[0] == "torchrun":
        torchrun(words[1:])
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__")
    else:
        fork_ranks()
        main()


def fork_ranks() -> None:
    """Let the launcher in this process fork its ranks."""
    fork, worker = multiprocessing.get_context("fork"), processes.worker

    def worker_like_spawned(*args: Any) -> None:
        """Without the handlers that a fork inherits."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        worker(*args)

    launch._open_store = functools.partial(_StoreElsewhere, launch._open_store)  # pyrefly: ignore
    os.cpu_count = lambda: 1  # of which each rank gets its share as threads; see conftest.py
    processes.multiprocessing.get_context = lambda _: fork  # pyrefly: ignore
    processes.worker = worker_like_spawned


class _StoreElsewhere:
    """The launcher's store in a process of its own, which ends with the launcher and its ranks.

    The store has a thread, which takes the lock of glibc's resolver for each connection (getnameinfo). A rank that is
    forked at that moment would wait for this lock for ever. Users' ranks are spawned.
    """

    def __init__(self, open_store: Callable[[], Any]):
        port, self._held = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            if not os.fork():  # a grandchild: the launcher's children are its ranks alone
                os.close(self._held[1])
                os.setsid()
                store = open_store()
                os.write(port[1], str(store.port).encode())
                os.close(port[1])
                os.read(self._held[0], 1)  # returns when the last process that holds the other end is gone
            os._exit(0)
        os.waitpid(child, 0)
        os.close(port[1])
        os.close(self._held[0])
        with os.fdopen(port[0]) as said:
            self.port = int(said.read() or open_store().port)  # which raises its error here

    def __del__(self) -> None:
        os.close(self._held[1])


def ranks_of(launcher: int) -> list[psutil.Process]:
    """A launcher's ranks; beside them it has a process of multiprocessing's."""
    children = psutil.Process(launcher).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
