"""Typed reads from a `config.json`, which anyone may have edited: a value of another type is a ModelError."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaca.base.errors import ModelError, shown, suggestion
from ithaca.base.misuse import check_type
from ithaca.model.folder import read_json
from ithaca.model.presets import PRESETS

LARGEST = 2**31 - 1  # a size far beyond any model would overflow later
LARGEST_REAL = 1e30  # fp32 ends at 3e38


def whole(config: Mapping[str, Any], name: str, default: int | None = None, most: int = LARGEST) -> int:
    """A whole number from 1 to `most`; `default` if the key is missing or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(f"config.json gives {name} as {shown(value)}: a whole number from 1 to {most} is needed")
    return value


def real(
    config: Mapping[str, Any],
    name: str,
    default: float | None = None,
    least: float | None = None,
    most: float = LARGEST_REAL,
) -> float:
    """A number above 0, or from `least` on, up to `most`; `default` if the key is missing or null."""
    value: Any = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not ((value > 0 if least is None else value >= least) and value <= most):
        above = "a number above 0 and" if least is None else f"a number of at least {least:g} and"
        raise ModelError(f"config.json gives {name} as {shown(value)}: {above} at most {most:g} is needed")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false, also as 1 or 0; false if the key is null, `default` if it is missing."""
    value = config.get(name, default)
    if value is not None and (type(value) not in (bool, int) or value not in (0, 1)):
        raise ModelError(f"config.json gives {name} as {shown(value)}: true or false is needed")
    return bool(value)


def table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A JSON object; empty if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json gives {name} as {shown(value)}: an object is needed")
    return value or {}


def entries(config: Mapping[str, Any], name: str) -> list[Any] | None:
    """A list; None if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, list):
        raise ModelError(f"config.json gives {name} as {shown(value)}: a list is needed")
    return value


def find_config(model: str | Path) -> tuple[Mapping[str, Any], Path | None]:
    """The config.json of a model, and its folder (None for a preset)."""
    needed = "the name of a preset or of a Hugging Face folder is needed, as save_pretrained writes it"
    check_type(model, str | os.PathLike, ModelError, needed)
    if str(model) in PRESETS:
        return PRESETS[str(model)], None
    folder = Path(model)
    if not os.path.isdir(folder):  # Path.is_dir raises an error for a name that the system refuses
        raise ModelError(f"{shown(str(model))} is neither a folder nor a preset: {_suggest_model(str(model)[:80])}")
    return read_json(folder, "config.json"), folder


def _suggest_model(name: str) -> str:
    """Return what to do about a model that is not here; a name as of a hub must be downloaded first."""
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not os.path.isdir(name.partition("/")[0]):
        return f"fetch a model of the hub with hf download {name} --local-dir {name.rpartition('/')[2]}"
    return suggestion(name, PRESETS)
