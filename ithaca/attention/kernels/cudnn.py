"""cuDNN's attention, the fastest on Hopper: one causal square or full rectangle at a time, GQA without copies.

It builds a plan for each new shape (0.1–0.3 s), so it is for few, large pieces. Backward takes two q-sized tensors of
workspace and is not deterministic. It refuses one token that sees one token, so `naive` computes such pieces.
"""

import torch
from torch import Tensor

from ithaca.attention.kernels.naive import Naive
from ithaca.attention.kernels.seam import PieceByPiece, bhtd, refuses_unless_half_on_cuda, thd

aten = torch.ops.aten


class Cudnn(PieceByPiece):
    name = "cudnn"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return refuses_unless_half_on_cuda(device, dtype, head_size, 128)

    def one_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if len(q) == len(k) == 1:
            return Naive().one_forward(q, k, v, causal, scale)
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            bhtd(q), bhtd(k), bhtd(v), None, True, 0.0, causal, False, scale=scale
        )
        return thd(o), lse.view(q.shape[1], q.shape[0])

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
        if len(q) == len(k) == 1:
            return Naive().one_backward(do, q, k, v, o, lse, causal, scale)
        # The random state is that of dropout, of which there is none
        state = torch.zeros((), dtype=torch.long, device=q.device)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            bhtd(do),
            bhtd(q),
            bhtd(k),
            bhtd(v),
            bhtd(o),
            lse.contiguous()[None, ..., None],
            state,
            state,
            None,
            None,
            None,
            q.shape[0],
            k.shape[0],
            0.0,
            causal,
            scale=scale,
        )
        dq, dk, dv = (thd(grad) for grad in grads)
        return dq, dk, dv
