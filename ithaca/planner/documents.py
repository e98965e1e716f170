"""The documents of a packed sequence, as `--documents` names them: 64x4K, 192K+64x1K, or a token file.

A pattern is repeated until it fills a sequence, and its last document is cut. A token file is packed as in training
(data/packing.py): cut into windows, whole documents with padding, or joined to one document. Of some sequences, evenly
spread over each source, the one with the average attention stands for all. Cost: one pass over the bounds, 8 bytes a
document; of data packed whole, at most 65,536 documents are packed. Tokens are not read.
"""

import os
import re
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from ithaca.base.errors import ConfigError, PlanError
from ithaca.base.sizes import format_tokens, parse_tokens
from ithaca.data.best_fit import count_rows, packing_of, pieces_of, plan_epoch, with_padding
from ithaca.data.mixture import Data, Mixture
from ithaca.data.reader import TokenFile, open_tokens

WINDOWS = 64  # sequences of a token file that are looked at
SAMPLE = 2**16  # documents that are packed, of a file with more
MOST = 2**20  # documents in a sequence
EXAMPLE = "write 64x4K, 192K+64x1K or the name of a token file"


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents laid end to end, which sequences of any length are made of."""

    name: str  # as the user gave it
    bounds: np.ndarray  # int64, of all documents
    packed: bool  # of a token file, and packed as in training
    packing: str = "cut"  # of a token file: `cut`, `whole` or `joined`
    too_long: str = "cut"  # what becomes of a document that is longer than a sequence, under `whole`
    mixed: tuple[tuple[float, "Documents"], ...] = ()  # the sources of a mixture, with their shares
    data: TokenFile | None = None  # the token file
    _found: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def lengths(self, tokens: int) -> tuple[int, ...]:
        """The lengths of the documents in a sequence of this many tokens."""
        if tokens not in self._found:
            window = self._average(tokens) if self.packed else self._window(0, tokens)
            self._found[tokens] = tuple(window.tolist())
        return self._found[tokens]

    def longest(self, tokens: int) -> int:
        """The most tokens that a document has in sequences of this many tokens."""
        if self.mixed:
            return max(part.longest(tokens) for _, part in self.mixed)
        return tokens if self.packing == "joined" else min(tokens, int(np.diff(self.bounds).max()))

    def attended(self, tokens: int) -> float:
        """Σ length² / tokens: the sequence length S in the FLOP count of a packed sequence."""
        return sum(length**2 for length in self.lengths(tokens)) / tokens

    def describe(self, tokens: int) -> str:
        """The documents of a sequence in a line."""
        count = len(self.lengths(tokens))
        if self.packed:
            how = f"an average sequence of {self.name}"
        elif self.bounds[-1] == tokens:
            how = self.name
        else:
            change = "repeated" if self.bounds[-1] < tokens else "cut"
            how = f"{self.name}, {format_tokens(int(self.bounds[-1]))} tokens, {change} to {format_tokens(tokens)}"
        return f"{count} in each sequence ({how}); a token sees {self.attended(tokens) / 2:,.0f} others on average"

    def _average(self, tokens: int) -> np.ndarray:
        found = self._candidates(tokens)
        squares = [float(np.square(lengths, dtype=float).sum()) for _, lengths in found]
        mean = sum(weight * square for (weight, _), square in zip(found, squares, strict=True))
        return found[min(range(len(found)), key=lambda index: abs(squares[index] - mean))][1]

    def _candidates(self, tokens: int) -> list[tuple[float, np.ndarray]]:
        """Some sequences with their weights, which add up to one."""
        if self.mixed:
            return [
                (share * weight, lengths) for share, part in self.mixed for weight, lengths in part._candidates(tokens)
            ]
        if self.packing == "joined":
            return [(1.0, np.array([tokens]))]
        if self.packing == "whole":
            return self._whole_rows(tokens)
        starts = (int(self.bounds[-1]) * index // WINDOWS for index in range(WINDOWS))
        return [(1 / WINDOWS, self._window(start, tokens)) for start in starts]

    def _whole_rows(self, tokens: int) -> list[tuple[float, np.ndarray]]:
        """Rows of whole documents, padding included."""
        lengths = np.diff(self.bounds)[:: -(-(len(self.bounds) - 1) // SAMPLE)]
        sampled = np.append(0, np.cumsum(lengths))
        pieces = pieces_of(sampled, tokens, self.too_long, self.name)
        rows = count_rows(pieces.lengths, tokens)
        plan = plan_epoch(pieces.lengths, tokens, rows, 0, 0)
        seen = range(0, rows, -(-rows // WINDOWS))
        rows_seen = (with_padding(pieces.lengths[plan.row(row)].tolist(), tokens) for row in seen)
        return [(1 / len(seen), np.array(lengths)) for lengths in rows_seen]

    def _window(self, start: int, tokens: int) -> np.ndarray:
        """The lengths of documents in `tokens` tokens from `start` on. The first document follows the last."""
        size, stop = int(self.bounds[-1]), start + tokens
        first, last = start // size, (stop - 1) // size
        count = (last - first + 1) * len(self.bounds)
        if count > 2 * MOST and tokens // size * (len(self.bounds) - 1) > MOST:
            raise PlanError(
                f"--documents {self.name} makes about {count} documents of {format_tokens(tokens)} tokens: give longer "
                f"ones, so that there are at most {MOST}"
            )

        def begins(lap: int) -> np.ndarray:
            some = np.searchsorted(self.bounds[:-1], (start + 1 - lap * size, stop - lap * size))
            return self.bounds[slice(*some)] + lap * size

        whole = (np.arange(first + 1, last)[:, None] * size + self.bounds[:-1]).ravel()  # the laps between both ends
        inside = [begins(first), whole, begins(last)] if last > first else [begins(first)]
        return np.diff(np.concatenate([[start], *inside, [stop]]))


def read_documents(text: str) -> Documents:
    """The documents that `--documents` names."""
    # `Path.is_file` raises an error for a pattern that is too long for a file name
    if text.endswith(".tokens") or os.path.isfile(text):
        return file_documents(open_tokens(Path(text)))
    return Documents(text, np.array([0, *accumulate(parse_documents(text))]), packed=False)


def file_documents(data: Data, packing: str = "auto", too_long: str = "truncate") -> Documents:
    """The documents of a token file or of a mixture, packed as the options of [data] say."""
    if isinstance(data, Mixture):
        parts = [(source.share, file_documents(source.data, packing, too_long)) for source in data.sources]
        return Documents("the mixture", np.zeros(1, np.int64), packed=True, mixed=tuple(parts))
    name = str(data.path.name if data.path else "the data")
    kept = too_long if data.header.masked else "cut"
    return Documents(name, data.bounds(), packed=True, packing=packing_of(data, packing), too_long=kept, data=data)


def parse_documents(text: str) -> tuple[int, ...]:
    """'192K+2x1K' -> 196608, 1024, 1024."""
    lengths: list[int] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(?:(\d{1,9})\s*[xX×]\s*)?([\w.]+)", part.strip())
        try:
            length = parse_tokens(match[2]) if match else 0
        except ConfigError:
            length = 0
        count = int(match[1] or 1) if match else 0
        if not length or not count:
            raise PlanError(f"--documents {text} cannot be read at '{part}': {EXAMPLE}")
        if len(lengths) + count > MOST:
            raise PlanError(f"--documents {text} has {len(lengths) + count} documents: give at most {MOST}")
        lengths += count * [length]
    return tuple(lengths)
