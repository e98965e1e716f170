"""Which tokens see which: a packed sequence is cut into documents, and no token sees past its own.

Everything here is arithmetic on offsets; no mask of tokens × tokens is ever built outside the naive twin.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Rectangles of attention: rows q_bounds[i]:q_bounds[i+1] see keys k_bounds[i]:k_bounds[i+1].

    `causal` turns each rectangle into the lower triangle of a square (then both bounds agree). `ragged` says that the
    shapes come from the documents at hand: they will hardly come again, so a kernel that builds something for each
    shape should leave them to one that does not.
    """

    q_bounds: tuple[int, ...]
    k_bounds: tuple[int, ...]
    causal: bool
    ragged: bool = True

    def __post_init__(self) -> None:
        assert len(self.q_bounds) == len(self.k_bounds) >= 2
        assert not self.causal or self.q_bounds == self.k_bounds

    @staticmethod
    def documents(bounds: tuple[int, ...]) -> "Pieces":
        """Causal attention within each document of a packed sequence."""
        lengths = {b - a for a, b in pairwise(bounds)}
        return Pieces(bounds, bounds, causal=True, ragged=len(lengths) > 1)

    @staticmethod
    def rectangle(rows: int, keys: int, ragged: bool) -> "Pieces":
        """All rows see all keys."""
        return Pieces((0, rows), (0, keys), causal=False, ragged=ragged)

    def equal(self, rows: int, keys: int) -> int:
        """How many pieces there are, if they have one shape and together cover all rows and keys; else 0."""
        count = len(self.q_bounds) - 1
        covers = (self.q_bounds[0], self.q_bounds[-1], self.k_bounds[0], self.k_bounds[-1]) == (0, rows, 0, keys)
        shapes = {(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in self.spans()}
        return count if covers and len(shapes) == 1 else 0

    def spans(self) -> list[tuple[slice, slice]]:
        q, k = pairwise(self.q_bounds), pairwise(self.k_bounds)
        return [(slice(*a), slice(*b)) for a, b in zip(q, k, strict=True)]


def document_bounds(documents_BS: Tensor) -> tuple[int, ...]:
    """Offsets of the documents in the rows laid end to end; a new row or a new id begins a document."""
    flat = documents_BS.flatten()
    new = torch.ones_like(flat, dtype=torch.bool)
    new[1:] = flat[1:] != flat[:-1]
    new[:: documents_BS.shape[1]] = True
    return (*new.nonzero().flatten().tolist(), flat.numel())


def positions(bounds: tuple[int, ...]) -> Tensor:
    """[tokens] int64: each token's place within its document."""
    edges = torch.tensor(bounds)
    return torch.arange(bounds[-1]) - edges[:-1].repeat_interleave(edges.diff())


def squared_lengths(bounds: tuple[int, ...]) -> int:
    """Σ length² over the documents, which attention's FLOPs are proportional to."""
    return sum((stop - start) ** 2 for start, stop in pairwise(bounds))


def attended_length(bounds: tuple[int, ...]) -> float:
    """Σ length² / tokens: the S of the FLOP count when documents keep apart."""
    return squared_lengths(bounds) / bounds[-1]
