"""The tokens that are learned in a rendered conversation, from spans of characters."""

from collections.abc import Sequence

import numpy as np

from ithaca.data.chat.turns import Span


def learned_tokens(offsets: np.ndarray, spans: Sequence[Span], length: int) -> np.ndarray:
    """Return which tokens are learned: those that share a character with a span. `offsets` is [tokens, 2].

    So a token that lies across the border of a span is learned, as in `transformers`.
    """
    inside = np.zeros(length + 1, np.int64)  # after the cumulative sum: learned characters before each
    for start, end in spans:
        inside[start + 1 : end + 1] = 1
    inside = inside.cumsum()
    start, end = offsets.T
    start = np.where(start == end, np.maximum(start - 1, 0), start)  # a space whose offsets were trimmed ends there
    return inside[end] > inside[start]


def ignored_ranges(learned: np.ndarray) -> tuple[range, ...]:
    """Return the tokens that are not learned, as rising ranges."""
    steps = np.diff(np.concatenate(([True], learned, [True])).astype(np.int8))
    return tuple(
        range(int(first), int(last))
        for first, last in zip(np.flatnonzero(steps < 0), np.flatnonzero(steps > 0), strict=True)
    )
