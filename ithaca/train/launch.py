"""Start the processes of a run: one per GPU, or a few on a CPU, on one node or on several.

Under torchrun or srun this process is one rank of the job that they started.

If a rank dies, or hangs longer than the timeout, all ranks on all nodes end and the run restarts from its last
checkpoint. It restarts a few times in a row; a new checkpoint in between starts the count again. A user's mistake does
not restart. The first Ctrl-C reaches the ranks, which finish their step and save. The second one kills them, also if
they hang.
"""

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch

from ithaca.base.errors import ConfigError, LostRankError, RunError
from ithaca.config import AUTO, Config
from ithaca.model.source import load_model
from ithaca.train.loop import train
from ithaca.train.nodes import ALONE, Meeting, Place, meet, read_place
from ithaca.train.processes import Watch, leave, run_ranks
from ithaca.train.report import tell
from ithaca.train.run_folder import RunFolder
from ithaca.train.slurm import Step, read_step

CPU_RANKS = 1024
RESTARTS = 3  # in a row, without a new checkpoint in between


def launch(
    config: Config,
    ranks: int | None,
    path: Path | None,
    fresh: bool,
    nodes: int | None = None,
    meeting_place: str | None = None,
) -> None:
    """Train on this machine's GPUs, or on `ranks` processes, and on other nodes too. Raise the error of the job."""
    options = {"--ranks": ranks, "--nodes": nodes, "--meet": meeting_place}
    if "RANK" in os.environ:
        _check_environment()
        _join(config, options, path, fresh, "torchrun")
        return
    step = read_step(os.environ) if nodes is None else None  # --nodes wins over SLURM
    if step and not step.one_per_node:
        os.environ.update(_task_environment(step))
        _join(config, options, path, fresh, "srun")
        return
    if step:
        nodes, meeting_place = len(step.tasks), meeting_place or f"{step.hosts[0]}:{step.port}"
    place = _place(nodes, meeting_place, path, fresh)
    if place is ALONE:
        _launch_alone(config, ranks, path, fresh)
    else:
        assert path is not None
        _start(config, ranks, path, place, nodes or 1)


def _launch_alone(config: Config, ranks: int | None, path: Path | None, fresh: bool) -> None:
    count = _count(config, ranks)
    folder = RunFolder(path or _new_folder(config))
    if fresh and (aside := folder.set_aside()):
        print(f"Moved the old run to {aside}")
    if not folder.has_checkpoints():
        load_model(config.model.source, config.model.dtype)  # report its mistakes before processes start
    if count == 1:
        train(config, folder.path)
    else:
        _start(config, count, folder.path, ALONE, 1)


def _join(config: Config, options: Mapping[str, object], path: Path | None, fresh: bool, starter: str) -> None:
    """Train as one rank of a job that torchrun or srun started."""
    for option, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{option} {value} cannot be given under {starter}, which started {os.environ['WORLD_SIZE']} ranks"
            )
    if path is None:
        raise ConfigError(f"--run is missing: under {starter} name the run folder, on a disk that all nodes share")
    if fresh:
        raise ConfigError(f"--fresh cannot be given under {starter}, which may start ranks again: name a new --run")
    try:
        train(config, path)
    except LostRankError as lost:
        leave(f"error: {lost}; continue from the last checkpoint with ithaca train --run {path}")


def _check_environment() -> None:
    """Raise an error if RANK was set by something else than torchrun."""
    rank = os.environ["RANK"]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"the environment has RANK={rank}, as torchrun sets it, but no {name}: "
                "unset RANK to train on this machine's GPUs"
            )
    ranks = os.environ["WORLD_SIZE"]
    if not (_is_number(rank) and _is_number(ranks) and int(rank) < int(ranks)):
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={ranks}, which is no rank of a job: "
            "unset both to train on this machine's GPUs"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _task_environment(step: Step) -> dict[str, str]:
    """Return the environment of a SLURM task as a rank. The user's MASTER_ADDR and MASTER_PORT win."""
    given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    shown = {"LOCAL_RANK": "0"} if torch.cuda.device_count() == 1 else {}
    return {**step.environment(), **given, **shown}


