"""A run's processes: one per GPU, or a few on a CPU, on this node or on several; under torchrun or srun this one joins.

A rank that dies takes the job down, and all of it is started again from the last checkpoint, a few times, on all nodes.
What a user did wrong is no reason to start again. A rank that hangs is given up by those that wait for it in vain, and
all start again likewise. Ctrl-C reaches the ranks, which agree over all nodes, finish their step and save; a second one
kills them, also where they hang.
"""

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

RESTARTS = 3


def launch(
    config: Config,
    ranks: int | None,
    path: Path | None,
    fresh: bool,
    nodes: int | None = None,
    meeting_place: str | None = None,
) -> None:
    """Train on this machine's GPUs, or on `ranks` processes, and on other nodes too; raises what ended the job."""
    options = {"--ranks": ranks, "--nodes": nodes, "--meet": meeting_place}
    if "RANK" in os.environ:
        _check_environment()
        _join(config, options, path, fresh, "torchrun")
        return
    step = read_step(os.environ) if nodes is None else None  # a number that is given is what is wanted
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
        print(f"the old run is now {aside}")
    if not folder.has_checkpoints():
        load_model(config.model.source, config.model.dtype)  # its mistakes are better told before processes start
    if count == 1:
        train(config, folder.path)
    else:
        _start(config, count, folder.path, ALONE, 1)


def _join(config: Config, options: Mapping[str, object], path: Path | None, fresh: bool, starter: str) -> None:
    """Be one rank of a job that torchrun or srun started."""
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
        leave(f"error: {lost}; the run goes on from its last checkpoint with ithaca train --run {path}")


def _check_environment() -> None:
    """Refuse a RANK that no torchrun has set."""
    rank = os.environ["RANK"]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"RANK is {rank} in the environment, as of one of torchrun's ranks, but {name} is not given: "
                "unset RANK, and this machine's GPUs train"
            )
    ranks = os.environ["WORLD_SIZE"]
    if not (_is_number(rank) and _is_number(ranks) and int(rank) < int(ranks)):
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE {ranks} in the environment, which no rank of a job has: "
            "unset both, and this machine's GPUs train"
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _task_environment(step: Step) -> dict[str, str]:
    """A task as a rank; where the user has said where ranks meet, or SLURM shows each task one GPU, so it is."""
    given = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}
    shown = {"LOCAL_RANK": "0"} if torch.cuda.device_count() == 1 else {}
    return {**step.environment(), **given, **shown}


def _place(nodes: int | None, meeting_place: str | None, path: Path | None, fresh: bool) -> Place:
    """Where the launchers of several nodes meet."""
    if nodes is not None and nodes < 1:
        raise ConfigError(f"--nodes {nodes} cannot train: 1 or more can")
    if nodes is None or nodes == 1:
        if meeting_place is not None:
            number = "is not given" if nodes is None else "is 1"
            raise ConfigError(
                f"--meet {meeting_place} is for several nodes, but --nodes {number}: give how many, as --nodes 2"
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


def _start(config: Config, ranks: int | None, path: Path, place: Place, nodes: int) -> None:
    """Train on processes of this node and of those that are met; start all again when one of them dies."""
    with Watch() as watch, meet(place, nodes, lambda: watch.asked) as meeting:
        count = _count(config, ranks)
        if nodes > 1:
            tell(f"{meeting.name} waits for {nodes} nodes at {place}", sys.stdout)
        meeting.number_ranks(count, _options(config))
        if nodes > 1:
            tell(f"{meeting.name} has {count} of {meeting.world} ranks, from {meeting.ranks[0]} on", sys.stdout)
        for attempt in range(RESTARTS + 1):
            how = _attempt(config, path, attempt, meeting, watch)
            if how is None:
                return
            if attempt == RESTARTS:
                raise RunError(f"{how}, the {RESTARTS + 1}th time over: mend the cause, then ithaca train --run {path}")
            again = f"starting again from the last checkpoint ({attempt + 1} of {RESTARTS})"
            tell(f"{how}: {again}", sys.stderr)


def _options(config: Config) -> dict[str, str]:
    """train.steps and so on, as text that nodes can compare."""
    sections = {section.name: getattr(config, section.name) for section in fields(config)}
    sections["plan"] = config.plan or SimpleNamespace(recipe=AUTO)
    return {
        f"{section}.{name}": repr(value)
        for section, options in sections.items()
        for name, value in vars(options).items()
    }


def _attempt(config: Config, path: Path, attempt: int, meeting: Meeting, watch: Watch) -> str | None:
    """Run the job once, to its end on all nodes; how the first rank that died did so, None where none has."""
    environments = meeting.environments(attempt)
    how = run_ranks(config, path, environments, watch, lambda: meeting.troubled(attempt))
    return meeting.settle(attempt, f"{how} on {meeting.name}" if how and meeting.nodes > 1 else how)
