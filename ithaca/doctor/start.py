"""The ranks of an examination: those of torchrun or srun, or processes that this one starts, as `ithaca train` does."""

import signal
from dataclasses import replace
from functools import partial

from ithaca.base.errors import ConfigError, LostRankError, RunError
from ithaca.config import Config
from ithaca.doctor.command import Options, check, examine_ranks
from ithaca.train.launch import count_ranks, find_starter, run_attempt
from ithaca.train.processes import Watch, leave
from ithaca.train.stop import SIGNALS


def start(options: Options, ranks: int | None) -> None:
    """Examine this machine's GPUs, or `ranks` processes, or the job that this process is a rank of."""
    check(options)
    default = Config()
    config = Config(
        train=replace(default.train, device=options.device or "auto"),
        run=replace(default.run, share_gpus=options.share_gpus),
    )
    starter = find_starter(config)
    if starter and ranks is not None:
        raise ConfigError(f"--ranks {ranks} cannot be given under {starter}, which starts the ranks: leave it out")
    count = 1 if starter else count_ranks(config, ranks)
    if count > 1:
        with Watch() as watch:
            how = run_attempt(partial(_examine_as_rank, options), count, 0, watch)
        if how:
            raise RunError(f"{how}, so the examination ended early")
        return
    try:
        examine_ranks(options)
    except LostRankError as lost:
        leave(f"error: {lost}")


def _examine_as_rank(options: Options) -> None:
    """Examine as a rank of the launcher, which blocks signals until a rank is ready for them. They end this one."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    examine_ranks(options)
