"""Random orders that depend on a key alone, and are the same in every release of numpy.

A Generator of numpy may give other numbers in another release, and a resumed run must go on with the same rows. Here
numbers are hashes (SplitMix64) of indices and a key; `epoch_key` gets the key from SeedSequence, whose numbers are
fixed.
"""

import numpy as np

_ROUNDS = 6
_WORD = (1 << 64) - 1


def epoch_words(seed: int, epoch: int, count: int) -> list[int]:
    """Return random words of 64 bits for an epoch."""
    # SeedSequence, unlike a Generator, gives the same numbers in every release of numpy
    return [int(word) for word in np.random.SeedSequence((seed, epoch)).generate_state(count, np.uint64)]


def epoch_key(seed: int, epoch: int) -> int:
    return epoch_words(seed, epoch, 1)[0]


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
            left, right = right, left ^ (splitmix64((number << half | right) ^ key) >> (64 - half))
        index = left << half | right
        if index < size:
            return index


def splitmix64(word: int) -> int:
    """Return the word with its bits mixed: every bit of the result depends on every bit of the word."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def hashes(count: int, key: int) -> np.ndarray:
    """Return splitmix64(index ^ key) for each index below `count`, uint64."""
    words = np.arange(count, dtype=np.uint64)
    words ^= np.uint64(key)
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
