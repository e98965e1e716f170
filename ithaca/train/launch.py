"""Processes for a run: one per GPU, or a few on a CPU, by torch's elastic launcher; under torchrun this one joins."""

import logging
import os
import sys
import traceback

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ithaca.config import Config
from ithaca.errors import ConfigError, IthacaError
from ithaca.model.source import load_model
from ithaca.train.loop import train

USER_ERROR = 2


def launch(config: Config, ranks: int | None) -> None:
    """Train on this machine's GPUs or on `ranks` processes, and end with the job's exit code if it failed."""
    if "RANK" in os.environ:
        if ranks is not None:
            raise ConfigError(
                f"--ranks {ranks} cannot be given under torchrun, which started {os.environ['WORLD_SIZE']}"
            )
        train(config)
        return
    gpus = torch.cuda.device_count()
    ranks = (gpus or 2) if ranks is None else ranks
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} cannot be started: 1 or more can")
    if gpus and ranks > gpus:
        raise ConfigError(f"--ranks {ranks} cannot be started: this machine has {gpus} GPUs, so 1 to {gpus} can")
    load_model(config.model.source, config.model.dtype)  # its mistakes are better told before processes start
    if ranks == 1:
        train(config)
        return
    # The launcher's own reports of a failure repeat, at length, what the failing rank has said
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ithaca",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, worker)(config, ranks)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode == USER_ERROR:
            sys.exit(USER_ERROR)
        print(f"error: rank {rank} ended with code {failure.exitcode}", file=sys.stderr)
        sys.exit(1)


def worker(config: Config, ranks: int) -> None:
    """One rank of the job."""
    if not torch.cuda.is_available():
        torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    try:
        train(config)
    except IthacaError as error:
        if os.environ["RANK"] == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except Exception:
        traceback.print_exc()  # the launcher would keep it to itself
        sys.exit(1)
