"""cuDNN's attention, the fastest on Hopper: causal squares or full rectangles of one shape, GQA without copies.

It builds a plan for each new shape (0.1–0.3 s), so it is for large pieces whose shapes come again; equal pieces, such
as the rows of a batch, go in one call. Backward takes a workspace (facts.py) and is not deterministic.
It refuses one token that sees one token, so `naive` computes such pieces.
"""

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.naive import Naive
from ithaca.attention.kernels.seam import PieceByPiece

aten = torch.ops.aten


class Cudnn(PieceByPiece):
    facts = KERNEL_FACTS["cudnn"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        count = _batch(pieces, q, k)
        return _forward(q, k, v, count, pieces.causal, scale) if count else super().forward(q, k, v, pieces, scale)

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
        count = _batch(pieces, q, k)
        if count:
            return _backward(do, q, k, v, o, lse, count, pieces.causal, scale)
        return super().backward(do, q, k, v, o, lse, pieces, scale)

    def one_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if min(len(q), len(k)) == 1:
            return Naive().one_forward(q, k, v, causal, scale)
        return _forward(q, k, v, 1, causal, scale)

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
        if min(len(q), len(k)) == 1:
            return Naive().one_backward(do, q, k, v, o, lse, causal, scale)
        return _backward(do, q, k, v, o, lse, 1, causal, scale)


def _batch(pieces: Pieces, q: Tensor, k: Tensor) -> int:
    """How many equal pieces can go in one call; 0 when they have to go one by one."""
    count = pieces.equal(len(q), len(k))
    return count if count and min(len(q), len(k)) > count else 0


def _forward(q: Tensor, k: Tensor, v: Tensor, count: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *(_bhtd(x, count) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return _thd(o), lse.reshape(count, q.shape[1], -1).transpose(0, 1).flatten(1)


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    count: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The random state is that of dropout, of which there is none
    state = torch.zeros((), dtype=torch.long, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *(_bhtd(x, count) for x in (do, q, k, v, o)),
        lse.unflatten(1, (count, -1)).transpose(0, 1).contiguous()[..., None],
        state,
        state,
        None,
        None,
        None,
        q.shape[0] // count,
        k.shape[0] // count,
        0.0,
        causal,
        scale=scale,
    )
    dq, dk, dv = (_thd(grad) for grad in grads)
    return dq, dk, dv


def _bhtd(x_THD: Tensor, count: int) -> Tensor:
    return x_THD.unflatten(0, (count, -1)).transpose(1, 2)


def _thd(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(0, 1)
