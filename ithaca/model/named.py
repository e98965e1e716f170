"""A model by name: its `config.json`, from a Hugging Face folder or a preset. Nothing of its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaca.errors import ModelError, suggestion
from ithaca.model.presets import PRESETS


def find_config(model: str | Path) -> tuple[Mapping[str, Any], Path | None]:
    """config.json of a model, and its folder; None for a preset."""
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
