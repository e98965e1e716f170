"""Make a token file from documents, in one pass that can be resumed.

This process reads documents in groups of about 1 MB; other processes encode them (workers.py), and this one appends the
tokens in order. A text of more than 1 MiB is encoded in pieces by all of them (pieces.py), so memory is bounded by some
megabytes of text a process. The journal is written every two seconds, so a killed run loses two seconds, and the
document that it was at.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_count
from ithaca.data.chat.render import Renderer
from ithaca.data.chat.template import ChatFormat
from ithaca.data.preparation.encode import Encoded, Encoding, added
from ithaca.data.preparation.inputs import Input, check_unchanged, find_inputs
from ithaca.data.preparation.meter import Meter, say
from ithaca.data.preparation.partial import Journal, Partial, partial_files
from ithaca.data.preparation.pieces import Joiner, Piece
from ithaca.data.preparation.sources import Bad, Reading, holds_tokens
from ithaca.data.preparation.tasks import Group, Job, Part, Task
from ithaca.data.preparation.tokenizer import Bytes, Numbers, Tokenizer
from ithaca.data.preparation.workers import Workers, usable_cores
from ithaca.data.tokenfile import VERSION, Header, smallest_dtype


@dataclass(frozen=True)
class Prepared:
    """The token file that was made, and counts of what was skipped."""

    path: Path
    header: Header
    notes: tuple[str, ...]  # choices that were made
    others: tuple[Path, ...]  # files in folders that no reader takes, skipped
    empty: int  # documents without a token, skipped
    bad: int  # files and records that could not be read, skipped
    first_bad: tuple[str, ...]  # sentences about the first of them
    forced: int  # places where a long text was cut and its pieces did not agree
    counts: Journal


def prepare(
    paths: Sequence[Path],
    out: Path,
    tokenizer: Tokenizer | None = None,
    bin_dtype: str | None = None,
    console: Console | None = None,
    journal_seconds: float = 2.0,
    group_bytes: int = 1 << 20,
    field: str | None = None,
    skip_bad: bool = False,
    workers: int | None = None,
    chats: ChatFormat | None = None,
) -> Prepared:
    """Write the documents at the paths into a token file. Without a tokenizer, each byte of text is a token."""
    console = console or Console()
    _check_vacant(out)
    if workers is not None and workers < 1:
        raise DataError(f"--workers {workers} is too few: 1 to {usable_cores()} processes are sensible here")
    inputs = find_inputs(paths, bin_dtype, partial_files(out), skip_bad)
    if field is not None and all(file.kind in ("text", "npy", "bin") for file in inputs.files):
        raise DataError(
            f"--field {field} is for records, and '{paths[0]}' has none: leave it out, or name .jsonl files"
        )
    reading = Reading(tokenizer is None or tokenizer.raw, bin_dtype, field, skip_bad)
    renderer = Renderer(chats) if chats else None
    encoding = Encoding(tokenizer, True, renderer) if tokenizer else _uniform(inputs.files, reading)
    identity = _identity(inputs.files, encoding, reading)
    job = Job(encoding, reading, group_bytes)
    # Workers are forked before the partial file is open: one that survives this process must not hold its lock
    with (
        closing(encoding),
        Workers(job.work, job.processes(inputs.files, workers)) as pool,
        Partial(out, identity, smallest_dtype(encoding.vocab), journal_seconds, skip_bad) as partial,
    ):
        _say_if_resumed(console, out, partial)
        if not partial.begun:
            for sentence in inputs.bad:
                partial.skip_bad(sentence)
        try:
            _fill(partial, pool, job, inputs.files, console)
            check_unchanged(inputs.files)
        except DataError:
            partial.discard_unless_journaled()
            raise
        now = partial.now
        if now.documents == 0:
            partial.discard()
            raise _nothing_left(paths[0], now)
        header = partial.finish(encoding.fingerprint, encoding.vocab if encoding.tokenizer else now.largest + 1)
    notes, others = tuple(inputs.notes), tuple(inputs.skipped)
    return Prepared(out, header, notes, others, now.empty, now.bad, now.first_bad, now.forced, now)


def _nothing_left(path: Path, now: Journal) -> DataError:
    """Return the error about inputs without a token, with the reasons why --skip-bad skipped some."""
    text = f"'{path}' has no token in its {now.empty + now.bad} documents"
    if not now.bad:
        return DataError(f"{text}: name files with text or tokens")
    skipped = format_count(now.bad, "bad file or record")
    reasons = "; ".join([*now.first_bad, *(["…"] if now.bad > len(now.first_bad) else [])])
    return DataError(f"{text}, as --skip-bad skipped {skipped}: {reasons}")


def _check_vacant(out: Path) -> None:
    if os.path.lexists(out):  # a link that leads nowhere is something, too
        raise DataError(f"--out '{out}' exists already: name another file, nothing is overwritten")
    if not out.parent.is_dir():
        raise DataError(
            f"--out '{out}' lies in '{out.parent}', which is not a folder: make it with `mkdir -p '{out.parent}'`"
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


def _identity(files: Sequence[Input], encoding: Encoding, reading: Reading) -> str:
    """Return a digest of inputs and tokenizer: a killed run can be continued if its digest is the same."""
    stamps = [(str(file.path.absolute()), file.kind, file.stamp) for file in files]
    tokenizer, chats = encoding.tokenizer, encoding.chats
    made_by = (tokenizer.fingerprint, tokenizer.begin, tokenizer.finish) if tokenizer else None
    how = (reading.bin_dtype, reading.field)  # not `skip_bad`: a run that a bad record has ended continues with it
    template = chats.form.fingerprint if chats else None
    return hashlib.sha256(json.dumps([VERSION, stamps, made_by, how, template]).encode()).hexdigest()


def _say_if_resumed(console: Console, out: Path, partial: Partial) -> None:
    if partial.begun:
        say(console, f"Continuing '{out}' after {partial.now.documents} documents, {partial.now.tokens} tokens")
    elif partial.outdated:
        say(console, f"Starting '{out}' again: the part on disk was made by the rules of another version of Ithaca")
    elif partial.begun is False:
        say(console, f"Starting '{out}' again: the part on disk is from other inputs or another tokenizer")


class _Writer:
    """Appends results to the partial file, in order."""

    def __init__(self, partial: Partial, encoding: Encoding):
        self._partial, self._encoding, self._length = partial, encoding, 0

    @property
    def tokens(self) -> int:
        """The tokens of all documents, and those so far of a long one."""
        return self._partial.now.tokens + self._length

    def take(self, task: Task, result: Any) -> None:
        if isinstance(task, Group):
            for found in result:
                self._take(found)
        else:
            self._take_part(task, result)
        if isinstance(task, Group) or task.last:
            self._partial.reach(task.place)

    def _take(self, found: Encoded | Bad) -> None:
        if isinstance(found, Bad):
            self._partial.skip_bad(found.sentence)
        elif any(map(len, found.parts)):
            self._partial.add(found.parts, found.ignored, found.largest)
        else:
            self._partial.skip()
        if isinstance(found, Encoded) and found.sample:
            self._partial.count(found.sample, found.where, found.learns)

    def _take_part(self, part: Part, result: Any) -> None:
        tokenizer = self._encoding.tokenizer
        assert tokenizer is not None
        if part.first:
            self._joiner, self._length, self._bad = Joiner(tokenizer.encode), 0, None
            self._last: Numbers = np.empty(0, np.uint32)
        if isinstance(result, Bad):
            self._bad = self._bad or result
        elif self._bad is None:
            ids = self._joiner.add(part.content, *result) if isinstance(part.content, Piece) else result
            self._append(ids)
        if part.last:
            self._end()

    def _append(self, ids: np.ndarray) -> None:
        if len(ids) and not self._length:
            begin, _ = added(self._last, ids, self._encoding.tokenizer)
            self._write(begin)
        if len(ids):
            self._last = ids
            self._write(ids)

    def _write(self, ids: np.ndarray) -> None:
        self._length += len(ids)
        self._partial.append(ids)

    def _end(self) -> None:
        """End the document of the last part."""
        self._end_document()
        self._length = 0

    def _end_document(self) -> None:
        if self._bad is not None:
            self._partial.drop_document()
            self._partial.skip_bad(self._bad.sentence)
            return
        self._append(self._joiner.end())
        _, finish = added(self._last[:0], self._last, self._encoding.tokenizer)
        self._write(finish)
        if self._length:
            self._partial.end_document(self._length, forced=self._joiner.forced)
        else:
            self._partial.skip()


def _fill(partial: Partial, pool: Workers[Task], job: Job, files: Sequence[Input], console: Console) -> None:
    """Encode and append every document that the partial file does not hold yet."""
    before = [0, *accumulate(file.size for file in files), 0]
    place = partial.now.place
    writer = _Writer(partial, job.encoding)
    with Meter(console, before[-2], before[place.file] + place.offset) as meter:
        for task, result in pool.map(job.tasks(files, place), job.here):
            writer.take(task, result)
            left = 0 if isinstance(task, Group) else task.left
            meter.show(max(before[task.place.file] + task.place.offset - left, 0), writer.tokens)
    partial.reach(partial.now.place, force=True)
