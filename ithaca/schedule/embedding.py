"""The embedding on tapes: rows of the table to the first block's x; backward, the residual's gradient to the table."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.owners import BLOCKS, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.schedule.tapes import Pass


def embed(table: Tensor, tokens: Tensor, tapes: Pass, tile: int) -> Tensor:
    """Write the tokens' rows to the first block's x tape; returns the carrier."""
    return _Embed.apply(table, tokens, tapes, tile)


class _Embed(torch.autograd.Function):
    @staticmethod
    @owned_by(BLOCKS)
    def forward(ctx: Any, table: Tensor, tokens: Tensor, tapes: Pass, tile: int) -> Tensor:
        xs = tapes.x(0)
        for index, rows in enumerate(xs.tiles.slices()):
            xs.write(index, xs.blank(index).copy_(F.embedding(tokens[rows], table)), again=True)
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.tapes, ctx.tile = table.shape, tapes, tile
        return table.new_zeros((), dtype=at_least_fp32(table.dtype))

    @staticmethod
    @once_differentiable
    @owned_by(BLOCKS)
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        gradients = ctx.tapes.residual
        dtable = torch.zeros(ctx.shape, dtype=scale.dtype, device=scale.device)
        for index, rows in enumerate(gradients.tiles.slices()):
            gradient, ids = gradients.read(index, toward=1, changed=False), tokens[rows]
            for part in Tiles(len(ids), ctx.tile).slices():
                dtable.index_add_(0, ids[part], gradient[part].to(dtable.dtype))
            gradients.release(gradient)
        return dtable.mul_(scale), None, None, None