def _place(nodes: int | None, meeting_place: str | None, path: Path | None, fresh: bool) -> Place:
    """Return the place where the launchers of several nodes meet."""
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes is {nodes}: 1 or more is needed")
    if nodes is None or nodes == 1:
        if meeting_place is not None:
            number = "is not given" if nodes is None else "is 1"
            raise ConfigError(
                f"--meet {meeting_place} is for several nodes, but --nodes {number}: give their number, as --nodes 2"
            )
        return ALONE
    if meeting_place is None:
        raise ConfigError(f"--meet is missing: name the one of the {nodes} nodes where they meet, as --meet node0")
    if path is None:
        raise ConfigError(f"--run is missing: name the run folder, on a disk that all {nodes} nodes share")
    if fresh:
        raise ConfigError(f"--fresh cannot be given with --nodes {nodes}, each of which would do it: name a new --run")
    return read_place(meeting_place)


def _count(config: Config, ranks: int | None) -> int:
    gpus = torch.cuda.device_count() if config.train.device != "cpu" else 0
    if config.train.device == "cuda" and not gpus:
        raise ConfigError("train.device is 'cuda', but there is no CUDA GPU here: 'cpu' or 'auto' works")
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks is {count}: 1 or more is needed")
    if gpus and count > gpus:
        raise ConfigError(f"--ranks is {count}, but this machine has {gpus} GPUs: 1 to {gpus} work")
    if count > CPU_RANKS:
        raise ConfigError(f"--ranks is {count}: 1 to {CPU_RANKS} work on a CPU")
    return count


def _new_folder(config: Config) -> Path:
    """Return runs/<model>-001, or the first number that is free."""
    name, number = Path(config.model.source).name, 1
    while (path := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return path


def _start(config: Config, ranks: int | None, path: Path, place: Place, nodes: int) -> None:
    """Train on processes of this node and of the other nodes. Restart all of them when one dies."""
    with Watch() as watch, meet(place, nodes, lambda: watch.asked) as meeting:
        count = _count(config, ranks)
        if nodes > 1:
            tell(f"Waiting on {meeting.name} for {nodes} nodes to meet at {place}", sys.stdout)
        meeting.number_ranks(count, _options(config))
        if nodes > 1:
            first, last = meeting.ranks[0], meeting.ranks[-1]
            tell(f"Ranks {first} to {last} of {meeting.world} run on {meeting.name}", sys.stdout)
        folder, failures = RunFolder(path), 0  # in a row
        saved = meeting.newest("start", folder.last_checkpoint())
        for attempt in itertools.count():
            how = _attempt(config, path, attempt, meeting, watch)
            if how is None:
                return
            newest = meeting.newest(f"attempt {attempt}", folder.last_checkpoint())
            failures, saved = (1 if newest > saved else failures + 1), max(saved, newest)
            if failures > RESTARTS:
                raise RunError(
                    f"{how}, and {RESTARTS} restarts in a row made no new checkpoint: fix the cause, then continue "
                    f"with ithaca train --run {path}"
                )
            again = f"Restarting from the last checkpoint ({failures} of {RESTARTS})"
            tell(f"{how[0].upper()}{how[1:]}. {again}", sys.stderr)


def _options(config: Config) -> dict[str, str]:
    """Return all options by name, as text that nodes can compare."""
    sections = {section.name: getattr(config, section.name) for section in fields(config)}
    sections["plan"] = config.plan or SimpleNamespace(recipe=AUTO)
    return {
        f"{section}.{name}": repr(value)
        for section, options in sections.items()
        for name, value in vars(options).items()
    }


def _attempt(config: Config, path: Path, attempt: int, meeting: Meeting, watch: Watch) -> str | None:
    """Run the job once, to its end on all nodes. Return how the first rank died; None if none did."""
    environments = meeting.environments(attempt)
    how = run_ranks(config, path, environments, watch, lambda: meeting.troubled(attempt))
    return meeting.settle(attempt, f"{how} on {meeting.name}" if how and meeting.nodes > 1 else how)
