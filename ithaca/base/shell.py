"""Commands that a user can copy: the shell and the reader of `--set` give every value back as it was."""

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ithaca.base.sizes import format_tokens


def train_command(settings: Mapping[str, object], *more: object) -> str:
    """Return `ithaca train --set NAME=VALUE … MORE…`, quoted for the shell."""
    return " ".join(["ithaca train", set_options(settings), shlex.join(map(str, more))]).strip()


def continue_command(run: Path) -> str:
    """Return `ithaca train --run RUN`, quoted for the shell."""
    return f"ithaca train --run {quoted(run)}"


def quoted(path: Path) -> str:
    """Return a path as one word for the shell."""
    return shlex.quote(str(path))


def set_options(settings: Mapping[str, object]) -> str:
    """Return `--set NAME=VALUE …`, quoted for the shell."""
    return shlex.join(word for name, value in settings.items() for word in ("--set", setting(name, value)))


def setting(name: str, value: object) -> str:
    """Return `name=value` for `--set`, with quotes around a text that TOML would take for something else."""
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    elif not isinstance(value, int | float) and (text != text.strip() or _is_toml(text)):
        text = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no pairs of surrogates
    return f"{name}={text}"


def token_setting(tokens: int) -> int | str:
    """Return a number of tokens as `--set` takes it without quotes: 512 or '64K'."""
    text = format_tokens(tokens)
    return tokens if text.isdigit() else text


def _is_toml(text: str) -> bool:
    """Return whether a text is a value of TOML, as `5`, `true` and `[1]` are."""
    try:
        return bool(tomllib.loads(f"value = {text}"))
    except (ValueError, RecursionError):
        return False
