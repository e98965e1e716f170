"""Processes for a run: one per GPU, or a few on a CPU, by torch's elastic launcher; under torchrun this one joins.

A rank that dies takes the job down, and the launcher starts all of it again from the last checkpoint, a few times.
What a user did wrong is no reason to start again: ranks give it back as a value. Ctrl-C reaches the ranks, which finish
their step; the launcher only passes on what was sent to it alone.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import psutil
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ithaca.config import Config
from ithaca.errors import ConfigError, IthacaError, RunError
from ithaca.model.source import load_model
from ithaca.train.loop import train
from ithaca.train.run import RunFolder

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
    train(config, path)


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
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP"  # Ctrl-C and SIGTERM are handled here
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_on)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ithaca",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=RESTARTS,
        monitor_interval=0.5,
    )
    try:
        results = elastic_launch(settings, worker)(config, path, ranks)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == 130:
            raise KeyboardInterrupt from None
        raise RunError(
            f"rank {rank} ended with code {failure.exitcode}, {RESTARTS} times over: start again with "
            f"ithaca train --run {path} once the cause is mended"
        ) from None
    for error in results.values():
        if error is not None:
            raise error


def _pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """Ranks count signals that come within a second as one, so it does no harm that a terminal sent it to all."""
    for child in psutil.Process().children(recursive=True):
        child.send_signal(number)


def worker(config: Config, path: Path, ranks: int) -> IthacaError | None:
    """One rank of the job; a user's mistake is its result."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if restarts and os.environ["RANK"] == "0":
        print(f"a rank has failed: starting again from the last checkpoint ({restarts} of {RESTARTS})", file=sys.stderr)
    if not torch.cuda.is_available():
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    try:
        train(config, path)
    except IthacaError as error:
        return error
    except Exception:
        traceback.print_exc()  # the launcher would keep it to itself
        sys.exit(1)
    return None
