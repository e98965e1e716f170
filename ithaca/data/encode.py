"""Encode documents: text becomes tokens, ready tokens are checked.

A prompt is encoded apart from its completion, so that no token crosses the border between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.partial import PIECE
from ithaca.data.pieces import LongText
from ithaca.data.records import Document
from ithaca.data.tokenizer import Numbers, Text, Tokenizer

LARGEST_ID = 2**32 - 1
_NOTHING = np.empty(0, np.uint8)


class MixedKinds(DataError):
    """Text and ready tokens without the tokenizer that made them, which --skip-bad does not skip."""


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens. Without a tokenizer all are ready tokens; `mixed` allows both kinds."""

    tokenizer: Tokenizer | None
    mixed: bool

    @property
    def vocab(self) -> int:
        return self.tokenizer.vocab if self.tokenizer else LARGEST_ID + 1

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint if self.tokenizer else "unknown"


@dataclass(frozen=True)
class Encoded:
    """A document's tokens, in parts."""

    parts: tuple[Numbers, ...]
    ignored: tuple[range, ...]  # the tokens that are not learned, in rising ranges
    largest: int  # the largest id, for ready tokens


def encode(group: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
    """Yield the tokens of each document; an empty document has none."""
    for document in group:
        if not encoding.mixed and document.ready is (encoding.tokenizer is not None):
            kinds = "ready tokens among text" if document.ready else "text among ready tokens"
            raise MixedKinds(f"{document.where} is {kinds}: name the tokenizer that made the tokens with --tokenizer")
    texts = iter(_encode_texts(group, encoding.tokenizer))
    for document in group:
        if document.ready:
            assert not isinstance(document.content, str | LongText)
            yield Encoded((document.content,), (), _check_ids(document.where, document.content, encoding.vocab))
        else:
            prompt, content = (next(texts) if len(text) else _NOTHING for text in (document.prompt, document.content))
            begin, finish = added(prompt, content, encoding.tokenizer)
            ignored = range(len(begin) + len(prompt)) if len(prompt) else range(0)
            yield Encoded((begin, prompt, content, finish), (ignored,), 0)


def _encode_texts(group: Sequence[Document], tokenizer: Tokenizer | None) -> Sequence[Numbers]:
    parts: list[Text] = [part for item in group if not item.ready for part in (item.prompt, item.content)]
    texts = [part for part in parts if len(part)]
    if tokenizer is None or not texts:
        return []
    try:
        return tokenizer.encode(texts)
    except DataError as problem:
        raise DataError(f"{problem}, which lies between {group[0].where} and {group[-1].where}") from None


def added(prompt: Numbers, content: Numbers, tokenizer: Tokenizer | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the special tokens before and behind a document.

    Nothing is added to an empty document, nor where the text already has the tokens.
    """
    first, last = (prompt if len(prompt) else content), (content if len(content) else prompt)
    if tokenizer is None or len(first) == 0:
        return _NOTHING, _NOTHING
    begin, finish = tokenizer.begin, tokenizer.finish
    begun = tuple(first[: len(begin)].tolist()) == begin
    ended = tuple(last[max(len(last) - len(finish), 0) :].tolist()) == finish
    return np.array(() if begun else begin, np.uint32), np.array(() if ended else finish, np.uint32)


def _check_ids(where: str, ids: Numbers, vocab: int) -> int:
    """Return the largest id. Raise an error if one is outside the vocabulary."""
    largest = 0
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= vocab:
            raise DataError(
                f"{where} has token id {low if low < 0 else high}, and ids go from 0 to {vocab - 1}: "
                "prepare it with the tokenizer that made it"
            )
        largest = max(largest, high)
    return largest
