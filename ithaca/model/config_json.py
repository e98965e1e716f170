"""Typed reads from a `config.json`, which anyone may have edited: a value of another type is a ModelError."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaca.base.errors import ModelError, suggestion
from ithaca.model.presets import PRESETS

LARGEST = 2**31 - 1  # a size far beyond any model would overflow later


def whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number from 1 on; `default` if the key is missing or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ModelError(f"config.json gives {name} as {value!r}: a whole number from 1 to {LARGEST} is needed")
    return value


def real(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number above 0; `default` if the key is missing or null."""
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, float) or not 0 < value < math.inf:  # pyrefly: ignore
        raise ModelError(f"config.json gives {name} as {value!r}: a number above 0 is needed")
    return float(value)  # pyrefly: ignore


def table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A JSON object; empty if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json gives {name} as {value!r}: an object is needed")
    return value or {}


def entries(config: Mapping[str, Any], name: str) -> list[Any] | None:
    """A list; None if the key is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, list):
        raise ModelError(f"config.json gives {name} as {value!r}: a list is needed")
    return value


def find_config(model: str | Path) -> tuple[Mapping[str, Any], Path | None]:
    """The config.json of a model, and its folder (None for a preset)."""
    if str(model) in PRESETS:
        return PRESETS[str(model)], None
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(f"'{model}' is neither a folder nor a preset: {suggestion(str(model), PRESETS)}")
    return read_json(folder / "config.json"), folder


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"'{file.parent}' is not a Hugging Face folder: {file.name} is missing") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"'{file}' cannot be read as JSON ({problem})") from None
    if not isinstance(content, dict):
        raise ModelError(f"'{file}' holds {type(content).__name__}, not a JSON object")
    return content
