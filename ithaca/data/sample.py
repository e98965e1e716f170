"""Sequences out of a token file, decided by (seed, step) alone: the same on any number of ranks, and after a restart.

The stream of all tokens is a circle. Each epoch cuts it into windows of a sequence's length, from a random place on,
and visits each window once, in a random order. The order is a keyed permutation computed window by window, so nothing
is shuffled in memory: a sequence costs reading its own tokens and bounds, whatever the size of the file. Given up is a
shuffle of documents: neighbours in the file stay neighbours in a window.
"""

import numpy as np
import torch
from torch import Tensor

from ithaca.data.tokenfile import TokenFile
from ithaca.parallel.batch import IGNORED

_ROUNDS = 6
_WORD = (1 << 64) - 1


def sequences(data: TokenFile, rows: int, length: int, seed: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """A step's tokens, labels and document ids, int64 [rows, length].

    Labels stand beside their own tokens, IGNORED where a prompt is not learned. A document's part in one row has one
    id; behind the end of the stream ids go on with new ones.
    """
    tokens, labels, documents = (np.empty((rows, length), np.int64) for _ in range(3))
    for row in range(rows):
        start = _window(len(data.tokens), length, seed, step * rows + row)
        _fill(data, start, tokens[row], labels[row], documents[row])
    return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents)


def _window(size: int, length: int, seed: int, number: int) -> int:
    """Where in the stream the sequence of that number begins."""
    windows = max(size // length, 1)
    epoch, index = divmod(number, windows)
    # SeedSequence, unlike a Generator, gives the same numbers in every release of numpy
    shift, key = (int(word) for word in np.random.SeedSequence((seed, epoch)).generate_state(2, np.uint64))
    return (shift + permuted(index, windows, key) * length) % size


def permuted(index: int, size: int, key: int) -> int:
    """Where a random permutation of range(size), chosen by the key, takes an index.

    A Feistel network permutes the numbers of 2·half bits; what falls outside the range is taken on until it is inside,
    which keeps it one to one. At most four times the range are numbered, so four steps are the average at worst.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mixed((number << half | right) ^ key) >> (64 - half))
        index = left << half | right
        if index < size:
            return index


def _mixed(word: int) -> int:
    """splitmix64: every bit of the result depends on every bit of the word."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def _fill(data: TokenFile, start: int, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> None:
    """One row from `start` on, around the end of the stream as often as needed."""
    done, rotation = 0, 0
    while done < len(tokens):
        end = min(start + len(tokens) - done, len(data.tokens))
        part = slice(done, done + end - start)
        tokens[part] = labels[part] = data.tokens[start:end]
        first, lengths = _documents_between(data.bounds, start, end)
        documents[part] = np.repeat(rotation * data.documents + first + np.arange(len(lengths)), lengths)
        if data.learned_from is not None:
            learned_from = np.repeat(data.learned_from[first : first + len(lengths)], lengths)
            labels[part][np.arange(start, end) < learned_from] = IGNORED
        done, start, rotation = part.stop, 0, rotation + 1


def _documents_between(bounds: np.ndarray, start: int, end: int) -> tuple[int, np.ndarray]:
    """The first document with tokens in [start, end), and how many there each one has."""
    first = int(np.searchsorted(bounds, start, side="right")) - 1
    last = int(np.searchsorted(bounds, end, side="left"))
    return first, np.diff(np.clip(bounds[first : last + 1], start, end))
