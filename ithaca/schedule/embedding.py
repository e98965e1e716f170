"""The embedding on tapes: rows of the table to the first block's x; backward, the residual's gradient to the table.

An x of the first block that is not saved is looked up once more (sweep/rebuild_x.py)."""

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


class LookedUp:
    """x of the first block, looked up tile by tile."""

    def __init__(self, table: Tensor, tokens: Tensor, tiles: Tiles):
        self._table, self._tokens, self._tiles = table, tokens, tiles

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:  # noqa: ARG002
        return F.embedding(self._tokens[self._tiles.rows(index)], self._table)

    def prefetch(self, index: int) -> None:
        """Nothing is fetched."""

    def release(self, tile: Tensor) -> None:
        """The tile is freed with its last reference."""


class _Embed(torch.autograd.Function):
    @staticmethod
    @owned_by(BLOCKS)
    def forward(ctx: Any, table: Tensor, tokens: Tensor, tapes: Pass, tile: int) -> Tensor:
        xs = tapes.x(0)
        found = LookedUp(table, tokens, xs.tiles)
        for index in range(xs.tiles.count):
            xs.write(index, xs.blank(index).copy_(found.read(index)), again=True)
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
