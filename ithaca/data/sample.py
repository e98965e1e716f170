"""Training sequences from a token file, determined by (seed, step) alone.

Any number of ranks, and a run after a restart, draw the same sequences. The tokens of the file form a circle. Each
epoch cuts the circle into windows of a sequence's length, from a random offset on, and visits each window once in
random order. The order is a keyed permutation that is computed for each window, so nothing is shuffled in memory: a
sequence costs the reading of its own tokens and bounds, whatever the size of the file. Given up: documents are not
shuffled, so neighbours in the file stay neighbours in a window.
"""

import numpy as np
import torch
from torch import Tensor

from ithaca.data.reader import TokenFile
from ithaca.parallel.batch import IGNORED

_ROUNDS = 6
_WORD = (1 << 64) - 1


def sequences(
    data: TokenFile, rows: int, length: int, seed: int, step: int, only: range | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and document ids of a step's rows, int64 [rows, length]; of the rows in `only` if given.

    Labels stand beside their own tokens. The label of a token that is not learned is IGNORED. Within a row each
    document has one id; behind the end of the file the ids continue with new ones. A row does not depend on which
    other rows are drawn.
    """
    only = range(rows) if only is None else only
    tokens, labels, documents = (np.empty((len(only), length), np.int64) for _ in range(3))
    for place, row in enumerate(only):
        start = _window_start(data.tokens, length, seed, step * rows + row)
        _fill_row(data, start, tokens[place], labels[place], documents[place])
    return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents)


def rows_per_epoch(data: TokenFile, length: int) -> int:
    """Return how many rows of `length` tokens one pass over the data has."""
    return _windows(data.tokens, length)


def _windows(size: int, length: int) -> int:
    """Return into how many windows an epoch cuts the circle; a file shorter than a window is one of them."""
    return max(size // length, 1)


def _window_start(size: int, length: int, seed: int, number: int) -> int:
    """Return where in the file the sequence with this number begins."""
    windows = _windows(size, length)
    epoch, index = divmod(number, windows)
    # SeedSequence, unlike a Generator, gives the same numbers in every release of numpy
    offset, key = (int(word) for word in np.random.SeedSequence((seed, epoch)).generate_state(2, np.uint64))
    return (offset + permuted(index, windows, key) * length) % size


def permuted(index: int, size: int, key: int) -> int:
    """Return the image of an index under a random permutation of range(size), chosen by the key.

    A Feistel network permutes the numbers of 2·half bits. A result outside the range is permuted again until it is
    inside, which keeps the map one to one. The numbers are at most four times the range: four rounds on average at
    worst.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for number in range(_ROUNDS):
            left, right = right, left ^ (_splitmix64((number << half | right) ^ key) >> (64 - half))
        index = left << half | right
        if index < size:
            return index


def _splitmix64(word: int) -> int:
    """Return the word with its bits mixed: every bit of the result depends on every bit of the word."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


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
