"""Torch's flash attention for CUDA in its variable-length form: all pieces of any lengths in one launch, GQA included.

About half the speed of cuDNN on Hopper, but it builds nothing per shape: the kernel for packed documents.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import FactsKernel

aten = torch.ops.aten


class Flash(FactsKernel):
    facts = KERNEL_FACTS["flash"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        q_bounds, k_bounds, q_longest, k_longest = _lengths(pieces, q)
        o, lse, *_ = aten._flash_attention_forward(
            q, k, v, q_bounds, k_bounds, q_longest, k_longest, 0.0, pieces.causal, False, scale=scale
        )
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
        q_bounds, k_bounds, q_longest, k_longest = _lengths(pieces, q)
        # The random state is that of dropout, of which there is none
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        return aten._flash_attention_backward(
            do.contiguous(),
            q,
            k,
            v,
            o,
            lse.contiguous(),
            q_bounds,
            k_bounds,
            q_longest,
            k_longest,
            0.0,
            pieces.causal,
            state,
            unused,
            scale=scale,
        )


def _lengths(pieces: Pieces, q: Tensor) -> tuple[Tensor, Tensor, int, int]:
    assert pieces.q_bounds[0] == 0
    assert pieces.q_bounds[-1] == q.shape[0]
    bounds = [
        torch.tensor(edges, dtype=torch.int32).to(q.device, non_blocking=True)
        for edges in (pieces.q_bounds, pieces.k_bounds)
    ]
    longest = [max(b - a for a, b in pairwise(edges)) for edges in (pieces.q_bounds, pieces.k_bounds)]
    return bounds[0], bounds[1], longest[0], longest[1]
