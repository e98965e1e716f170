"""The `whole` schedule: a block runs over all local tokens at once.

Checkpointing decides what a block keeps, per local token and in units of its hidden state d (Llama3-8B):
    none       every intermediate, about 17 d; nothing is computed twice
    selective  x and o (2 d, and the log-sum-exp); norms, projections and MLP run again, attention does not
    full       x (1 d); everything runs again
The checkpointed forms are one autograd step per block, whose backward runs the block again in two parts: what comes
after the attention, and the projections before it (which `full` needs first, to have the attention's output again).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.attend import attend, softmax_scale
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.model.block import Heads, Weights, feed, mix, project
from ithaca.model.rope import Turn
from ithaca.model.spec import Spec


@dataclass(frozen=True)
class BlockCall:
    """What one block needs to know beside its weights and its input."""

    spec: Spec
    turn: Turn | None
    kernel: Kernel
    pieces: Pieces
    checkpoint: str

    def project(self, w: Weights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return project(self.spec, w, x, self.turn, Heads.all(self.spec))

    def attention(self, qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = qkv
        return self.kernel.forward(q, k, v, self.pieces, softmax_scale(q))

    def finish(self, w: Weights, x: Tensor, o: Tensor) -> Tensor:
        return feed(self.spec, w, mix(self.spec, w, x, o, Heads.all(self.spec)))


def run_block(w: dict[str, Tensor], x_TE: Tensor, call: BlockCall) -> Tensor:
    """The block's output; differentiable in x and the weights."""
    if call.checkpoint == "none":
        return call.finish(w, x_TE, attend(*call.project(w, x_TE), call.kernel, call.pieces))
    return _Checkpointed.apply(x_TE, call, tuple(w), *w.values())


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: BlockCall, names: tuple[str, ...], *weights: Tensor) -> Tensor:
        w = dict(zip(names, weights, strict=True))
        o, lse = call.attention(call.project(w, x))
        kept = (o, lse) if call.checkpoint == "selective" else ()
        ctx.save_for_backward(*weights, x, *kept)
        ctx.call, ctx.names = call, names
        return call.finish(w, x, o)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, names = ctx.call, ctx.names
        weights, (x, *kept) = ctx.saved_tensors[: len(names)], ctx.saved_tensors[len(names) :]
        wanted = ctx.needs_input_grad[3:]
        w = {
            name: weight.detach().requires_grad_(needed)
            for name, weight, needed in zip(names, weights, wanted, strict=True)
        }
        x = x.detach().requires_grad_()
        grads: dict[str, Tensor] = {}
        with torch.enable_grad():
            qkv = () if kept else call.project(w, x)
        o, lse = kept or call.attention([tensor.detach() for tensor in qkv])
        o = o.detach().requires_grad_()
        with torch.enable_grad():
            y = call.finish(w, x, o)
        dx, do = _differentiate(y, (x, o), w, (dy,), grads)
        del y
        with torch.enable_grad():
            qkv = qkv or call.project(w, x)
        q, k, v = (tensor.detach() for tensor in qkv)
        dqkv = call.kernel.backward(do, q, k, v, o.detach(), lse, call.pieces, softmax_scale(q))
        (dx_project,) = _differentiate(qkv, (x,), w, dqkv, grads)
        return dx + dx_project, None, None, *(grads.get(name) for name in names)


def _differentiate(
    outputs: Tensor | Sequence[Tensor],
    inputs: tuple[Tensor, ...],
    w: dict[str, Tensor],
    upstream: Sequence[Tensor],
    grads: dict[str, Tensor],
) -> list[Tensor]:
    """Gradients of the inputs; those of the weights that the outputs depend on go to `grads`."""
    names = [name for name, weight in w.items() if weight.requires_grad]
    found = torch.autograd.grad(outputs, [*inputs, *(w[name] for name in names)], upstream, allow_unused=True)
    for name, grad in zip(names, found[len(inputs) :], strict=True):
        if grad is not None:
            assert name not in grads, "a weight acts on one side of the attention"
            grads[name] = grad
    return list(found[: len(inputs)])  # pyrefly: ignore
