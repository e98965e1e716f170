"""The elements of a JSON list, one at a time: memory holds one element and about a mebibyte of text."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ithaca.base.errors import first_line
from ithaca.data.preparation.streams import CHUNK, BadFile, chunks, not_utf8

_SPACE = re.compile(r"\s*")


def elements(path: Path, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a JSON list, each with the bytes read so far. Memory holds one element and a mebibyte."""
    text = _ListText(path, stream)
    text.expect("[", "a list")
    first = True
    while not text.at("]"):
        if not first:
            text.expect(",", "',' or ']'")
        yield text.done, text.element()
        first = False
    text.expect("]", "']'")
    if text.peek():
        raise BadFile(f"'{path}' has text after its list: keep one list a file")


class _ListText:
    """The text of a JSON list, of which only the part that is being parsed is held."""

    def __init__(self, path: Path, stream: BinaryIO):
        self._path, self._chunks = path, chunks(stream)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self.done = "", 0, 0
        self._parse = json.JSONDecoder().raw_decode

    def peek(self) -> str:
        """Return the next character that is no space; nothing at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # pyrefly: ignore
            if self._at < len(self._text) or not self._more(1):
                return self._text[self._at : self._at + 1]

    def at(self, mark: str) -> bool:
        return self.peek() == mark

    def expect(self, mark: str, what: str) -> None:
        if not self.at(mark):
            raise BadFile(f"'{self._path}' is not JSON (no {what} near byte {self.done})")
        self._at += 1

    def element(self) -> Any:
        self.peek()
        wanted = CHUNK
        while True:
            try:
                found, end = self._parse(self._text, self._at)
                if end < len(self._text) or not self._more(wanted):  # a number may go on
                    self._at = end
                    return found
            except (ValueError, RecursionError) as problem:
                cut = getattr(problem, "msg", "").startswith("Unterminated string")
                near = getattr(problem, "pos", 0) >= len(self._text) - 16  # of the end: the rest is not read yet
                if not (cut or near) or not self._more(wanted):
                    why = getattr(problem, "msg", first_line(problem))
                    raise BadFile(f"'{self._path}' is not JSON ({why}, near byte {self.done})") from None
            wanted *= 2  # so that a long element is parsed a few times only

    def _more(self, wanted: int) -> bool:
        """Read about `wanted` more bytes; return whether there were any."""
        kept = [self._text[self._at :]]
        before = self.done
        self._at = 0
        while self.done - before < wanted and (chunk := next(self._chunks, None)) is not None:
            try:
                kept.append(self._decoder.decode(chunk))
            except UnicodeDecodeError as problem:
                raise not_utf8(f"'{self._path}'", self.done + problem.start, problem.object[problem.start]) from None
            self.done += len(chunk)
        self._text = "".join(kept)
        return self.done > before
