"""Training sequences cut from a circle of tokens (data.packing = "cut"), determined by (seed, step) alone.

Any number of ranks, and a run after a restart, draw the same sequences. The tokens of the file form a circle. Each
epoch cuts the circle into windows of a sequence's length, from a random offset on, and visits each window once in
random order. The order is a keyed permutation that is computed for each window, so nothing is shuffled in memory: a
sequence costs the reading of its own tokens and bounds, whatever the size of the file. Given up: documents are not
shuffled, so neighbours in the file stay neighbours in a window. packing.py has the other ways.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ithaca.base.sizes import format_count
from ithaca.data.reader import TokenFile
from ithaca.data.shuffle import epoch_words, permuted
from ithaca.parallel.batch import IGNORED

Fill = Callable[[int, np.ndarray, np.ndarray, np.ndarray], None]  # row number; tokens, labels, documents to fill in


def sequences(
    data: TokenFile, rows: int, length: int, seed: int, step: int, only: range | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and document ids of a step's rows, int64 [rows, length]; of the rows in `only` if given.

    Labels stand beside their own tokens. The label of a token that is not learned is IGNORED. Within a row each
    document has one id; behind the end of the file the ids continue with new ones. A row does not depend on which
    other rows are drawn.
    """
    only = range(rows) if only is None else only
    return draw(Cut(data, length, seed).fill, length, [step * rows + row for row in only])


def draw(fill: Fill, length: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and document ids of the rows with these numbers, int64 [rows, length]."""
    tokens, labels, documents = (np.empty((len(numbers), length), np.int64) for _ in range(3))
    for place, number in enumerate(numbers):
        fill(number, tokens[place], labels[place], documents[place])
    return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents)


class Cut:
    """Rows that are windows of the circle."""

    left_out = 0

    def __init__(self, data: TokenFile, length: int, seed: int, joined: bool = False):
        """`joined`: each row is one document; its tokens see all before them, and positions run on."""
        self._data, self._length, self._seed, self._joined = data, length, seed, joined
        self.per_epoch = windows_per_epoch(data.tokens, length)

    def fill(self, number: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
        """Fill in the row with this number."""
        start = _window_start(self._data.tokens, self._length, self._seed, number)
        _fill_row(self._data, start, tokens, labels, documents)
        if self._joined:
            documents[:] = 0

    def filled(self, rows: int) -> int:
        """Return the tokens of the first `rows` rows, without padding."""
        return rows * self._length

    def describe(self) -> str:
        between = "without a mask between documents" if self._joined else "cut from documents laid end to end"
        return f"{format_count(self.per_epoch, 'sequence')} an epoch, {between}"

    def close(self) -> None:
        """Nothing is open."""


def windows_per_epoch(size: int, length: int) -> int:
    """Return how many rows an epoch of this many tokens has."""
    return max(size // length, 1)


def _window_start(size: int, length: int, seed: int, number: int) -> int:
    """Return where in the file the sequence with this number begins."""
    windows = windows_per_epoch(size, length)
    epoch, index = divmod(number, windows)
    offset, key = epoch_words(seed, epoch, 2)
    return (offset + permuted(index, windows, key) * length) % size


def _fill_row(data: TokenFile, start: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
    """Fill one row from `start` on. At the end of the file it continues at the beginning, as often as needed."""
    done, laps = 0, 0
    while done < len(tokens):
        end = min(start + len(tokens) - done, data.tokens)
        part = slice(done, done + end - start)
        window = data.read(start, end)
        tokens[part] = labels[part] = window.tokens
        documents[part] = window.documents + laps * data.documents
        if window.learned is not None:
            labels[part][~window.learned] = IGNORED
        done, start, laps = part.stop, 0, laps + 1
