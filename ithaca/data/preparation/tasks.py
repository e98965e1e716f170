"""The tasks of a preparation: groups of documents, parts of long texts, and how they become tokens.

Tasks depend on the inputs alone, not on the number of processes that work on them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.chat.render import NoRendering
from ithaca.data.preparation.encode import Encoded, Encoding, MixedKinds, encode
from ithaca.data.preparation.inputs import Input
from ithaca.data.preparation.pieces import LongText, Piece, slices, split
from ithaca.data.preparation.records import Document
from ithaca.data.preparation.sources import LONG, Bad, Place, Reading, documents
from ithaca.data.preparation.streams import SKIP_HINT
from ithaca.data.preparation.workers import usable_cores
from ithaca.data.tokenfile import Stored


@dataclass(frozen=True)
class Group:
    """Documents that are encoded together."""

    place: Place  # behind them
    items: list[Document | Bad]


@dataclass(frozen=True)
class Part:
    """A part of a long text: raw bytes for one token a byte."""

    place: Place  # behind the text
    where: str
    content: Piece | bytes
    first: bool
    last: bool
    left: int = 0  # bytes of the text behind it, about


Task = Group | Part


def _length(part: Piece | bytes) -> int:
    return len(part) if isinstance(part, bytes) else len(part.text) - part.before - part.behind


@dataclass(frozen=True)
class Job:
    """How documents become tasks, and tasks become tokens."""

    encoding: Encoding
    reading: Reading
    group_bytes: int

    def processes(self, files: Sequence[Input], wanted: int | None) -> int:
        """Return how many processes help: none if this one can do it all, or if there is little."""
        tokenizer, size = self.encoding.tokenizer, sum(file.size for file in files)
        if tokenizer is None or tokenizer.raw or (size <= self.group_bytes and not any(f.packed for f in files)):
            return 0
        return wanted or usable_cores()

    def tasks(self, files: Sequence[Input], start: Place) -> Iterator[Task]:
        """Yield the documents behind a place in groups of about `group_bytes`, and long ones in parts."""
        items: list[Document | Bad] = []
        place, held = start, 0
        for behind, item in documents(files, start, self.reading):
            if isinstance(item, Document) and self._is_long(item):
                if items:
                    yield Group(place, items)
                yield from self._parts(behind, item)
                items, held = [], 0
            else:
                items.append(item)
                size = len(item.content) + len(item.prompt) if isinstance(item, Document) else 0
                held += size + 1024  # so that many tiny documents end a group, too
            place = behind
            if held >= self.group_bytes:
                yield Group(place, items)
                items, held = [], 0
        if items:
            yield Group(place, items)

    def _is_long(self, document: Document) -> bool:
        if document.ready or document.chat or document.prompt or self.encoding.tokenizer is None:
            return False
        in_memory = isinstance(document.content, str) and not self.reading.raw and len(document.content) > LONG
        return in_memory or isinstance(document.content, LongText)

    def _parts(self, place: Place, document: Document) -> Iterator[Part]:
        content = document.content
        if isinstance(content, LongText) and self.reading.raw:
            found: Iterator[Piece | bytes] = content.chunks()
        else:
            found = split(content.texts() if isinstance(content, LongText) else slices(str(content)))
        first, part, left = True, next(found), len(content)
        for following in found:
            left = max(left - _length(part), 0)
            yield Part(place, document.where, part, first, last=False, left=left)
            first, part = False, following
        yield Part(place, document.where, part, first, last=True)

    def here(self, task: Task) -> bool:
        """Return whether the calling process should work on a task: it can read ready tokens from files itself."""
        return isinstance(task, Group) and any(
            isinstance(item, Document) and isinstance(item.content, Stored) for item in task.items
        )

    def work(self, task: Task) -> Any:
        """Return the tokens of a task: a list of `Encoded` and `Bad`; tokens, or those of a piece and its window."""
        if isinstance(task, Group):
            return self._encode_group(task.items)
        assert self.encoding.tokenizer is not None
        if isinstance(task.content, bytes):
            return np.frombuffer(task.content, np.uint8)
        try:
            return task.content.encode(self.encoding.tokenizer.encode)
        except DataError as problem:
            return self._bad(f"{problem}, in {task.where}")

    def _encode_group(self, items: list[Document | Bad]) -> list[Encoded | Bad]:
        if not any(isinstance(item, Bad) for item in items):
            try:
                return list(encode([item for item in items if isinstance(item, Document)], self.encoding))
            except (MixedKinds, NoRendering):
                raise
            except DataError as problem:
                self._bad(str(problem))
        return [found for item in items for found in self._encode_one(item)]

    def _encode_one(self, item: Document | Bad) -> list[Encoded | Bad]:
        """Encode a document alone, because its group has a document that cannot be encoded."""
        if isinstance(item, Bad):
            return [item]
        try:
            return list(encode([item], self.encoding))
        except (MixedKinds, NoRendering):
            raise
        except DataError as problem:
            return [self._bad(str(problem))]

    def _bad(self, sentence: str) -> Bad:
        if not self.reading.skip_bad:
            raise DataError(f"{sentence}{SKIP_HINT}") from None
        return Bad(sentence)
