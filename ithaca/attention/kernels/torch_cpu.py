"""Torch's flash attention for the CPU: linear memory, float64 to bfloat16.

Its backward wants as many key/value heads as query heads, so they are repeated for it.
"""

import torch
from torch import Tensor

from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import PieceByPiece, bhtd, per_kv_head, per_query_head, thd

aten = torch.ops.aten


class TorchCpu(PieceByPiece):
    facts = KERNEL_FACTS["torch-cpu"]

    def one_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = bhtd(q), bhtd(per_query_head(k, q)), bhtd(per_query_head(v, q))
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, 0.0, causal, scale=scale)
        return thd(o), lse[0]

    def one_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_, k_, v_ = bhtd(q), bhtd(per_query_head(k, q)), bhtd(per_query_head(v, q))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            bhtd(do), q_, k_, v_, bhtd(o), lse[None], 0.0, causal, scale=scale
        )
        return thd(dq), per_kv_head(thd(dk), k), per_kv_head(thd(dv), v)
