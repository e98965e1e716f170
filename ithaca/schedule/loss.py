"""The loss, tile by tile: final norm, head and cross-entropy of some tokens at a time, with gradients in the same pass.

Full logits never exist: a tile has `tile` × vocabulary of them, in the dtype of the computation. On a GPU their
gradient overwrites them; on a CPU, and in float64, both exist, once more in at least fp32. The gradients are computed
with the loss, while the logits are there, and backward only scales them. So the head's gradient, vocabulary × hidden in
fp32, exists from the forward pass on; the GEMM of each tile adds to it in fp32. `naive_loss` is the slow twin."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.owners import LOSS, owned_by
from ithaca.base.precision import at_least_fp32, fusable
from ithaca.base.tiles import Tiles
from ithaca.model.block import norm
from ithaca.model.linear import add_product
from ithaca.model.spec import Spec
from ithaca.parallel.batch import IGNORED
from ithaca.schedule.tapes import Pass


@owned_by(LOSS)
def head_logits(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor) -> Tensor:
    """The final norm, with its weight, and the head."""
    return F.linear(norm(spec, x_TE, weight), head)


def naive_loss(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels_T: Tensor) -> Tensor:
    """Σ over valid tokens of the cross-entropy, with all logits at once."""
    logits = head_logits(spec, x_TE, weight, head)
    return F.cross_entropy(logits.to(at_least_fp32(logits.dtype)), labels_T, ignore_index=IGNORED, reduction="sum")


@owned_by(LOSS)
def tiled_loss(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels_T: Tensor, tile: int) -> Tensor:
    """`naive_loss` in memory that does not grow with the number of tokens."""
    return _TiledLoss.apply(spec, x_TE, weight, head, labels_T, tile, torch.is_grad_enabled())


@owned_by(LOSS)
def tape_loss(
    spec: Spec, carrier: Tensor, tapes: Pass, weight: Tensor, head: Tensor, labels_T: Tensor, tile: int
) -> Tensor:
    """`naive_loss` of the hidden states on the residual tape, which their gradients overwrite.

    The gradients are those of the sum itself: the carrier's gradient is the upstream scale.
    """
    return _TapeLoss.apply(spec, carrier, tapes, weight, head, labels_T, tile)


class _Tiler:
    """Loss and gradients tile after tile, with the sums of the weights' gradients."""

    def __init__(self, spec: Spec, weight: Tensor, head: Tensor, need_weight: bool, need_head: bool, tile: int):
        self.spec, self.head, self.tile = spec, head, tile
        high = at_least_fp32(weight.dtype)
        self.weight = weight.detach().requires_grad_(need_weight)
        self.weight.grad_dtype = high  # otherwise autograd would round each tile's gradient to the weight's dtype
        self.dweight = torch.zeros_like(weight, dtype=high) if need_weight else None
        self.dhead = torch.zeros_like(head, dtype=high) if need_head else None
        self.loss = weight.new_zeros((), dtype=high)

    def add(self, x: Tensor, labels: Tensor, dx: Tensor | None) -> None:
        """Add these tokens; their gradient is written to `dx`, which may be x."""
        for part in Tiles(len(x), self.tile).slices():
            self._add_tile(x[part], labels[part], None if dx is None else dx[part])

    def _add_tile(self, x: Tensor, labels: Tensor, dx: Tensor | None) -> None:
        """A function of its own, so that a tile's logits are freed before the next tile's are computed."""
        with torch.enable_grad():
            x_leaf = x.detach().requires_grad_(dx is not None)
            normed = norm(self.spec, x_leaf, self.weight)
        loss, dlogits = cross_entropy(F.linear(normed.detach(), self.head), labels)
        self.loss += loss
        if self.dhead is not None:
            add_product(self.dhead, dlogits.T, normed.detach())
        wanted = [tensor for tensor in (x_leaf, self.weight) if tensor.requires_grad]
        if wanted:
            grads = list(torch.autograd.grad(normed, wanted, dlogits @ self.head))
            if dx is not None:
                dx.copy_(grads.pop(0))
            if self.dweight is not None:
                self.dweight += grads.pop(0)


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: Spec, x: Tensor, weight: Tensor, head: Tensor, labels: Tensor, tile: int, training: bool
    ) -> Tensor:
        need_x, need_weight, need_head = (training and needed for needed in ctx.needs_input_grad[1:4])
        tiler = _Tiler(spec, weight, head, need_weight, need_head, tile)
        dx = torch.empty_like(x) if need_x else None
        tiler.add(x, labels, dx)
        ctx.grads = dx, tiler.dweight, tiler.dhead
        return tiler.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *scaled_once(ctx, scale), None, None, None)


