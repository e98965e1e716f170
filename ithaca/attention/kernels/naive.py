"""The slow twin: scores, softmax and every gradient written out, in at least fp32, anywhere.

Costs Hq × T × U numbers for a piece, a few times over. Every other kernel is compared with it.
"""

import torch
from torch import Tensor

from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import PieceByPiece, per_kv_head, per_query_head
from ithaca.base.precision import at_least_fp32


class Naive(PieceByPiece):
    facts = KERNEL_FACTS["naive"]

    def one_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores_HTU = _scores(q, k, causal, scale)
        lse_HT = scores_HTU.logsumexp(-1)
        weights_HTU = (scores_HTU - lse_HT[..., None]).exp()
        o = torch.einsum("htu,uhd->thd", weights_HTU, per_query_head(v, q).to(weights_HTU.dtype))
        return o.to(q.dtype), lse_HT

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
        high = at_least_fp32(q.dtype)
        weights_HTU = (_scores(q, k, causal, scale) - lse[..., None]).exp()
        do_h, q_h = do.to(high), q.to(high)
        dv = torch.einsum("htu,thd->uhd", weights_HTU, do_h)
        dweights_HTU = torch.einsum("thd,uhd->htu", do_h, per_query_head(v, q).to(high))
        inner_HT = (do_h * o.to(high)).sum(-1).T
        dscores_HTU = weights_HTU * (dweights_HTU - inner_HT[..., None]) * scale
        dq = torch.einsum("htu,uhd->thd", dscores_HTU, per_query_head(k, q).to(high))
        dk = torch.einsum("htu,thd->uhd", dscores_HTU, q_h)
        return dq.to(q.dtype), per_kv_head(dk, k), per_kv_head(dv, v)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    high = at_least_fp32(q.dtype)
    scores_HTU = torch.einsum("thd,uhd->htu", q.to(high), per_query_head(k, q).to(high)) * scale
    if causal:
        rows, keys = torch.arange(q.shape[0]), torch.arange(k.shape[0])
        hidden = (keys[None, :] > rows[:, None]).to(q.device)
        scores_HTU = scores_HTU.masked_fill(hidden, -torch.inf)
    return scores_HTU
