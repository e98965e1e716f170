"""Documents held out of token files: one view to train on, and one to validate on.

A hash of a document's number decides, and nothing else: every rank, every start and any number of ranks hold out the
same documents. Both views have the interface of a TokenFile (subset.py), so samplers need not know.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_count
from ithaca.data.reader import TokenFile, Window
from ithaca.data.subset import Subset
from ithaca.data.tokenfile import quoted

SEED = 0x17ACA  # fixed: with another one a run would train on what its last start held out


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


class Joined(TokenFile):
    """The documents of several token files, one file after the other."""

    def __init__(self, parts: Sequence[TokenFile]):
        self._files = parts
        self._tokens, self._documents = (
            np.append(0, np.cumsum([getattr(part, name) for part in parts])) for name in ("tokens", "documents")
        )
        self.path, heads = parts[0].path, [part.header for part in parts]
        self.header = replace(
            heads[0],
            tokens=int(self._tokens[-1]),
            documents=int(self._documents[-1]),
            vocab=max(head.vocab for head in heads),
            masked=any(head.masked for head in heads),
            labels=sum(head.labels for head in heads),
        )

    def identity(self) -> dict[str, Any]:
        """Return what tells these documents from any other; the digest is of those of all files."""
        digests = "".join(part.identity()["sha256"] for part in self._files)
        return {**super().identity(), "sha256": hashlib.sha256(digests.encode()).hexdigest()}

    def read(self, start: int, stop: int) -> Window:
        """Return the tokens from `start` to before `stop`, after their blocks have been checked."""
        first, last = np.searchsorted(self._tokens, (start, stop - 1), side="right") - 1
        windows = [self._read_file(number, start, stop) for number in range(first, last + 1)]
        masks = [_mask(window) for window in windows]
        return Window(
            np.concatenate([window.tokens for window in windows]),
            np.concatenate(masks) if self.header.masked else None,
            np.concatenate([window.documents for window in windows]),
        )

    def _read_file(self, number: int, start: int, stop: int) -> Window:
        low, high = int(self._tokens[number]), int(self._tokens[number + 1])
        window = self._files[number].read(max(start, low) - low, min(stop, high) - low)
        return replace(window, documents=window.documents + self._documents[number])

    def bounds(self) -> np.ndarray:
        """Return the offsets of all documents, int64 [documents + 1]."""
        return np.append(0, np.cumsum(np.concatenate([np.diff(part.bounds()) for part in self._files])))


def _mask(window: Window) -> np.ndarray:
    return np.ones(len(window.tokens), bool) if window.learned is None else window.learned


def join(parts: Sequence[TokenFile]) -> TokenFile:
    """Return the documents of several token files as one; a single file as it is."""
    return parts[0] if len(parts) == 1 else Joined(parts)
