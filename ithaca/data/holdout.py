"""Documents held out of a token file: two views of it, one to train on and one to validate on.

A hash of a document's number decides, and nothing else: every rank, every start and any number of ranks hold out the
same documents. Both views have the interface of a TokenFile, so samplers need not know. A view keeps 40 bytes for each
run of neighbouring documents that it has, which is at most two runs for each document held out; every block that it
reads is compared with its checksum, as in the file. Opening reads all document bounds once.
"""

import hashlib
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_count
from ithaca.data.reader import TokenFile, Window
from ithaca.data.tokenfile import quoted

SEED = 0x17ACA  # fixed: with another one a run would train on what its last start held out
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
        self.path, self.header = data.path, replace(data.header, tokens=tokens, documents=documents)
        self.header = replace(self.header, labels=count_labels(self, tokens) if labels is None else labels)

    def identity(self) -> dict[str, Any]:
        """Return what tells these documents from any other; the digest is of the file's and of which documents."""
        return {**super().identity(), "sha256": self._digest}

    @cached_property
    def _digest(self) -> str:
        runs = np.stack([self._first, self._first + np.diff(self._run_documents)]).astype("<i8")
        return hashlib.sha256(self.header.blocks_sha256.encode() + runs.tobytes()).hexdigest()

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
        lengths = np.diff(self._data.bounds())
        runs = zip(self._first, np.diff(self._run_documents), strict=True)
        return np.append(0, np.cumsum(np.concatenate([lengths[first : first + count] for first, count in runs])))


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


def hold_out(data: TokenFile, share: float) -> tuple[Subset, Subset]:
    """Return the documents to train on, and a share of them to validate on: at least one of each."""
    count = max(round(share * data.documents), 1)
    if count >= data.documents:
        raise DataError(
            f"{quoted(data.path)} has {format_count(data.documents, 'document')}, and data.validation={share:g} would "
            f"hold out {count}, which leaves none to train on: {_instead(data.documents)}"
        )
    held = np.zeros(data.documents, bool)
    held[np.argpartition(_hashes(data.documents), count)[:count]] = True
    bounds = data.bounds()
    validation = Subset(data, held, bounds)
    return Subset(data, ~held, bounds, data.header.labels - validation.header.labels), validation


def _instead(documents: int) -> str:
    if documents == 1:
        return "name a token file of other documents as data.validation"
    return f"{1 / documents:.2g} holds out one"


def _hashes(count: int) -> np.ndarray:
    """Return a hash of each number below `count`; numbers that differ have hashes that differ (splitmix64)."""
    with np.errstate(over="ignore"):
        words = (np.arange(count, dtype=np.uint64) + np.uint64(SEED)) * np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
