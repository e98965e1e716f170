"""Which tokens see which: tokens of a packed sequence see earlier tokens of their own document only.

Everything here is arithmetic on offsets. Only the naive kernel builds a mask of tokens × tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

MOST_PIECES = 65535  # in one call of a GPU kernel: each has a place in the second or third dimension of a CUDA grid


@dataclass(frozen=True)
class Pieces:
    """Rectangles of attention: rows q_bounds[i]:q_bounds[i+1] see keys k_bounds[i]:k_bounds[i+1].

    With `causal`, each rectangle is the lower triangle of a square (both bounds are the same then). `ragged` means that
    the shapes come from this batch's documents and will hardly repeat. A kernel that builds something for each shape
    should leave them to another kernel.
    """

    q_bounds: tuple[int, ...]
    k_bounds: tuple[int, ...]
    causal: bool
    ragged: bool = True
    on_device: Tensor | None = field(default=None, compare=False)
    """int32 bounds that replace q_bounds and k_bounds, which then have the ends alone. Last documents may be empty."""

    def __post_init__(self) -> None:
        assert len(self.q_bounds) == len(self.k_bounds) >= 2
        assert not self.causal or self.q_bounds == self.k_bounds

    @staticmethod
    def documents(bounds: tuple[int, ...]) -> "Pieces":
        """Causal attention within each document of a packed sequence."""
        lengths = {b - a for a, b in pairwise(bounds)}
        return Pieces(bounds, bounds, causal=True, ragged=len(lengths) > 1)

    @staticmethod
    def changing(bounds: Tensor, tokens: int) -> "Pieces":
        """Causal attention within documents whose bounds are read on the device, anew in each replay of a CUDA graph.

        Only for kernels with `KernelFacts.replays`.
        """
        return Pieces((0, tokens), (0, tokens), causal=True, on_device=bounds)

    @staticmethod
    def rectangle(rows: int, keys: int, ragged: bool) -> "Pieces":
        """All rows see all keys."""
        return Pieces((0, rows), (0, keys), causal=False, ragged=ragged)

    def equal(self, rows: int, keys: int) -> int:
        """The number of pieces, if all have the same shape and together cover all rows and keys; else 0."""
        if self.on_device is not None:
            return 0
        count = len(self.q_bounds) - 1
        for bounds, total in ((self.q_bounds, rows), (self.k_bounds, keys)):
            # Kernels ask in every call: nothing is built for each of thousands of documents
            if total < count or total % count or bounds != tuple(range(0, total + 1, total // count)):
                return 0
        return count

    def groups(self, most: int) -> "Iterator[tuple[slice, slice, Pieces]]":
        """(rows, keys, pieces) of at most so many pieces at a time; their bounds begin at the group's first row."""
        for first in range(0, len(self.q_bounds) - 1, most):
            q, k = (bounds[first : first + most + 1] for bounds in (self.q_bounds, self.k_bounds))
            rows, keys = (tuple(edge - bounds[0] for edge in bounds) for bounds in (q, k))
            yield slice(q[0], q[-1]), slice(k[0], k[-1]), Pieces(rows, keys, self.causal, self.ragged)

    def spans(self) -> list[tuple[slice, slice]]:
        """(rows, keys) of each piece."""
        q, k = pairwise(self.q_bounds), pairwise(self.k_bounds)
        return [(slice(*a), slice(*b)) for a, b in zip(q, k, strict=True)]


def document_bounds(documents_BS: Tensor) -> tuple[int, ...]:
    """Offsets of the documents in the rows laid end to end, both ends included. A new row or id begins a document."""
    flat = documents_BS.flatten()
    new = torch.ones_like(flat, dtype=torch.bool)
    new[1:] = flat[1:] != flat[:-1]
    new[:: documents_BS.shape[1]] = True
    return (*new.nonzero().flatten().tolist(), flat.numel())


def positions(bounds: tuple[int, ...]) -> Tensor:
    """[tokens] int64: the position of each token within its document."""
    edges = torch.tensor(bounds)
    return torch.arange(bounds[-1]) - edges[:-1].repeat_interleave(edges.diff())


def squared_lengths(bounds: tuple[int, ...]) -> int:
    """Σ length² over the documents, which attention's FLOPs are proportional to."""
    return sum((stop - start) ** 2 for start, stop in pairwise(bounds))


def attended_length(bounds: tuple[int, ...]) -> float:
    """Σ length² / tokens: the sequence length S in the FLOP count of a packed sequence."""
    return squared_lengths(bounds) / bounds[-1]
