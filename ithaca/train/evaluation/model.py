"""The model of an evaluation on its ranks: the last or best checkpoint of a run, or a Hugging Face folder."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ithaca.assemble import Model, apply
from ithaca.base.errors import ConfigError, ModelError
from ithaca.base.shell import continue_command
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.checkpoint.other_run import read_newest
from ithaca.checkpoint.snapshot import weight_state
from ithaca.config import Config, MeshSection, read_config
from ithaca.model.presets import PRESETS
from ithaca.model.source import ModelSource, load_model
from ithaca.parallel.agree import from_first, together
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.train.folder.export import best_step
from ithaca.train.folder.record import check_model, check_same_rope
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.stages import checkpoint_model
from ithaca.train.setup.start import CPU_TOKENS, GPU_TOKENS, choose_plan, free_memory

SETTABLE = ("plan", "mesh")  # sections of the configuration that an evaluation has
ALSO = ("model.dtype", "train.device", "run.share_gpus", "run.timeout")


def read_options(path: Path, overrides: list[str]) -> Config:
    """Return the configuration of an evaluation: that of the run, if it is one, with the options of `--set`."""
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name.partition(".")[0] not in SETTABLE and name not in ALSO:
            raise ConfigError(
                f"--set {override} changes nothing in an evaluation: options of plan and mesh do, and {', '.join(ALSO)}"
            )
    run = RunFolder(path)
    config = read_config(run.config if run.begun() else None, overrides, saved=True)
    train = replace(config.train, batch=None, micro_batch=None)
    source = config.model.source if run.begun() else str(path)
    return replace(config, train=train, model=replace(config.model, source=source))


def check_model_path(path: Path, config: Config, best: bool) -> None:
    """Raise an error unless this is a run with the checkpoint that is asked for, or a folder with a model."""
    run = RunFolder(path)
    if run.begun():
        if not run.has_checkpoints():
            raise ModelError(f"'{path}' has no checkpoint yet: train it further, {continue_command(path)}")
        if best:
            best_step(path, CheckpointFolder(run.checkpoints))
        return
    if best:
        raise ConfigError(f"--best needs a run folder with validated checkpoints, and '{path}' has no config.toml")
    if str(path) in PRESETS and not path.exists():
        raise ModelError(
            f"'{path}' is a preset, whose weights are random: name a run folder or a Hugging Face folder with weights"
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"'{path}' is neither a run folder (it has no config.toml) nor a Hugging Face folder (no config.json): "
            "name one of them"
        )
    load_model(path, config.model.dtype)  # a mistake in its files is told before processes start


def start_mesh(config: Config) -> Mesh:
    """Join the job. Its ranks share no sequence yet."""
    device = None if config.train.device == "auto" else config.train.device
    return mesh(device=device, share_gpus=config.run.share_gpus)


@dataclass(frozen=True)
class Opened:
    """A model on its ranks, the context length of its evaluation, and the step of its checkpoint, if it has one."""

    model: Model
    tokens: int
    step: int | None


def open_model(path: Path, config: Config, grid: Mesh, tokens: int | None, chosen: bool, best: bool) -> Opened:
    """Return the model with its weights, its context length and its step. Collective.

    `chosen`: the user has set a Plan or a mesh. Else a run's own are used if there are as many ranks as it had.
    """
    run = RunFolder(path)
    source = together(grid.group, lambda: _source(run, config, best))
    default = GPU_TOKENS if grid.device.type == "cuda" else CPU_TOKENS
    length = tokens or (config.train.tokens if run.begun() else None) or default
    if run.begun() and not chosen and from_first(grid.group, lambda: _ranks(run)) != str(grid.size):
        config = replace(config, plan=None, mesh=MeshSection())
    memory = free_memory(grid)
    plan, axes, _ = from_first(grid.group, lambda: choose_plan(config, source, grid, length, memory))
    grid = mesh(**vars(axes), device=grid.device.type) if axes != MeshSection() else grid
    model = apply(source, plan, grid)
    step = load_checkpoint(model, run, best) if run.begun() else None
    return Opened(model, length, step)


def _source(run: RunFolder, config: Config, best: bool) -> ModelSource:
    if run.begun():
        files = CheckpointFolder(run.checkpoints)
        step = best_step(run.path, files) if best else run.last_checkpoint()
        return checkpoint_model(run.model, files.manifest(step) or {}, config.model.dtype)
    return load_model(config.model.source, config.model.dtype)


def _ranks(run: RunFolder) -> str | None:
    """Return the number of ranks that the newest checkpoint was written by."""
    manifest = CheckpointFolder(run.checkpoints).manifest(run.last_checkpoint()) or {}
    return manifest.get("computed", {}).get("ranks")


def load_checkpoint(model: Model, run: RunFolder, best: bool, only: int | None = None) -> int:
    """Read the weights of the newest sound checkpoint, of the best one, or `only` that of a step. Return its step.

    Collective. The run may be training meanwhile.
    """
    files, grid = CheckpointFolder(run.checkpoints), model.mesh

    def steps() -> list[int]:
        if best:
            return [best_step(run.path, files)]
        return [step for step in files.steps() if only in (None, step)]

    group: Any = dist.new_group(list(range(grid.size)), backend="gloo")
    newest = max(from_first(group, steps), default=0)  # whose rope the model has
    manifest, warnings = read_newest(files, weight_state(model), group, steps)
    together(grid.group, lambda: check_same_rope(files, newest, manifest))
    together(grid.group, lambda: check_model(manifest, model.spec))
    for text in warnings if grid.rank == 0 else ():
        print(f"warning: {text}", file=sys.stderr)  # stdout may be JSON
    return manifest["step"]
