"""Start the processes of a run on this node: one per GPU, or a few on a CPU. Several nodes: torchrun or srun.

Under torchrun or srun this process is one rank of the job that they started.

On one node: if a rank dies, or hangs longer than the timeout, all ranks end and the run restarts from its last
checkpoint. It restarts a few times in a row; a new checkpoint in between starts the count again. A user's mistake does
not restart. The first Ctrl-C reaches the ranks, which finish their step and save. The second one kills them, also if
they hang.
"""

import itertools
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ithaca.base.errors import ConfigError, LostRankError, RunError, first_line, shown
from ithaca.base.shell import continue_command
from ithaca.base.sizes import format_bytes
from ithaca.config import Config
from ithaca.parallel.joining import read_job
from ithaca.tape.budget import host_budget
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks.elastic import leave
from ithaca.train.ranks.processes import Watch, run_ranks
from ithaca.train.ranks.slurm import Step, read_step
from ithaca.train.ranks.stop import SIGNALS, show_cursor
from ithaca.train.report.conclusion import stopped_at_once
from ithaca.train.report.report import tell
from ithaca.train.run import train
from ithaca.train.setup.origin import Origin, check_origin, find_origin
from ithaca.train.setup.start import load_source

CPU_RANKS = 1024
RANK_BYTES = 250 * 10**6  # of host memory: Python, torch and its libraries, before a rank has a model
LOOPBACK = "127.0.0.1"
STORE_SECONDS = 30.0  # that the launcher has to reach the store that it has opened
RESTARTS = 3  # in a row, without a new checkpoint in between


def launch(
    config: Config,
    ranks: int | None,
    path: Path | None,
    fresh: bool,
    nodes: int | None = None,
    meeting_place: str | None = None,
    origin: Origin | None = None,
) -> Path:
    """Train on this machine's GPUs, or on `ranks` processes, or as one rank under torchrun or srun.

    Return the run folder.
    """
    if nodes is not None or meeting_place is not None:
        _refuse_nodes(nodes, meeting_place)
    if starter := find_starter(config):
        return _join(config, ranks, path, fresh, starter, origin)
    return _launch_alone(config, ranks, path, fresh, origin)


def find_starter(config: Config) -> str | None:
    """Return 'torchrun' or 'srun' if it started this process as a rank. For srun, set torchrun's variables."""
    if "RANK" in os.environ:
        read_job()  # raises an error if RANK was set by something else than torchrun
        return "torchrun"
    if step := read_step(os.environ):
        _check_tasks(step, config)
        os.environ.update(_task_environment(step))
        return "srun"
    return None


def torchrun_line(nodes: str, host: str) -> str:
    """The line that starts a run of several nodes, on each of them."""
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint {host} "
        "--max-restarts 3 -m -- ithaca train … --run DIR"
    )


def _refuse_nodes(nodes: int | None, meeting_place: str | None) -> NoReturn:
    """Raise an error about the former options --nodes and --meet, with the command that replaces them."""
    given = {"--nodes": nodes, "--meet": meeting_place}
    words = " ".join(f"{name} {shown(value)}" for name, value in given.items() if value is not None)
    if nodes == 1 and meeting_place is None:
        raise ConfigError(f"{words} is the default: leave it out to train on this node alone")
    count = str(nodes) if nodes and nodes > 1 else "2"
    host = meeting_place if meeting_place and re.fullmatch(r"[\w.:\[\]-]{1,255}", meeting_place) else "node0:29500"
    raise ConfigError(f"{words} is not an option any more: start on each node {torchrun_line(count, host)}")


def _launch_alone(config: Config, ranks: int | None, path: Path | None, fresh: bool, origin: Origin | None) -> Path:
    count = count_ranks(config, ranks)
    folder = RunFolder(path or _new_folder(config))
    if fresh and origin:
        check_origin(folder, origin, config)  # before the old run is moved
    with _set_aside(folder) if fresh else nullcontext():
        # Report mistakes before processes start
        found = find_origin(folder, origin, config)
        if found or not folder.has_checkpoints():
            load_source(config, found.model if found else None)
        if count == 1:
            train(config, folder.path, origin=origin)
        else:
            _start(config, count, folder.path, origin)
    return folder.path


@contextmanager
def _set_aside(folder: RunFolder) -> Iterator[None]:
    """Rename an old run while the body starts a fresh one in its place. If that does not begin, rename it back."""
    if aside := folder.set_aside():
        tell(f"Moved the old run to {aside}", sys.stdout)
    try:
        yield
    finally:
        if aside and not os.path.lexists(folder.path):
            aside.rename(folder.path)
            tell(f"Moved it back to {folder.path}: nothing was started", sys.stdout)


def _join(
    config: Config, ranks: int | None, path: Path | None, fresh: bool, starter: str, origin: Origin | None
) -> Path:
    """Train as one rank of a job that torchrun or srun started."""
    if ranks is not None:
        raise ConfigError(
            f"--ranks {ranks} cannot be given under {starter}, which started {os.environ['WORLD_SIZE']} ranks"
        )
    if path is None:
        raise ConfigError(f"--run is missing: under {starter} name the run folder, on a disk that all nodes share")
    if fresh:
        raise ConfigError(f"--fresh cannot be given under {starter}, which may start ranks again: name a new --run")
    try:
        train(config, path, origin=origin)
    except LostRankError as lost:
        leave(f"error: {lost}; continue from the last checkpoint with {continue_command(path)}")
    return path


def _task_environment(step: Step) -> dict[str, str]:
    """Return the environment of a SLURM task as a rank. The user's MASTER_ADDR and MASTER_PORT win."""
    given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    only = {"LOCAL_RANK": "0"} if torch.cuda.device_count() == 1 else {}  # the one GPU that SLURM shows this task
    return {**step.environment(), **given, **only}


