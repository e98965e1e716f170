"""Whether the folder that `ithaca train --run` names holds a run, as the user expects: a mistyped name trains nothing.

No torch.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ithaca.base.errors import ConfigError


def holds_run(run: Path | None) -> bool:
    """Return whether a run has written its configuration there."""
    return run is not None and os.path.exists(run / "config.toml")  # no error for a folder that may not be read


def check_again(run: Path | None) -> None:
    """Raise an error if `--fresh` alone has no run to start again."""
    if not holds_run(run):
        what = f"'{run}' has no run to start again: name" if run else "--run is missing: name it, or"
        raise ConfigError(f"--fresh: {what} a configuration or --set options")


def check_new(run: Path, sets: Sequence[str]) -> None:
    """Raise an error if there is no run in the folder, and it was meant to continue.

    It is meant to continue if no option is set, or if there is a run of nearly that name and no option says what to
    train: a mistyped name must not start another training. Names with other numbers are no mistake, as lr1 and lr2.
    """
    if any(word.partition("=")[0].strip() in ("model.source", "data.source", "data.mix") for word in sets):
        return
    runs = [folder.name for folder in sorted(run.parent.iterdir())] if run.parent.is_dir() else []
    runs = [name for name in runs if holds_run(run.parent / name)]
    runs = [name for name in runs if re.sub(r"\d", "", name) != re.sub(r"\d", "", run.name)]
    near = next(iter(difflib.get_close_matches(run.name, runs, n=1)), None)
    problem = "" if sets else "to start a run there, name a configuration or --set options"
    if near:
        problem = f"did you mean '{run.parent / near}'? Or, to start a run there, name a configuration or model.source"
    if problem:
        raise ConfigError(f"'{run}' has no run to continue: {problem}")
