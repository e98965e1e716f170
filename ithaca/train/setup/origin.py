"""Starting a run from another run's checkpoint: `ithaca train --from RUN`.

The newest sound checkpoint there gives the weights; with `--with-optimizer`, AdamW's moments and its count of updates
as well. Everything else begins anew: step 0, the order of the data, the schedule of the rate. The new run keeps the
other's description of the model, and records where it came from in `model/origin.json` and in every manifest. From its
first checkpoint on it does not need the other run.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ithaca.base.errors import ConfigError
from ithaca.base.files import read_small
from ithaca.base.shell import continue_command
from ithaca.checkpoint.checkpoints import Checkpoints
from ithaca.checkpoint.files import CheckpointFolder, is_origin, total_updates
from ithaca.config import Config, ModelSection
from ithaca.optimizer.host_adamw import MOMENTS
from ithaca.parallel.agree import from_first, together
from ithaca.train.folder.record import check_model, check_same_rope
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.stages import checkpoint_model
from ithaca.train.setup.start import has_random_weights


@dataclass(frozen=True)
class Origin:
    """The run that a new run starts from, and whether AdamW's state comes along."""

    path: Path
    optimizer: bool = False

    @property
    def model(self) -> Path:
        """The folder that describes the model."""
        return RunFolder(self.path).model


def find_origin(run: RunFolder, given: Origin | None, config: Config) -> Origin | None:
    """Return the run that this start takes its weights from; None if it has checkpoints of its own, or needs none.

    `given`: as the command line has it. A start that was killed before its first checkpoint goes on as it began.
    """
    if run.has_checkpoints():
        if given:
            _check_same(run, given, recorded_origin(run))
        return None
    if given:
        check_origin(run, given, config)
        return given
    origin = origin_again(run.path)
    return _begin_again(run, origin, config) if origin else None


def origin_again(path: Path) -> Origin | None:
    """Return what a run would start from if it started again; None if it did not start from another run."""
    recorded = recorded_origin(RunFolder(path))
    return Origin(Path(recorded["run"]), recorded["optimizer"]) if recorded else None


def _begin_again(run: RunFolder, origin: Origin, config: Config) -> Origin:
    """Return the origin of a start that made no checkpoint, or raise an error that says why it is needed."""
    try:
        check_origin(run, origin, config)
    except ConfigError as problem:
        raise ConfigError(
            f"'{run.path}' has no checkpoint of its own yet and needs the run it began from: {problem}"
        ) from None
    return origin


def recorded_origin(run: RunFolder) -> dict[str, Any] | None:
    """Return where a run came from, as its newest checkpoint has it; without checkpoints, as its folder has it."""
    files = CheckpointFolder(run.checkpoints)
    for step in reversed(files.steps()):
        if manifest := files.manifest(step):
            return manifest.get("origin")
    try:
        found = json.loads(read_small(run.origin)) if run.begun() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if is_origin(found) else None


def _check_same(run: RunFolder, given: Origin, recorded: dict[str, Any] | None) -> None:
    """Raise an error if a run that has checkpoints did not start from the given one."""
    if recorded is None:
        raise ConfigError(
            f"'{run.path}' has checkpoints and did not start from another run: leave out --from {given.path} to "
            "continue it, or name another --run to start from there"
        )
    if not _same_folder(given.path, Path(recorded["run"])):
        raise ConfigError(
            f"'{run.path}' started from '{recorded['run']}', not from '{given.path}': leave out --from to continue it, "
            "or name another --run to start from there"
        )
    if given.optimizer and not recorded["optimizer"]:
        raise ConfigError(
            f"'{run.path}' started from the weights of '{given.path}' alone: leave out --with-optimizer to continue "
            "it, or name another --run"
        )


def _same_folder(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def check_origin(run: RunFolder, origin: Origin, config: Config) -> None:
    """Raise an error if a new run cannot start from the other one. Nothing is written."""
    theirs, path = open_origin(origin.path), origin.path
    if _same_folder(path, run.path):
        raise ConfigError(f"--from and --run both name '{path}': {continue_command(path)} alone continues it")
    files = CheckpointFolder(theirs.checkpoints)
    steps = files.steps()
    if not steps:
        raise ConfigError(f"'{path}' has 0 checkpoints to start from: train it further, {continue_command(path)}")
    record = (theirs.record() or theirs.saved_config()).model
    _check_model(path, config.model, record)
    manifest = files.manifest(steps[-1])
    if origin.optimizer and manifest and not any(name.startswith(MOMENTS) for name in manifest["tensors"]):
        raise ConfigError(
            f"the checkpoint of step {steps[-1]} in '{path}' has no AdamW state: leave out --with-optimizer"
        )


def open_origin(path: Path) -> RunFolder:
    """Return the run folder at a path, or raise an error if there is none."""
    run = RunFolder(path)
    if not run.begun():
        raise ConfigError(f"--from {path} is not a run folder: it has no config.toml")
    return run


def _check_model(path: Path, model: ModelSection, record: ModelSection) -> None:
    """Raise an error if the new run names another model than the one that the other run trains."""
    if model.source != record.source and not _same_folder(Path(model.source), Path(record.source)):
        raise ConfigError(
            f"model.source is '{model.source}', but --from {path} starts from the weights of '{record.source}': leave "
            "model.source out"
        )
    if "float64" in (model.dtype, record.dtype) and model.dtype != record.dtype:
        raise ConfigError(
            f"model.dtype is {model.dtype}, but '{path}' was trained with {record.dtype}, and its checkpoints hold "
            f"such weights: --set model.dtype={record.dtype} starts from there"
        )


def adopt(origin: Origin, checkpoints: Checkpoints, group: dist.ProcessGroup) -> dict[str, Any]:
    """Read the other run's newest sound checkpoint into model and optimizer. Return where it came from. Collective."""
    files = CheckpointFolder(RunFolder(origin.path).checkpoints)
    newest = max(from_first(group, files.steps), default=0)  # whose rope the new run has
    manifest = checkpoints.load_other(files, origin.optimizer)
    together(group, lambda: check_same_rope(files, newest, manifest))
    check_model(manifest, checkpoint_model(origin.model, manifest).spec)  # the model may have got another rope since
    return {
        "run": os.path.realpath(origin.path),
        "step": manifest["step"],
        "optimizer": origin.optimizer,
        "updates": total_updates(manifest) if origin.optimizer else 0,
    }


def warn_of_seen_documents(origin: Origin, config: Config) -> str | None:
    """Return a warning if documents that this run holds out may be among those that the other one trained on."""
    theirs = RunFolder(origin.path)
    before, now = (theirs.record() or theirs.saved_config()).data, config.data
    if now.share is None or (before.validation, before.source, before.mix) == (now.validation, now.source, now.mix):
        return None
    return (
        f"data.validation={now.share:g} holds out documents that '{origin.path}' may have trained on, so their loss "
        "may be too low: for a reliable loss, name a token file of other documents as data.validation"
    )


def describe_origin(origin: dict[str, Any]) -> str:
    """Return a line about where a run came from."""
    taken = "weights and AdamW's state" if origin["optimizer"] else "weights alone, so AdamW starts at zero"
    return f"Started from the checkpoint of step {origin['step']} of {origin['run']}: {taken}"


def describe_weights(config: Config, origin: dict[str, Any] | None) -> str:
    """Return whose weights a run began with."""
    if has_random_weights(config, origin):
        return f"random weights (preset {config.model.source})"
    return f"weights of {origin['run'] if origin else config.model.source}"
