"""The chat template that comes with a tokenizer: where it is found, and what it is given.

`chat_template.jinja` in the tokenizer's folder, with `additional_chat_templates/NAME.jinja`, goes before the key
`chat_template` of tokenizer_config.json, a text or a list of named ones. The template named `tool_use` is for
conversations with tools.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ithaca.base.errors import DataError, shown
from ithaca.base.files import TO_UTF8, read_small
from ithaca.model.folder import model_file

TEMPLATE_BYTES = 4 << 20  # a hundred times the longest
CHOICES = ("turns", "whole")
_CONFIG_BYTES = 64 << 20
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become text. `origin` names the place of the templates in messages."""

    origin: str
    templates: dict[str, str]  # by name; `default` is there unless there is none at all
    tokens: dict[str, str]  # bos_token, eos_token …, for the template
    choice: str = ""  # 'turns', 'whole', or neither: several samples as long as they stay short
    seconds: float = 20.0  # of computing for one rendering

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def load_format(tokenizer: Path, template: Path | None, choice: str | None) -> ChatFormat:
    """Return the format of a tokenizer's folder; `template` is the file of another template."""
    if choice is not None and choice not in CHOICES:
        raise DataError(f"--chat {shown(choice)} is unknown: 'turns' makes several samples where needed, 'whole' never")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = _config(folder)
    tokens = {name: str(found) for name, value in _named(config) if (found := _content(value)) is not None}
    if template is not None:
        origin, templates = f"'{template}'", {"default": _read(template)}
    else:
        origin, templates = _found(folder, config)
    return ChatFormat(origin, templates, tokens, choice or "")


def _found(folder: Path, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    files = {"default": "chat_template.jinja"} if model_file(folder, "chat_template.jinja") else {}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")) if files else ():
        files[file.stem] = str(file.relative_to(folder))
    if files:
        templates = {name: _read(path) for name, file in files.items() if (path := model_file(folder, file))}
        return f"'{folder / files['default']}'", templates
    place = folder / "tokenizer_config.json"
    return f"'{place}'", _from_config(place, config.get("chat_template"))


def _from_config(place: Path, found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError):
        named = {}
    if "default" not in named or not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise DataError(
            f"'{place}' has a 'chat_template' that is neither text nor a list of named templates with a 'default': "
            "fix it, or name a template with --chat-template"
        )
    return named


def _config(folder: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a folder; load_tokenizer has refused one that is not an object."""
    file = model_file(folder, "tokenizer_config.json")
    return json.loads(read_small(file, _CONFIG_BYTES)) if file else {}


def _named(config: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the special tokens with a name, those of the model alone included."""
    extra = config.get("extra_special_tokens")
    yield from extra.items() if isinstance(extra, dict) else ()
    yield from ((name, value) for name, value in config.items() if name in _TOKENS or name.endswith("_token"))


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read(file: Path) -> str:
    try:
        return read_small(file, TEMPLATE_BYTES).decode()
    except UnicodeDecodeError:
        raise DataError(f"'{file}' is not UTF-8: {TO_UTF8}") from None
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise DataError(
            f"the chat template '{file}' cannot be read ({why}): name a file with --chat-template"
        ) from None
