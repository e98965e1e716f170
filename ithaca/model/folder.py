"""The files of a model folder, which may come from a stranger. Every file that is opened or copied is found here.

A link is followed within the folder, and from a snapshot of a Hugging Face cache within the same repository, whose
`blobs` hold the files. Any other link is refused, since an export would copy what it leads to. So is everything that is
not a regular file: to open a pipe would wait for ever. No torch here.
"""

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from ithaca.base.errors import ModelError, shown
from ithaca.base.files import read_small

JSON_BYTES = 32 << 20  # the index of a model with 100,000 weights has 10 MB; parsed, JSON takes up to 25 times its size

_KINDS = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}

# Files beside the weights of a Hugging Face folder that are copied with them
_COMPANIONS = (
    "*token*.json",
    "tokenizer.model*",
    "tekken.json",
    "vocab*",
    "merges.txt",
    "generation_config.json",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates",
    "additional_chat_templates/*",
)


def model_file(folder: Path, name: str) -> Path | None:
    """The file of this name; None if there is none. Raise ModelError if it is no regular file of the folder."""
    mode = _mode(folder, name)
    if mode is None:
        return None
    if not stat.S_ISREG(mode):
        raise ModelError(f"'{folder}' holds {shown(name)} as {_kind(mode)}: a regular file is needed")
    return folder / name


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds safetensors weights. They are not read."""
    return any(model_file(folder, name) for name in ("model.safetensors", "model.safetensors.index.json"))


def companions(folder: Path) -> list[str]:
    """The names of the files that are saved with the weights: the tokenizer's, chat templates."""
    names: list[str] = []
    for pattern in _COMPANIONS:
        for name in sorted(str(path.relative_to(folder)) for path in folder.glob(pattern)):
            mode = _mode(folder, name)
            if mode is not None and not stat.S_ISDIR(mode) and model_file(folder, name):
                names.append(name)
    return list(dict.fromkeys(names))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder."""
    file = model_file(folder, name)
    if file is None:
        raise ModelError(f"'{folder}' is not a model folder: {name} is missing")
    content = read_bytes(file, JSON_BYTES)
    try:
        found = json.loads(content.decode(), object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as problem:
        raise ModelError(f"'{file}' cannot be read as JSON ({problem})") from None
    if not isinstance(found, dict):
        raise ModelError(f"'{file}' holds {_KINDS[type(found)]}, not a JSON object")
    return found


def read_bytes(file: Path, most: int) -> bytes:
    """The content of a file that should have no more than `most` bytes."""
    try:
        return read_small(file, most)
    except (OSError, ValueError) as problem:
        raise ModelError(f"'{file}' cannot be read ({_reason(problem)})") from None


def check_readable(file: Path) -> None:
    """Raise ModelError if the file cannot be opened. Without read permission, safetensors says "no such file"."""
    try:
        file.open("rb").close()
    except OSError as problem:
        raise ModelError(f"'{file}' cannot be read ({_reason(problem)})") from None


def _mode(folder: Path, name: str) -> int | None:
    """The `st_mode` of the file with this name, links followed; None if there is none."""
    path = folder / name
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as problem:  # a name that the system refuses
        raise ModelError(f"'{folder}' has no file {shown(name)} that can be opened ({_reason(problem)})") from None
    try:
        home, target = folder.resolve(), path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as problem:  # RuntimeError: a loop of links, before Python 3.13
        raise ModelError(
            f"'{folder}' holds {shown(name)} as a link that cannot be followed ({_reason(problem)})"
        ) from None
    if not target.is_relative_to(_repository(home) or home):
        raise ModelError(
            f"'{folder}' holds {shown(name)} as a link to '{target}', outside of the folder: put a copy in its place"
        )
    return mode


def _repository(home: Path) -> Path | None:
    """The repository of a Hugging Face cache that a snapshot is of: models--ORG--NAME/snapshots/REVISION."""
    for folder in (home, *home.parents):
        if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
            return folder.parent.parent
    return None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A key that comes twice is an error: readers differ in which one they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {shown(twice)} twice")
    return found


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"


def _reason(problem: Exception) -> str:
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)
