"""A group of documents into tokens: text by the tokenizer, all of the group at once; ready tokens checked.

A prompt is encoded apart from its completion, so that no token lies across the border between them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.sources import Document
from ithaca.data.tokenizer import Text, Tokenizer

LARGEST_ID = 2**32 - 1
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens. Without a tokenizer all are ready; `mixed` allows text beside ready tokens."""

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
    """A document's tokens in parts, the first of them not learned."""

    parts: tuple[np.ndarray, ...]
    learned: int  # from which of its tokens
    largest: int  # id, where they came ready


def encode(group: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
    """Each document's tokens; none at all where it is empty."""
    for document in group:
        if not encoding.mixed and document.ready is (encoding.tokenizer is not None):
            kinds = "ready tokens among text" if document.ready else "text among ready tokens"
            raise DataError(f"{document.where} is {kinds}: name the tokenizer that made the tokens by --tokenizer")
    texts = iter(_encode_texts(group, encoding.tokenizer))
    for document in group:
        if document.ready:
            content = np.asarray(document.content)
            yield Encoded((content,), 0, _check_ids(document.where, content, encoding.vocab))
        else:
            prompt, content = (next(texts) if len(text) else _NOTHING for text in (document.prompt, document.content))
            yield Encoded((prompt, content, _end(prompt, content, encoding.tokenizer)), len(prompt), 0)


def _encode_texts(group: Sequence[Document], tokenizer: Tokenizer | None) -> list[np.ndarray]:
    parts: list[Text] = [part for item in group if not item.ready for part in (item.prompt, item.content)]
    texts = [part for part in parts if len(part)]
    if tokenizer is None or not texts:
        return []
    try:
        return tokenizer.encode(texts)
    except DataError as problem:
        raise DataError(f"{problem}, which lies between {group[0].where} and {group[-1].where}") from None


def _end(prompt: np.ndarray, content: np.ndarray, tokenizer: Tokenizer | None) -> np.ndarray:
    """The token that ends a document, unless it is empty or its own text ends so."""
    last = content if len(content) else prompt
    if tokenizer is None or tokenizer.end is None or len(last) == 0 or last[-1] == tokenizer.end:
        return _NOTHING
    return np.array([tokenizer.end], np.uint32)


def _check_ids(where: str, ids: np.ndarray, vocab: int) -> int:
    """The largest id, all of them being within the vocabulary."""
    if len(ids) == 0:
        return 0
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise DataError(
            f"{where} has token id {low if low < 0 else high}, and ids go from 0 to {vocab - 1}: "
            "prepare it with the tokenizer that made it"
        )
    return high
