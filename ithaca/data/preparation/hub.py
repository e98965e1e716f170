"""Datasets of the `datasets` package: folders that `save_to_disk` wrote, and datasets by name.

A saved folder is read by pyarrow alone. A name needs the package, which is optional; it downloads and caches.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ithaca.base.errors import DataError, first_line

PREFIX = "hf:"


def is_saved(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` wrote a folder."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def is_dict(folder: Path) -> bool:
    """Return whether `DatasetDict.save_to_disk` wrote a folder, with a folder for each split."""
    return (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset, in order."""
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"'{folder / 'state.json'}' lists no Arrow files: save the dataset again") from None
    missing = next((file for file in files if not file.is_file() or file.parent != folder), None)
    if missing or not files:
        raise DataError(f"'{folder}' is a saved dataset without '{missing or '*.arrow'}': copy it again")
    return files


def only_split(folder: Path, notes: list[str]) -> Path:
    """Return the folder of the only split, and note it. Raise an error if there are several."""
    splits = sorted(path.name for path in folder.iterdir() if is_saved(path))
    if len(splits) != 1:
        found = ", ".join(splits) or "none"
        raise DataError(f"'{folder}' holds the splits {found}: name one, as '{folder / (splits or ['train'])[0]}'")
    notes.append(f"Reading split '{splits[0]}' of '{folder}', the only one")
    return folder / splits[0]


def load(name: str) -> tuple[Any, str | None, tuple[int, ...]]:
    """Return the dataset of hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, a note, and a stamp of its files."""
    dataset, *rest = re.split(r":(?![^\[]*\])", name.removeprefix(PREFIX))  # a split may be train[:1000]
    if not dataset or len(rest) > 2 or not all(rest):
        raise DataError(f"'{name}' names no dataset: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    split = rest.pop() if rest else None
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading '{name}' needs the package datasets: pip install 'ithaca[datasets]'") from None
    try:
        found = datasets.load_dataset(dataset, *rest, split=split)
    except Exception as problem:  # whatever network, hub, builders and parsers raise
        raise DataError(f"'{name}' cannot be loaded by datasets ({first_line(problem)})") from None
    note = None
    if isinstance(found, dict):
        if len(found) != 1:
            raise DataError(f"'{name}' has the splits {', '.join(found)}: name one, as {name}:{next(iter(found))}")
        split, found = next(iter(found.items()))
        note = f"Reading split '{split}' of '{name}', the only one"
    files = [os.stat(file["filename"]) for file in found.cache_files]
    return found, note, (len(found), *(number for file in files for number in (file.st_size, file.st_mtime_ns)))
