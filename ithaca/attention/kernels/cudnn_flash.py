"""cuDNN for shapes that repeat, torch's flash attention for the rest: each where it is faster.

Long causal calls and shapes that documents make, which are slow in cuDNN, are cut (cut.py) and merged again in at least
fp32. Memory, if a call is cut: o or dq in fp32; backward also dk and dv in fp32.
"""

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.cudnn import Cudnn
from ithaca.attention.kernels.cut import cut_pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.flash import Flash
from ithaca.attention.kernels.seam import FactsKernel, Kernel
from ithaca.attention.merge import merge
from ithaca.attention.visits import Visit
from ithaca.base.precision import at_least_fp32

BUCKET = KERNEL_FACTS["cudnn+flash"].bucket


class CudnnAndFlash(FactsKernel):
    facts = KERNEL_FACTS["cudnn+flash"]

    def __init__(self, full: Kernel | None = None, ragged: Kernel | None = None, bucket: int = BUCKET) -> None:
        """`full`, `ragged`, `bucket`: other kernels and another size, for tests."""
        super().__init__()
        self._full, self._ragged, self._bucket = full or Cudnn(), ragged or Flash(), bucket

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        visits = self._visits(pieces)
        if len(visits) == 1:
            return self._choose(visits[0].pieces).forward(q, k, v, visits[0].pieces, scale)
        high = at_least_fp32(q.dtype)
        o = torch.zeros_like(q, dtype=high, memory_format=torch.contiguous_format)
        lse = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=high)
        for visit in visits:
            rows, keys = visit.rows, visit.keys
            part = self._choose(visit.pieces).forward(q[rows], k[keys], v[keys], visit.pieces, scale)
            merge(o[rows], lse[:, rows], *part)
            del part  # before the next one is computed
        return o.to(q.dtype), lse

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
        visits = self._visits(pieces)
        if len(visits) == 1:
            return self._choose(visits[0].pieces).backward(do, q, k, v, o, lse, visits[0].pieces, scale)
        high = at_least_fp32(q.dtype)
        sums = [torch.zeros_like(x, dtype=high, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for visit in visits:
            rows, keys = visit.rows, visit.keys
            parts = self._choose(visit.pieces).backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], visit.pieces, scale
            )
            for total, place, part in zip(sums, (rows, keys, keys), parts, strict=True):
                total[place] += part
            del parts, part
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv

    def _visits(self, pieces: Pieces) -> tuple[Visit, ...]:
        assert self.facts.longest is not None
        return cut_pieces(pieces, self._bucket, self._bucket * (self.facts.longest // BUCKET))

    def _choose(self, pieces: Pieces) -> Kernel:
        return self._ragged if pieces.ragged else self._full
