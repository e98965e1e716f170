"""The configuration of `ithaca train`: of a file, of a run that continues, of another run, or of the first run.

One rank prints notices about old names. No torch.
"""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from ithaca import config
from ithaca.base.errors import ConfigError
from ithaca.config import Config, read_config
from ithaca.model.presets import PRESETS

FIRST_RUN = Path(config.__file__).parent / "first_run.toml"  # what `ithaca train` alone does


def tell_once(notice: str) -> None:
    """Print a notice, under torchrun and srun from the first rank only."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(notice, file=sys.stderr)


def read_run_config(file: Path | None, overrides: list[str], run: Path | None, origin: Path | None) -> Config:
    """Return the configuration of the file; without one, that of the run, or of the run that a new one starts from.

    With a file, a run that starts from another still has the other's model.
    """
    if file:
        _check_config(file)
    # os.path.exists: without an error for a folder that may not be read
    own, theirs = (folder / "config.toml" if folder else None for folder in (run, origin))
    saved = next((file for file in (own, theirs) if file and os.path.exists(file)), None)
    if origin and saved is None:
        raise ConfigError(f"--from {origin} is not a run folder: it has no config.toml")
    if file is None:
        # The other run's model has its extended rope already, and would be extended twice. The same holds for stages
        another = saved not in (None, own)
        before = ['model.rope=""'] if another else []
        found = read_config(saved, before + overrides, tell_once, saved=saved is not None, anew=another)
        if found.train.stages:
            _check_stage_options(overrides)
        return found
    model = read_config(saved, [], tell_once, saved=True).model if origin else None
    return read_config(file, overrides, tell_once, model=replace(model, rope="") if model else None)


def _check_stage_options(overrides: list[str]) -> None:
    """Raise an error if a Plan or a rope is set for a run whose stages have their own."""
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name == "model.rope":
            raise ConfigError(f"{override} is set, but the run has stages, each with a rope that stays: leave it out")
        if name.partition(".")[0] == "plan":
            raise ConfigError(
                f"{override} is set, but the run has stages, each with its own Plan: write plan = {{…}} into a stage "
                "of the file that has [[train.stages]], and continue with ithaca train FILE --run DIR"
            )


def read_again(run: Path, overrides: list[str]) -> Config:
    """Return the configuration of a run that starts again, from its first step on."""
    found = read_run_config(None, overrides, run, None)
    if not found.train.stages:
        return found
    # Each stage there is complete; [plan] and the rope of [model] are those of the last one that had begun
    return replace(found, plan=None, model=replace(found.model, rope=""))


def _check_config(path: Path) -> None:
    """Raise an error if the name given for the configuration file is that of something else."""
    word, kind = shlex.quote(str(path)), "is not a configuration file"
    if os.path.isfile(path):
        return
    if "=" in path.name:
        raise ConfigError(f"'{path}' {kind}: an option is given as --set {word}")
    if str(path) in PRESETS or os.path.isfile(path / "config.json"):
        raise ConfigError(f"'{path}' {kind}: a model is given as --set model.source={word}")
    if os.path.isfile(path / "config.toml"):
        raise ConfigError(f"'{path}' {kind}: a run continues with --run {word}")
