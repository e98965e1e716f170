"""Documents from records: objects with `text`, with `prompt` and `completion`, with `tokens`, or with a conversation.

A record is a line of JSONL or a row of Parquet; sources.py reads them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.chat.conversation import SPELLINGS, conversation
from ithaca.data.preparation.tokenizer import Text

_SURROGATE = re.compile("[\ud800-\udfff]")  # half a pair, which UTF-8 cannot hold
_KINDS = (
    ("text",),
    ("prompt", "completion"),
    ("tokens",),
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
)


@dataclass(frozen=True)
class Document:
    """Text to be encoded, `ready` tokens, or a `chat` as JSON. A prompt is read but not learned."""

    where: str  # its name in messages
    content: Text
    ready: bool = False
    prompt: str = ""
    chat: bool = False


def document(where: str, record: dict[str, Any], field: str | None = None, table: bool = False) -> Document:
    """Return the document of a record, or its text `field`. `table`: it is a row, null where a field is missing."""
    if field is not None:
        return Document(where, _string(where, record, _present(where, list(record), field)))
    kind = _kind(where, record)
    if kind == ("text",):
        return Document(where, _string(where, record, "text"))
    if kind == ("tokens",):
        return Document(where, _ids(where, record["tokens"]), ready=True)
    if kind == ("prompt", "completion") and not any(isinstance(record[name], list) for name in kind):
        return Document(where, _string(where, record, "completion"), prompt=_string(where, record, "prompt"))
    return Document(where, conversation(where, record, table), chat=True)


def _kind(where: str, names: Iterable[str], called: str = "fields") -> tuple[str, ...]:
    """Return the fields that say what a record is. `tokens` beside others may be a count, and is left out."""
    found = [kind for kind in _KINDS if set(kind) <= set(names)]
    found = [kind for kind in found if kind != ("tokens",)] or found
    if not found:
        listed = ", ".join(f"'{name}'" for name in names) or "none"
        raise DataError(
            f"{where} has the {called} {listed}: 'text', 'prompt' and 'completion', 'tokens', 'messages', "
            "'conversations', or 'instruction' and 'output' is needed"
        )
    if len(found) > 1:
        both = " and ".join(f"'{kind[0]}'" for kind in found[:2])
        raise DataError(
            f"{where} has {both}, and only one of them can be used: leave out the other, or name a text with --field"
        )
    return found[0]


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
    if half := _SURROGATE.search(value):
        raise DataError(f"{where} has half a surrogate pair at character {half.start()} of '{name}'")
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
    kind = _kind(f"'{path}'", names, "columns")
    return [name for name in (*kind, *SPELLINGS.get(kind, ())) if name in names]