class _TapeLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        carrier: Tensor,  # noqa: ARG004
        tapes: Pass,
        weight: Tensor,
        head: Tensor,
        labels: Tensor,
        tile: int,
    ) -> Tensor:
        need_x = tapes.training and ctx.needs_input_grad[1]
        need_weight, need_head = (tapes.training and needed for needed in ctx.needs_input_grad[3:5])
        tiler = _Tiler(spec, weight, head, need_weight, need_head, tile)
        tape = tapes.residual
        for index, rows in enumerate(tape.tiles.slices()):
            x = tape.read(index, toward=1, changed=need_x)
            tiler.add(x, labels[rows], x if need_x else None)
            tape.write(index, x, again=True) if need_x else tape.release(x)
        ctx.grads, ctx.tapes = (tiler.dweight, tiler.dhead), tapes
        return tiler.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        grads = scaled_once(ctx, scale)
        ctx.tapes.waits = False
        return (None, scale, None, *grads, None, None)


def scaled_once(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
    grads, ctx.grads = ctx.grads, None
    assert grads is not None, "backward was called twice on one loss"
    return tuple(None if grad is None else grad.mul_(scale) for grad in grads)


@owned_by(LOSS)
def token_losses(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels_T: Tensor, tile: int) -> Tensor:
    """The cross-entropy of each token in at least fp32, 0 where there is no label. Tile by tile, without gradients."""
    losses_T = x_TE.new_empty(len(x_TE), dtype=at_least_fp32(x_TE.dtype))
    for part in Tiles(len(x_TE), tile).slices():
        losses_T[part] = cross_entropies(head_logits(spec, x_TE[part], weight, head), labels_T[part])[0]
    return losses_T


@owned_by(LOSS)
def tape_token_losses(spec: Spec, tapes: Pass, weight: Tensor, head: Tensor, labels_T: Tensor, tile: int) -> Tensor:
    """`token_losses` of the hidden states on the residual tape, which is not changed."""
    losses_T, tape = labels_T.new_empty(len(labels_T), dtype=at_least_fp32(weight.dtype)), tapes.residual
    for index, rows in enumerate(tape.tiles.slices()):
        x = tape.read(index, toward=1, changed=False)
        losses_T[rows] = token_losses(spec, x, weight, head, labels_T[rows], tile)
        tape.release(x)
    return losses_T


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of the tile's cross-entropy in at least fp32, and its gradient, which may overwrite the logits."""
    losses_T, grad_TV = cross_entropies(logits_TV, labels_T)
    return losses_T.sum(), grad_TV


def cross_entropies(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each token in at least fp32, and the gradient of their sum, which may overwrite logits."""
    if fusable(logits_TV):
        from ithaca.schedule import triton_cross_entropy as fused

        return fused.cross_entropies_(logits_TV, labels_T), logits_TV
    return plain_cross_entropies(logits_TV, labels_T)


def plain_cross_entropies(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropies` in plain torch; the logits are not changed."""
    high = logits_TV.to(at_least_fp32(logits_TV.dtype))
    valid_T = labels_T != IGNORED
    safe_T1 = labels_T.clamp(min=0)[:, None]
    lse_T1 = high.logsumexp(-1, keepdim=True)
    losses_T = (lse_T1 - high.gather(1, safe_T1))[:, 0].masked_fill(~valid_T, 0.0)
    grad_TV = (high - lse_T1).exp_()
    grad_TV.scatter_add_(1, safe_T1, -torch.ones_like(safe_T1, dtype=high.dtype))
    return losses_T, grad_TV.masked_fill_(~valid_T[:, None], 0.0).to(logits_TV.dtype)
