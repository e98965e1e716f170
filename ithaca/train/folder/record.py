"""What a checkpoint records of its run, and what has changed since: configuration, data, model, and where it ran.

Other data, another seed or another rope would make it another run, and are refused. Other ranks or another dtype are
allowed, with a warning.
"""

import json
from dataclasses import asdict
from typing import Any

import torch

from ithaca.assemble import Model
from ithaca.base.errors import ConfigError
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config, parse_config
from ithaca.data.mixture import Data
from ithaca.model.spec import Spec
from ithaca.plans.recipes import TILE
from ithaca.train.setup.learning_rate import RATE_OPTIONS, is_settled, learning_rate
from ithaca.train.setup.stages import span_of
from ithaca.train.setup.start import data_change


def make_record(config: Config, data: Data, model: Model) -> dict[str, Any]:
    """Return what a checkpoint's manifest has about its run."""
    return {
        "data": data.identity(),
        "config": config.toml(),
        "model": _describe(model.spec),
        "computed": _computed(config, model),
    }


def check_record(manifest: dict[str, Any], config: Config, data: Data, model: Model) -> list[str]:
    """Raise an error unless this run can continue from the checkpoint. Return warnings about what has changed."""
    step, record, warnings = manifest["step"], parse_config(manifest["config"]), list[str]()
    if difference := data_change(manifest["data"], data):
        raise ConfigError(f"the data have changed since the checkpoint of step {step}: {difference}; name a new --run")
    if difference := config.conflict(record):
        raise ConfigError(f"the checkpoint of step {step} belongs to a different run: {difference}")
    if config.train.stages and step == span_of(config, step).first:
        # The checkpoint is of the stage before, which had another rope and another Plan
        changes = config.changes(record)
        return [f"changed since the checkpoint of step {step}: {', '.join(changes)}"] if changes else []
    check_model(manifest, model.spec)
    if isinstance(manifest["data"], list):
        warnings.append(
            f"an older Ithaca wrote the checkpoint of step {step}: it recorded only the counts and both ends of the "
            "data, and the shapes of the model's weights, so Ithaca cannot check whether the rest is the same; the "
            "next checkpoint records everything"
        )
    if changes := config.changes(record):
        warnings.append(f"changed since the checkpoint of step {step}: {', '.join(changes)}")
        warnings += _rate_change(step, config, record)
    now = _computed(config, model)
    before = manifest.get("computed", now)
    if "tile" not in before and record.plan and record.plan.tiles_by_default and model.plan.tile:
        before = {**before, "tile": str(min(TILE, int(now["tile"])))}  # an old checkpoint: the same for every model
    if moved := [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]:
        warnings.append(
            f"settings that change rounding differ from the checkpoint of step {step}; losses may differ slightly: "
            f"{', '.join(moved)}"
        )
    return warnings


def list_changes(manifest: dict[str, Any], config: Config) -> list[list[Any]]:
    """Return what has changed since a checkpoint, as its successors record it: step, option, old value, new value."""
    changes = config.differences(parse_config(manifest["config"])).items()
    return [[manifest["step"], name, old, new] for name, (new, old) in changes]


def _rate_change(step: int, config: Config, record: Config) -> list[str]:
    """Return a sentence about the learning rate before and after a checkpoint if an option of it has changed."""
    changed = {name.removeprefix("train.") for name in config.differences(record)}
    if not changed & RATE_OPTIONS or step >= (config.train.steps or 0) or not is_settled(record.train):
        return []
    before, after = learning_rate(record.train, step - 1), learning_rate(config.train, step)
    return [f"the learning rate goes from {before:.3g} in step {step} to {after:.3g} in step {step + 1}"]


def check_model(manifest: dict[str, Any], spec: Spec) -> None:
    """Raise an error if the run folder describes another model than the checkpoint's."""
    seen, now = _leaves(manifest.get("model", {})), _leaves(_describe(spec))  # an old checkpoint has none
    for name in seen:
        if name in now and seen[name] != now[name]:
            raise ConfigError(
                f"model/config.json in the run folder has changed since the checkpoint of step {manifest['step']}: "
                f"{name} was {seen[name]}, and now it is {now[name]}; put it back"
            )


def check_same_rope(files: CheckpointFolder, newest: int, read: dict[str, Any]) -> None:
    """Raise an error if a model has the rope of the newest checkpoint and weights of a sound one from another stage."""
    step, manifest = read["step"], files.manifest(newest)
    if manifest is None or manifest.get("model", {}).get("rope") == read.get("model", {}).get("rope"):
        return
    raise ConfigError(
        f"the checkpoint of step {newest} in '{files.folder}' is damaged, and that of step {step} is of an earlier "
        f"stage, with another rope: delete {files.path(newest).name} there to take the one of step {step}"
    )


def _describe(spec: Spec) -> dict[str, Any]:
    """Return a model's description as a manifest has it."""
    return json.loads(json.dumps(asdict(spec)))


def _leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their path."""
    found = {}
    for name, value in table.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _computed(config: Config, model: Model) -> dict[str, str]:
    """Return the settings besides the configuration that decide how sums are rounded."""
    grid, train = model.mesh, config.train
    tokens = (train.micro_batch or train.batch or 1) * (train.tokens or 1)  # of a pass, which a tile may be longer than
    return {
        "ranks": str(grid.size),
        "device": grid.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernel": model.kernel.name,
        "torch": torch.__version__,
        "tile": str(min(model.plan.tile, tokens)) if model.plan.tile else "all",
    }
