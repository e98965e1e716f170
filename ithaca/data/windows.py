"""Documents laid into rows of one length, so that a loss over all rows counts every label exactly once.

A document that fits into a row is never cut: its loss is that of the document alone. A longer one is cut into pieces of
a row's length. Each piece begins with the last token of the piece before it, which predicts the first new one. Rows
take whole documents in the order of the file; what is left of a row is padding without labels. Given up: a document
that does not fit into the rest of a row begins a new one, so up to half of the tokens can be padding where documents
are a little longer than half a row.
"""

import numpy as np
import torch
from torch import Tensor

from ithaca.base.errors import DataError
from ithaca.data.reader import TokenFile
from ithaca.data.subset import count_labels
from ithaca.data.tokenfile import quoted
from ithaca.parallel.batch import IGNORED

PADDING = 8192  # tokens of a document of padding: attention over them costs little


class Windows:
    """The rows of a token file. Memory: 16 bytes a row; the document bounds are read once, in `__init__`."""

    def __init__(self, data: TokenFile, length: int, limit: int | None = None, name: str = ""):
        """`limit`: how many tokens of the data count, from the first on. `name`: of the data, for messages."""
        self.name = name or quoted(data.path)
        self.data, self.length, self.tokens = data, length, min(limit or data.tokens, data.tokens)
        bounds = data.bounds()
        bounds = np.append(bounds[bounds < self.tokens], self.tokens)
        self.documents = len(bounds) - 1
        self.longest = min(int(np.diff(bounds).max()), length)  # tokens of a document in one row
        self.labels = count_labels(data, self.tokens) if limit else data.header.labels
        self._spans = _row_spans(bounds, length)
        if self.labels == 0:
            raise DataError(
                f"{self.name} has 0 labels in its first {self.tokens} of {data.tokens} tokens: there "
                "is no loss to measure; documents of 2 tokens or more, with completions, have some"
            )

    @property
    def left_out(self) -> int:
        """Tokens of the data that the limit leaves out."""
        return self.data.tokens - self.tokens

    def __len__(self) -> int:
        return len(self._spans)

    def rows(self, numbers: range) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, labels and document ids of some rows, int64 [rows, length]. Rows past the end are padding.

        Labels stand beside their own tokens; the label of a token that does not count is IGNORED.
        """
        tokens, labels, documents = (np.zeros((len(numbers), self.length), np.int64) for _ in range(3))
        labels[:], documents[:] = IGNORED, -1 - np.arange(self.length) // PADDING
        for place, number in enumerate(numbers):
            if number >= len(self):
                continue
            start, stop = self._spans[number]
            window, part = self.data.read(start, stop), slice(0, stop - start)
            tokens[place, part] = labels[place, part] = window.tokens
            documents[place, part] = window.documents
            if window.learned is not None:
                labels[place, part][~window.learned] = IGNORED
        return torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents)


def _row_spans(bounds: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Return the tokens of each row as (start, stop)."""
    spans, start, end = list[tuple[int, int]](), 0, int(bounds[-1])
    while start < end:
        stop = int(bounds[np.searchsorted(bounds, start + length, side="right") - 1])
        if stop > start:
            spans.append((start, stop))
            start = stop
        else:  # within a document that is longer than a row
            spans.append((start, start + length))
            start += length - 1
    return spans
