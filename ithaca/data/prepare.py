"""Make a token file from documents, in one pass that can be resumed.

Text is encoded in groups of about 4 MB, which the tokenizer spreads over the cores. Memory is bounded by a group, or by
the longest document if that is longer. The journal is written every two seconds, so a killed run loses two seconds.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text as RichText

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes
from ithaca.data.chat_render import Renderer
from ithaca.data.chat_template import ChatFormat
from ithaca.data.encode import Encoding, encode
from ithaca.data.inputs import Input, check_unchanged, find_inputs
from ithaca.data.partial import Journal, Partial, partial_files
from ithaca.data.records import Document
from ithaca.data.sources import Place, Reading, documents, holds_tokens
from ithaca.data.tokenfile import VERSION, Header, smallest_dtype
from ithaca.data.tokenizer import Bytes, Tokenizer

_EVERY = 10.0  # seconds between lines


def say(console: Console, line: str) -> None:
    """Print a line as it is: rich would take some paths for markup."""
    console.print(RichText(line), soft_wrap=True)


class Meter:
    """Shows the bytes read, of all bytes, and the tokens made of them."""

    def __init__(self, console: Console, total: int, done: int):
        self._console, self._total, self._first = console, total, done
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
            self._task = self._bar.add_task("0 tokens", total=total, completed=done)

    def __enter__(self) -> "Meter":
        self._began = self._last = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def show(self, done: int, tokens: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, description=f"{tokens:,} tokens")
        elif time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            speed = (done - self._first) / (self._last - self._began)
            line = f"{100 * done / max(self._total, 1):.0f} % of {format_bytes(self._total)}, {format_bytes(speed)}/s"
            say(self._console, f"{line}, {tokens:,} tokens")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()


@dataclass(frozen=True)
class Prepared:
    """The token file that was made, and counts of what was skipped."""

    path: Path
    header: Header
    binary: int  # binary files in folders, skipped
    empty: int  # documents without a token, skipped
    counts: Journal


def prepare(
    paths: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer | None = None,
    bin_dtype: str | None = None,
    console: Console | None = None,
    journal_seconds: float = 2.0,
    group_bytes: int = 4 << 20,
    chats: ChatFormat | None = None,
) -> Prepared:
    """Write the documents at the paths into a token file. Without a tokenizer, each byte of text is a token."""
    console = console or Console()
    _check_vacant(out)
    inputs = find_inputs(paths, bin_dtype, partial_files(out))
    reading = Reading(raw=tokenizer is None or tokenizer.raw, bin_dtype=bin_dtype)
    encoding = _mixed(tokenizer, chats) if tokenizer else _uniform(inputs.files, reading)
    identity = _identity(inputs.files, encoding, bin_dtype)
    with closing(encoding), Partial(out, identity, smallest_dtype(encoding.vocab), journal_seconds) as partial:
        _say_if_resumed(console, out, partial)
        found = documents(inputs.files, partial.now.place, reading)
        _fill(partial, _groups(found, group_bytes), encoding, inputs.files, console)
        check_unchanged(inputs.files)
        now = partial.now
        if now.documents == 0:
            partial.discard()
            raise DataError(f"'{paths[0]}' has no token in its {now.empty} documents: name files with text or tokens")
        header = partial.finish(encoding.fingerprint, encoding.vocab if encoding.tokenizer else now.largest + 1)
    return Prepared(out, header, inputs.binary, now.empty, now)


def _check_vacant(out: Path) -> None:
    if os.path.lexists(out):  # a link that leads nowhere is something, too
        raise DataError(f"--out '{out}' exists already: name another file, nothing is overwritten")
    if not out.parent.is_dir():
        raise DataError(
            f"--out '{out}' lies in '{out.parent}', which is no folder: make it by `mkdir -p '{out.parent}'`"
        )


def _uniform(files: Sequence[Input], reading: Reading) -> Encoding:
    """Return the encoding without a tokenizer: all inputs are text, or all are ready tokens."""
    text, ready = (_first(files, kind, reading) for kind in (False, True))
    if text and ready:
        raise DataError(
            f"'{text.path}' is text and '{ready.path}' holds ready tokens: "
            "name the tokenizer that made the tokens with --tokenizer"
        )
    return Encoding(Bytes() if text else None, mixed=False)


def _first(files: Sequence[Input], ready: bool, reading: Reading) -> Input | None:
    return next((file for file in files if holds_tokens(file, reading) is ready), None)


def _mixed(tokenizer: Tokenizer, chats: ChatFormat | None) -> Encoding:
    return Encoding(tokenizer, mixed=True, chats=Renderer(chats) if chats else None)


def _identity(files: Sequence[Input], encoding: Encoding, bin_dtype: str | None) -> str:
    """Return a digest of inputs and tokenizer: a killed run can be continued if its digest is the same."""
    stamps = [(str(file.path.absolute()), file.kind, file.stamp) for file in files]
    tokenizer, chats = encoding.tokenizer, encoding.chats
    made_by = (tokenizer.fingerprint, tokenizer.end) if tokenizer else None
    template = chats.form.fingerprint if chats else None
    return hashlib.sha256(json.dumps([VERSION, stamps, made_by, bin_dtype, template]).encode()).hexdigest()


def _say_if_resumed(console: Console, out: Path, partial: Partial) -> None:
    if partial.begun:
        say(console, f"Continuing '{out}' after {partial.now.documents} documents, {partial.now.tokens} tokens")
    elif partial.begun is False:
        say(console, f"Starting '{out}' again: the part on disk is from other inputs or another tokenizer")


def _fill(
    partial: Partial,
    groups: Iterator[tuple[Place, list[Document]]],
    encoding: Encoding,
    files: Sequence[Input],
    console: Console,
) -> None:
    """Encode and append every document that the partial file does not hold yet."""
    before = [0, *accumulate(file.size for file in files)]
    place = partial.now.place
    with Meter(console, before[-1], before[place.file] + place.offset) as meter:
        for place, group in groups:
            _append(partial, group, encoding)
            partial.reach(place)
            meter.show(before[place.file] + place.offset, partial.now.tokens)
    partial.reach(place, force=True)


def _groups(found: Iterator[tuple[Place, Document]], size: int) -> Iterator[tuple[Place, list[Document]]]:
    """Yield groups of documents of about `size` bytes, each with the place behind it."""
    group: list[Document] = []
    place, held = Place(), 0
    for place, document in found:
        group.append(document)
        held += len(document.content) + len(document.prompt) + 1024  # so that many tiny documents end a group, too
        if held >= size:
            yield place, group
            group, held = [], 0
    if group:
        yield place, group


def _append(partial: Partial, group: list[Document], encoding: Encoding) -> None:
    for encoded in encode(group, encoding):
        if any(map(len, encoded.parts)):
            partial.add(encoded.parts, encoded.ignored, encoded.largest)
        else:
            partial.skip()
        if encoded.sample:
            partial.count(encoded.sample, encoded.where, encoded.learns)
