"""silu(gate) · up, the gated unit of the feed-forward layer, as one step that keeps only its two inputs.

Left to autograd it would keep a third tensor as wide, and round the silu on its way.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.model.precision import fusable


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return _Gated.apply(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if fusable(gate):
            from ithaca.model import fused

            return fused.gated(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if fusable(gate):
            from ithaca.model import fused

            return fused.gated_backward(dy, gate, up)
        share = gate.sigmoid()
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share
