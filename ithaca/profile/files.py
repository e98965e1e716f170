"""The folder of a profile.

    profile.html   the page          trace.json   for ui.perfetto.dev; trace.json.gz if it is large
    profile.json   everything        with everything but the trace

A folder is made before the steps run, so that a place that cannot be written is an error at once. After an error, the
folders that were made are removed again.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ithaca.base.disk import missing_folders, reason, remove_empty
from ithaca.base.errors import ConfigError, RunError
from ithaca.profile.page import make_page
from ithaca.profile.record import Recording

PROFILE, PAGE = "profile.json", "profile.html"
BULK = ("timeline", "bars", "phases")  # what charts are drawn from; in profile.json alone


@contextmanager
def profile_folder(path: Path) -> Iterator[Path]:
    """Make the folder of a profile, or take that of an earlier one. An error in the body removes what was made."""
    if os.path.lexists(path) and not path.is_dir():
        raise ConfigError(f"--out {path} is not a folder: name a new one")
    if path.is_dir() and any(path.iterdir()) and not (path / PROFILE).exists():
        raise ConfigError(f"--out {path} has other files and no {PROFILE}: name a new folder, or one of a profile")
    made = missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial = path / f".{PROFILE}"
        trial.touch()
        trial.unlink()
    except OSError as problem:
        remove_empty(made)
        raise ConfigError(f"--out {path} cannot be written ({reason(problem, path)}): name another folder") from None
    try:
        yield path
    except BaseException:
        remove_empty(made)
        raise


def write_profile(folder: Path, report: dict[str, Any], recording: Recording | None) -> dict[str, Any]:
    """Write the files of a profile; return the report with their names and without what charts are drawn from."""
    try:
        files = {"page": PAGE, "profile": PROFILE}
        if recording:
            files["trace"] = recording.write(folder).name
        report = report | {"files": {name: str(folder / file) for name, file in files.items()}}
        (folder / PAGE).write_text(make_page(report), encoding="utf-8")
        (folder / PROFILE).write_text(json.dumps(report, indent=1), encoding="utf-8")
    except OSError as problem:
        raise RunError(f"the profile cannot be written to {folder} ({reason(problem, folder)})") from None
    return {key: value for key, value in report.items() if key not in BULK}
