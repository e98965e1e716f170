"""The ranks of an examination: those of torchrun or srun, or processes that this one starts, as `ithaca train` does."""

from dataclasses import replace
from functools import partial

from ithaca.config import Config
from ithaca.doctor.command import Options, check, examine_ranks
from ithaca.train.ranks.launch import run_once


def start(options: Options, ranks: int | None) -> None:
    """Examine this machine's GPUs, or `ranks` processes, or the job that this process is a rank of."""
    check(options)
    default = Config()
    config = Config(
        train=replace(default.train, device=options.device or "auto"),
        run=replace(default.run, share_gpus=options.share_gpus),
    )
    run_once(partial(examine_ranks, options), config, ranks, "the examination")
