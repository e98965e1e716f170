"""Documents from records: objects with `text`, with `prompt` and `completion`, or with `tokens`.

A record is a line of JSONL or a row of Parquet; sources.py reads them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.tokenizer import Text


@dataclass(frozen=True)
class Document:
    """Text to be encoded, or `ready` tokens. A prompt is read but not learned."""

    where: str  # its name in messages
    content: Text
    ready: bool = False
    prompt: str = ""


def document(where: str, record: dict[str, Any], field: str | None = None) -> Document:
    """Return the document of an object with `text`, `prompt` and `completion`, or `tokens`; or with a text `field`."""
    if field is not None:
        return Document(where, _string(where, record, _present(where, list(record), field)))
    if "text" in record:
        return Document(where, _string(where, record, "text"))
    if "prompt" in record and "completion" in record:
        return Document(where, _string(where, record, "completion"), prompt=_string(where, record, "prompt"))
    if "tokens" in record:
        return Document(where, _ids(where, record["tokens"]), ready=True)
    found = ", ".join(f"'{name}'" for name in record) or "none"
    raise DataError(f"{where} has the fields {found}: 'text', 'prompt' and 'completion', or 'tokens' is needed")


def _present(where: str, names: list[str], field: str) -> str:
    """Return the field that --field names. Raise an error if it is not there."""
    if field not in names:
        found = ", ".join(f"'{name}'" for name in names) or "none"
        raise DataError(f"{where} has no '{field}', which --field names: it has {found}")
    return field


def _string(where: str, record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise DataError(f"{where} has a '{name}' of type {kind}: text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise DataError(f"{where} has half a surrogate pair at character {problem.start} of '{name}'") from None
    return value


def _ids(where: str, tokens: Any) -> np.ndarray:
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise DataError(f"{where} has 'tokens' that are not a list of whole numbers: write [464, 3290]")
    try:
        return np.array(tokens, np.int64)
    except OverflowError:
        raise DataError(f"{where} has token id {max(tokens, key=abs)}: ids go from 0 to {2**32 - 1}") from None


def columns(path: Path, names: list[str], field: str | None = None) -> list[str]:
    """Return the columns of a table that `document` needs."""
    if field is not None:
        return [_present(f"'{path}'", names, field)]
    for wanted in (["text"], ["prompt", "completion"], ["tokens"]):
        if set(wanted) <= set(names):
            return wanted
    found = ", ".join(f"'{name}'" for name in names) or "none"
    raise DataError(f"'{path}' has the columns {found}: 'text', 'prompt' and 'completion', or 'tokens' is needed")
