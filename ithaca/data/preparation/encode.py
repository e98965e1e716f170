"""Encode documents: text becomes tokens, ready tokens are checked.

A prompt is encoded apart from its completion, so that no token crosses the border between them. A conversation is
rendered by the chat template, which writes all special tokens itself, and may become several samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.chat.mask import ignored_ranges, learned_tokens
from ithaca.data.chat.render import NoRendering, Rendered, Renderer
from ithaca.data.preparation.partial import PIECE
from ithaca.data.preparation.pieces import LongText
from ithaca.data.preparation.records import Document
from ithaca.data.preparation.tokenizer import Json, Numbers, Text, Tokenizer

LARGEST_ID = 2**32 - 1
_NOTHING = np.empty(0, np.uint8)
_BATCH = 4 << 20  # characters of rendered conversations that are encoded at a time


class MixedKinds(DataError):
    """Text and ready tokens without the tokenizer that made them, which --skip-bad does not skip."""


@dataclass(frozen=True)
class Encoding:
    """How documents become tokens. Without a tokenizer all are ready tokens; `mixed` allows both kinds."""

    tokenizer: Tokenizer | None
    mixed: bool
    chats: Renderer | None = None

    def close(self) -> None:
        """End the process that renders conversations, if there is one."""
        if self.chats:
            self.chats.close()

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
    sample: int = 0  # of a conversation: 1 for its first sample, 2 for the next …
    where: str = ""  # the conversation's name

    @property
    def learns(self) -> bool:
        return sum(map(len, self.ignored)) < sum(map(len, self.parts))


def encode(group: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
    """Yield the tokens of each document, or of each sample of a conversation; an empty document has none."""
    for chats, documents in groupby(group, lambda document: document.chat):
        yield from (_encode_chats if chats else _encode_documents)(list(documents), encoding)


def _encode_documents(group: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
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


def _encode_chats(group: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
    if encoding.chats is None or not isinstance(encoding.tokenizer, Json):
        raise NoRendering(f"{group[0].where} is a conversation: name the model's tokenizer with --tokenizer")
    names = [document.where for document in group]
    rendered = encoding.chats.render([str(document.content) for document in group], names)
    conversation = sample = 0
    for batch in _batches(rendered):
        for made, (ids, offsets) in zip(batch, _tokens(batch, names, encoding.tokenizer), strict=True):
            sample = sample + 1 if sample and made.conversation == conversation else 1
            conversation = made.conversation
            learned = learned_tokens(offsets, made.spans, len(made.text))
            yield Encoded((ids,), ignored_ranges(learned), 0, sample, names[conversation])


def _batches(rendered: Iterator[Rendered]) -> Iterator[list[Rendered]]:
    """Yield samples together until they have some length: the samples of one conversation can be many and long."""
    batch: list[Rendered] = []
    for made in rendered:
        batch.append(made)
        if sum(len(one.text) for one in batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _tokens(batch: list[Rendered], names: list[str], tokenizer: Json) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    try:
        yield from tokenizer.encode_with_offsets([made.text for made in batch])
    except DataError as problem:
        first, last = (names[batch[at].conversation] for at in (0, -1))
        raise DataError(f"{problem}, which lies between {first} and {last}") from None


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
