"""Views with the interface of a token file: some of its documents, or the documents of several files.

A subset keeps 40 bytes for each run of neighbouring documents that it has. Every block that it reads is compared with
its checksum, as in the file. Opening reads all document bounds once, and the mask if labels have to be counted.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ithaca.data.reader import TokenFile, Window

READ = 1 << 20  # tokens whose labels are counted at a time


class Subset(TokenFile):
    """Some documents of a token file, in its order and numbered anew from 0."""

    def __init__(self, data: TokenFile, chosen: np.ndarray, bounds: np.ndarray, labels: int | None = None):
        """`chosen`: bool for each document of the file. `bounds`: as the file's `bounds()` returns them.

        `labels`: their number in these documents; None: they are counted.
        """
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        first, stop = edges[::2], edges[1::2]  # runs of neighbouring documents that are chosen
        self._data, self._first, self._start = data, first, bounds[first]
        self._run_documents = np.append(0, np.cumsum(stop - first))  # of this view that come before each run
        self._run_tokens = np.append(0, np.cumsum(bounds[stop] - bounds[first]))
        tokens, documents = int(self._run_tokens[-1]), int(self._run_documents[-1])
        self.path, self.name, self.divisible = data.path, data.name, data.divisible
        self.header = replace(data.header, tokens=tokens, documents=documents)
        if labels is None:
            labels = _chosen_labels(data, chosen, bounds) if data.header.masked else tokens - documents
        self.header = replace(self.header, labels=labels)

    def identity(self) -> dict[str, Any]:
        """Return what tells these documents from any other; the digest is of the file's and of which documents."""
        return {**super().identity(), "sha256": self._digest}

    @cached_property
    def _digest(self) -> str:
        runs = np.stack([self._first, self._first + np.diff(self._run_documents)]).astype("<i8")
        return hashlib.sha256(self._data.identity()["sha256"].encode() + runs.tobytes()).hexdigest()

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` to before `stop` of this view, after their blocks have been checked."""
        first, last = np.searchsorted(self._run_tokens, (start, stop - 1), side="right") - 1
        parts = [self._read_run(run, start, stop) for run in range(first, last + 1)]
        learned = [part.learned for part in parts]
        return Window(
            np.concatenate([part.tokens for part in parts]),
            None if learned[0] is None else np.concatenate(learned),  # pyrefly: ignore
            np.concatenate([part.documents for part in parts]),
        )

    def _read_run(self, run: int, start: int, stop: int) -> Window:
        """Return those of the tokens that lie in one run."""
        moved = int(self._start[run] - self._run_tokens[run])
        low, high = max(start, self._run_tokens[run]), min(stop, self._run_tokens[run + 1])
        window = self._data.read(int(low) + moved, int(high) + moved)
        return replace(window, documents=window.documents - (self._first[run] - self._run_documents[run]))

    def bounds(self) -> np.ndarray:
        """Return the offsets of all documents of this view, int64 [documents + 1]."""
        counts = np.diff(self._run_documents)
        numbers = np.arange(self.documents) + np.repeat(self._first - self._run_documents[:-1], counts)
        return np.append(0, np.cumsum(np.diff(self._data.bounds())[numbers]))


class Concatenation(TokenFile):
    """The documents of several token files of one tokenizer, file after file."""

    def __init__(self, files: Sequence[TokenFile]):
        self._files, heads = files, [data.header for data in files]
        self._file_tokens = np.append(0, np.cumsum([head.tokens for head in heads]))  # that come before each file
        self._file_documents = np.append(0, np.cumsum([head.documents for head in heads]))
        self.path, self.header = (
            files[0].path,
            replace(
                max(heads, key=lambda head: head.vocab),
                tokens=int(self._file_tokens[-1]),
                documents=int(self._file_documents[-1]),
                masked=any(head.masked for head in heads),
                labels=sum(head.labels for head in heads),
            ),
        )

    def identity(self) -> dict[str, Any]:
        """Return what tells these documents from any other; the digest is of those of the files."""
        digests = "".join(data.identity()["sha256"] for data in self._files)
        return {**super().identity(), "sha256": hashlib.sha256(digests.encode()).hexdigest()}

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` to before `stop`, after their blocks have been checked."""
        first, last = np.searchsorted(self._file_tokens, (start, stop - 1), side="right") - 1
        parts = [self._read_file(number, start, stop) for number in range(first, last + 1)]
        learned = [np.ones(len(part.tokens), bool) if part.learned is None else part.learned for part in parts]
        return Window(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate(learned) if self.header.masked else None,
            np.concatenate([part.documents for part in parts]),
        )

    def _read_file(self, number: int, start: int, stop: int) -> Window:
        """Return those of the tokens that lie in one file."""
        before = int(self._file_tokens[number])
        low, high = max(start, before), min(stop, int(self._file_tokens[number + 1]))
        window = self._files[number].read(low - before, high - before)
        return replace(window, documents=window.documents + self._file_documents[number])

    def bounds(self) -> np.ndarray:
        """Return the offsets of all documents, int64 [documents + 1]."""
        inner = [data.bounds()[1:] + before for data, before in zip(self._files, self._file_tokens, strict=False)]
        return np.concatenate([[0], *inner])


def concatenated(files: Sequence[TokenFile]) -> TokenFile:
    """Return files as one; a single one as it is."""
    return files[0] if len(files) == 1 else Concatenation(files)


def count_labels(data: TokenFile, tokens: int) -> int:
    """Return the labels of the first `tokens` tokens. Reads them once if the data have a mask.

    A label is a learned token that another token of its document precedes.
    """
    if not data.header.masked:
        return tokens - int(np.searchsorted(data.bounds(), tokens))
    labels, last = 0, -1
    for start in range(0, tokens, READ):
        window = data.read(start, min(start + READ, tokens))
        assert window.learned is not None
        begins = np.diff(window.documents, prepend=last) != 0
        labels, last = labels + int((window.learned & ~begins).sum()), int(window.documents[-1])
    return labels


def _chosen_labels(data: TokenFile, chosen: np.ndarray, bounds: np.ndarray) -> int:
    """Return the labels of some documents. Reads the parts of the file that have any of them, once and in order.

    Reading document by document would check a whole block for each, which takes minutes for millions of conversations.
    """
    labels = 0
    for start in range(0, data.tokens, READ):
        stop = min(start + READ, data.tokens)
        first, last = np.searchsorted(bounds, (start, stop - 1), side="right") - 1
        if chosen[first : last + 1].any():
            window, begins = data.read(start, stop), np.zeros(stop - start, bool)
            inside = bounds[first : last + 1]
            begins[inside[inside >= start] - start] = True
            labels += int((window.learned & ~begins & chosen[window.documents]).sum())
    return labels


def split_by_length(data: TokenFile, least: int) -> tuple[TokenFile | None, TokenFile | None]:
    """Return the documents of at least this many tokens, and the shorter ones; None where there are none."""
    bounds = data.bounds()
    long = np.diff(bounds) >= least
    if long.all() or not long.any():
        return (data, None) if long.all() else (None, data)
    some = Subset(data, long, bounds)
    return some, Subset(data, ~long, bounds, data.header.labels - some.header.labels)
