"""A kernel as one step of autograd: keeps q, k, v, o and the log-sum-exp, nothing of tokens × tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, pieces: Pieces, scale: float) -> Tensor:
        o, lse = kernel.forward(q, k, v, pieces, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = kernel, pieces, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        kernel, pieces, scale = ctx.call
        return (*kernel.backward(do, *ctx.saved_tensors, pieces, scale), None, None, None)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, pieces: Pieces) -> Tensor:
    """o [T, Hq, D] of q [T, Hq, D] on k, v [U, Hkv, D]; differentiable."""
    return _Attend.apply(q, k, v, kernel, pieces, softmax_scale(q))


def softmax_scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5
