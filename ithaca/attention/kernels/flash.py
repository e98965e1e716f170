"""Torch's variable-length flash attention for CUDA: pieces of any lengths in one launch, with grouped queries.

It has about half the speed of cuDNN on Hopper, but builds nothing for a new shape. So it is for packed documents.
"""

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.packed import PackedKernel

aten = torch.ops.aten


class Flash(PackedKernel):
    facts = KERNEL_FACTS["flash"]

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        q_bounds, k_bounds, q_longest, k_longest = self.lengths(pieces, q, k)
        o, lse, *_ = aten._flash_attention_forward(
            q, k, v, q_bounds, k_bounds, q_longest, k_longest, 0.0, pieces.causal, False, scale=scale
        )
        return o, lse

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
        q_bounds, k_bounds, q_longest, k_longest = self.lengths(pieces, q, k)
        # The random state is for dropout, which is off
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
