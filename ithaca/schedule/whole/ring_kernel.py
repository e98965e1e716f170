"""Ring attention as a kernel: K and V travel around the ring, for blocks over all local tokens (`ring`, `hybrid`,
`untied`: there those of each round).

A ring rank keeps its queries, two segments of the sequence. The K and V of each rank arrive one block after the other,
and the next block is on its way while the kernel runs on this one. Backward they arrive again. The sums of a block's dK
and dV, in at least fp32, follow one step behind it and reach their owner in the last step. Only K/V heads travel.

    around    R − 1 steps of K and V, point to point; backward R more steps of their gradients
    gather    all K and V at once, in R times their memory; backward the gradients of all, in fp32, reduce-scattered

It has the signature of a kernel, so that checkpointing, rounds of heads and the exchange know nothing of the ring.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.attention.merge import merge
from ithaca.attention.visits import Visit, visit_runs
from ithaca.base.precision import at_least_fp32
from ithaca.parallel.layout import Layout
from ithaca.parallel.ring import Ring, ring_runs

Block = tuple[int, Tensor]  # the rank that owns them, and K and V [2, tokens, heads, D]


class RingKernel:
    """`bounds`: offsets of the documents; `gathers`: all K and V are gathered at once."""

    def __init__(self, kernel: Kernel, ring: Ring, layout: Layout, bounds: tuple[int, ...], gathers: bool):
        self.name = kernel.name
        self._kernel, self._ring, self._layout, self._bounds, self._gathers = kernel, ring, layout, bounds, gathers

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self._kernel.refuses(device, dtype, head_size)

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        self._kernel.prepare(device, dtype, heads, kv_heads, head_size, rectangles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """(o, lse)"""
        high = at_least_fp32(q.dtype)
        o, lse = torch.zeros_like(q, dtype=high), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=high)
        for owner, (key, value) in self._blocks(k, v):
            for visit in self._visits(owner):
                rows, keys = visit.rows, visit.keys
                part = self._kernel.forward(q[rows], key[keys], value[keys], visit.pieces, scale)
                merge(o[rows], lse[:, rows], *part)
        return o.to(q.dtype), lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        pieces: Pieces,  # noqa: ARG002
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)"""
        dq, gradients = torch.zeros_like(q, dtype=at_least_fp32(q.dtype)), self._ring.kv_gradient_sums(self._gathers)
        for owner, kv in self._blocks(k, v):
            (key, value), (dk, dv) = kv, gradients.begin(owner, kv)
            for visit in self._visits(owner):
                rows, keys = visit.rows, visit.keys
                dq_part, dk_part, dv_part = self._kernel.backward(
                    do[rows], q[rows], key[keys], value[keys], o[rows], lse[:, rows], visit.pieces, scale
                )
                dq[rows] += dq_part
                dk[keys] += dk_part
                dv[keys] += dv_part
            gradients.end()
        del kv, key, value
        dk, dv = gradients.wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[Block]:
        """K and V of every rank, this rank's own first."""
        mine = torch.stack((k, v))
        if self._gathers:
            every = self._ring.all_gather(mine).wait()
            yield from ((owner, every[owner]) for owner in self._owners())
            return
        for step, owner in enumerate(self._owners()):
            coming = self._ring.send_recv(mine) if step < self._ring.ranks - 1 else None
            yield owner, mine
            if coming is not None:
                mine = coming.wait()

    def _owners(self) -> list[int]:
        return [(self._ring.rank - step) % self._ring.ranks for step in range(self._ring.ranks)]

    def _visits(self, owner: int) -> list[Visit]:
        queries, keys = (ring_runs(self._layout, rank)(0) for rank in (self._ring.rank, owner))
        return visit_runs(queries, keys, self._bounds)
