"""Kernels that take pieces of any lengths in one call, with the bounds of the pieces on the device."""

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from torch import Tensor

from ithaca.attention.documents import MOST_PIECES, Pieces
from ithaca.attention.kernels.seam import FactsKernel
from ithaca.base.precision import at_least_fp32

REMEMBERED = 64  # bounds that stay on the device


class PackedKernel(FactsKernel, ABC):
    """A kernel that takes the bounds of pieces as two tensors on the device, and at most `MOST_PIECES` in one call.

    Every layer of a step has the same bounds, so they are copied once: a copy in every call would take longer than
    small pieces do, and from memory that is not pinned it would make the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bounds: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        """(o, lse) of one call."""

    @abstractmethod
    def call_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        if len(pieces.q_bounds) <= MOST_PIECES + 1:
            return self.call_forward(q, k, v, pieces, scale)
        o, lse = torch.empty_like(q), q.new_empty((q.shape[1], len(q)), dtype=at_least_fp32(q.dtype))
        for rows, keys, part in pieces.groups(MOST_PIECES):
            o[rows], lse[:, rows] = self.call_forward(q[rows], k[keys], v[keys], part, scale)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(pieces.q_bounds) <= MOST_PIECES + 1:
            return self.call_backward(do, q, k, v, o, lse, pieces, scale)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for rows, keys, part in pieces.groups(MOST_PIECES):
            dq[rows], dk[keys], dv[keys] = self.call_backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], part, scale
            )
        return dq, dk, dv

    def lengths(self, pieces: Pieces, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, int, int]:
        """Bounds of the rows and of the keys, int32, and the most rows and keys of a piece."""
        # These kernels do not write rows outside of all pieces
        assert (pieces.q_bounds[0], pieces.q_bounds[-1]) == (0, len(q)), "rows outside of all pieces"
        assert (pieces.k_bounds[0], pieces.k_bounds[-1]) == (0, len(k)), "keys outside of all pieces"
        if pieces.on_device is not None:  # any piece may be as long as all together
            return pieces.on_device, pieces.on_device, len(q), len(k)
        sides = pieces.q_bounds, pieces.k_bounds
        q_longest, k_longest = (max(stop - start for start, stop in pairwise(edges)) for edges in sides)
        q_bounds, k_bounds = (self._on_device(edges, q.device) for edges in sides)
        return q_bounds, k_bounds, q_longest, k_longest

    def _on_device(self, edges: tuple[int, ...], device: torch.device) -> Tensor:
        key = edges, device
        if key not in self._bounds:
            if len(self._bounds) >= REMEMBERED:
                self._bounds.pop(next(iter(self._bounds)))  # the one that was made first
            on_host = torch.tensor(edges, dtype=torch.int32)
            on_host = on_host.pin_memory() if device.type == "cuda" else on_host
            self._bounds[key] = on_host.to(device, non_blocking=True)
        return self._bounds[key]