def _check_tasks(step: Step, config: Config) -> None:
    """A task is a rank. Refuse one task for several GPUs: the others would stay idle."""
    gpus = torch.cuda.device_count() if config.train.device != "cpu" else 0
    if step.one_per_node and gpus > 1:
        line = torchrun_line(str(len(step.tasks)), f"{step.hosts[0]}:{step.port}")
        raise ConfigError(
            f"srun started 1 task on each of {len(step.tasks)} nodes, but this node has {gpus} GPUs: start a task for "
            f"each, as srun --ntasks-per-node={gpus}, or let torchrun start the ranks, as srun {line}"
        )


def count_ranks(config: Config, ranks: int | None) -> int:
    """Return how many ranks to start on this node: one per GPU, or 2 on a CPU, unless a number was given."""
    gpus = torch.cuda.device_count() if config.train.device != "cpu" else 0
    if config.train.device == "cuda" and not gpus:
        raise ConfigError("train.device is 'cuda', but there is no CUDA GPU here: 'cpu' or 'auto' works")
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks is {count}: 1 or more is needed")
    if gpus and count > gpus and not config.run.share_gpus:
        raise ConfigError(
            f"--ranks is {count}, but this machine has {gpus} GPUs: 1 to {gpus} work, more with run.share_gpus=true "
            "(--share-gpus of ithaca doctor)"
        )
    if count > CPU_RANKS:
        raise ConfigError(f"--ranks is {count}: 1 to {CPU_RANKS} work on a CPU")
    if not gpus:
        _check_host(count)
    return count


def _check_host(count: int) -> None:
    """Raise an error if this many processes need more memory than this machine has free, before one has a model."""
    free = host_budget()[0]
    if count > (most := max(free // RANK_BYTES, 1)):
        raise ConfigError(
            f"--ranks is {count}, which take about {format_bytes(count * RANK_BYTES)} of host memory, of which "
            f"{format_bytes(free)} are free: --ranks {most} works"
        )


def _new_folder(config: Config) -> Path:
    """Return runs/<model>-001, or the first number that is free."""
    name, number = Path(config.model.source).name, 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path


def _start(config: Config, count: int, path: Path, origin: Origin | None = None) -> None:
    """Train on processes of this node. Restart all of them when one dies."""
    with Watch() as watch:
        folder, failures = RunFolder(path), 0  # in a row
        saved = folder.last_checkpoint()
        for attempt in itertools.count():
            try:
                how = run_attempt(partial(train, config, path, launched=True, origin=origin), count, attempt, watch)
            except KeyboardInterrupt:
                if watch.asked > 1:
                    _tell_ending(folder)
                raise
            if how is None:
                return
            newest = folder.last_checkpoint()
            failures, saved = (1 if newest > saved else failures + 1), max(saved, newest)
            if failures > RESTARTS:
                raise RunError(
                    f"{how}, and {RESTARTS} restarts in a row made no new checkpoint: fix the cause, then continue "
                    f"with {continue_command(path)}"
                )
            again = f"Restarting from the last checkpoint ({failures} of {RESTARTS})"
            tell(f"{how[0].upper()}{how[1:]}. {again}", sys.stderr)


def _tell_ending(folder: RunFolder) -> None:
    """Say what is left of a run whose ranks were killed at a second Ctrl-C."""
    try:
        steps = [line["step"] for line in folder.read_metrics("step")]
    except OSError:
        steps = []
    show_cursor()
    tell(f"\n{stopped_at_once(folder, max(steps, default=0))}", sys.stderr)


def run_once(work: Callable[[], None], config: Config, ranks: int | None, what: str) -> None:
    """Do a job that is never restarted, on this machine's GPUs, on `ranks` processes, or as a rank of torchrun."""
    starter = find_starter(config)
    if starter and ranks is not None:
        raise ConfigError(f"--ranks {ranks} cannot be given under {starter}, which starts the ranks: leave it out")
    count = 1 if starter else count_ranks(config, ranks)
    if count > 1:
        with Watch() as watch:
            how = run_attempt(partial(_as_rank, work), count, 0, watch)
        if how:
            raise RunError(f"{how}, so {what} ended early")
        return
    try:
        work()
    except LostRankError as lost:
        leave(f"error: {lost}")


def _as_rank(work: Callable[[], None]) -> None:
    """Work as a rank of the launcher, which blocks signals until a rank unblocks them. Signals end this rank."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    work()


def run_attempt(work: Callable[[], None], count: int, attempt: int, watch: Watch) -> str | None:
    """Run a job once on processes of this node. Return how the first rank died; None if none did."""
    store = _open_store()
    return run_ranks(work, _environments(count, store.port, attempt), watch)


def _environments(count: int, port: int, attempt: int) -> list[dict[str, str]]:
    """The environment variables by which each rank joins the others in this attempt."""
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: rank 0 must not open one
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _open_store() -> dist.TCPStore:
    """Open torch's store for the ranks of an attempt, in this process, so that no rank's death ends it.

    It gets a socket of the loopback interface. torch's own socket takes connections on every interface.
    """
    try:
        with socket.socket() as opened:
            opened.bind((LOOPBACK, 0))
            port, fd = opened.getsockname()[1], opened.detach()
        wait = timedelta(seconds=STORE_SECONDS)
        return dist.TCPStore(LOOPBACK, port, None, True, timeout=wait, wait_for_workers=False, master_listen_fd=fd)
    except (OSError, dist.DistError) as problem:
        raise RunError(
            f"the store of the ranks cannot be opened at {LOOPBACK} ({first_line(problem)}): "
            "allow more open files, as ulimit -n 4096"
        ) from None
