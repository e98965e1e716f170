"""The loss, tile by tile: final norm, head and cross-entropy of some tokens at a time, both ways in one pass.

Whole logits never exist: a tile holds `tile` × vocabulary of them, in the dtype of the computation and once more in
fp32. The gradients are made beside the loss, while the logits are there, so backward only scales them; for that the
head's gradient takes vocabulary × hidden in fp32 from the forward pass on. Tiles add to it in fp32: summed in bf16 over
many tiles it would lose several bits. `naive_loss` is the twin.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.errors import InputError
from ithaca.model.block import norm
from ithaca.model.precision import at_least_fp32
from ithaca.model.spec import Spec
from ithaca.parallel.batch import IGNORED


def head_logits(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor) -> Tensor:
    """Final norm, with its weight, and head."""
    return F.linear(norm(spec, x_TE, weight), head)


def naive_loss(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels_T: Tensor) -> Tensor:
    """Σ over valid tokens of the cross-entropy, with all logits at once."""
    logits = head_logits(spec, x_TE, weight, head)
    return F.cross_entropy(logits.to(at_least_fp32(logits.dtype)), labels_T, ignore_index=IGNORED, reduction="sum")


def tiled_loss(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels_T: Tensor, tile: int) -> Tensor:
    """The same sum, in memory that does not grow with the tokens."""
    return _TiledLoss.apply(spec, x_TE, weight, head, labels_T, tile)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: Spec, x: Tensor, weight: Tensor, head: Tensor, labels: Tensor, tile: int) -> Tensor:
        high = at_least_fp32(x.dtype)
        loss = x.new_zeros((), dtype=high)
        need_x, need_weight, need_head = ctx.needs_input_grad[1:4]
        dx = torch.empty_like(x) if need_x else None
        dweight = torch.zeros_like(weight, dtype=high) if need_weight else None
        dhead = torch.zeros_like(head, dtype=high) if need_head else None
        for start in range(0, x.shape[0], tile):
            part = slice(start, start + tile)
            with torch.enable_grad():
                x_tile = x[part].detach().requires_grad_(need_x)
                weight_ = weight.detach().requires_grad_(need_weight)
                normed = norm(spec, x_tile, weight_)
            tile_loss, dlogits = _cross_entropy(F.linear(normed.detach(), head), labels[part])
            loss += tile_loss
            if dhead is not None:
                dhead += dlogits.T @ normed.detach()
            wanted = [tensor for tensor in (x_tile, weight_) if tensor.requires_grad]
            if wanted:
                grads = list(torch.autograd.grad(normed, wanted, dlogits @ head))
                if dx is not None:
                    dx[part] = grads.pop(0)
                if dweight is not None:
                    dweight += grads.pop(0)
        ctx.grads = dx, dweight, dhead
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise InputError(
                "backward was called twice on one loss, whose gradients are kept once: call the model again"
            )
        return (None, *(None if grad is None else grad.mul_(scale) for grad in grads), None, None)


def _cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of the tile's cross-entropy in at least fp32, and its gradient in the dtype of the logits."""
    high = logits_TV.to(at_least_fp32(logits_TV.dtype))
    valid_T = labels_T != IGNORED
    safe_T1 = labels_T.clamp(min=0)[:, None]
    lse_T1 = high.logsumexp(-1, keepdim=True)
    loss = ((lse_T1 - high.gather(1, safe_T1))[:, 0] * valid_T).sum()
    grad_TV = (high - lse_T1).exp_()
    grad_TV.scatter_add_(1, safe_T1, -torch.ones_like(safe_T1, dtype=high.dtype))
    return loss, grad_TV.mul_(valid_T[:, None]).to(logits_TV.dtype)
