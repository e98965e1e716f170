"""Embedding and loss of tensor ranks. Each rank has the rows of one part of the vocabulary, in table and head.

A rank looks up the tokens of all ranks, with zeros for tokens outside its part; a reduce-scatter sums these and gives
each rank its own tokens. The loss goes by tiles, as in schedule/loss.py: the final norm of a rank's own tokens, then
the logits of the tile's tokens of all ranks over the rank's part of the vocabulary. The log-sum-exps of the parts and
the labels' logits are gathered, two numbers a token, so no rank has complete logits. `naive_loss` of schedule/loss.py
is the slow twin."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.owners import BLOCKS, LOSS, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.model.block import norm
from ithaca.model.linear import add_product
from ithaca.model.spec import Spec
from ithaca.parallel.batch import IGNORED
from ithaca.parallel.tensor import TensorSpread
from ithaca.schedule.loss import scaled_once


@dataclass(frozen=True)
class Vocabulary:
    """The parts of the vocabulary, one for each rank, and the collectives of the ranks."""

    parts: list[range]
    spread: TensorSpread

    @property
    def tokens(self) -> range:
        """This rank's part."""
        return self.parts[self.spread.rank]

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(mask of the ids in this rank's part, their rows in it; 0 for other ids)."""
        rows = ids - self.tokens.start
        mine = (rows >= 0) & (rows < len(self.tokens))
        return mine, rows.where(mine, 0)

    def tiles(self, tokens: int, tile: int) -> Iterator[slice]:
        """A rank's tokens in tiles that have at most `tile` tokens over all ranks, or one of each."""
        return iter(Tiles(tokens, max(tile // self.spread.ranks, 1)).slices())

    def of_all_ranks(self, ids: Tensor, part: slice) -> Tensor:
        """The ids of a tile's tokens, of all ranks; `ids`: [ranks, tokens]."""
        return ids[:, part].flatten()


def embed(table: Tensor, ids: Tensor, vocabulary: Vocabulary, tile: int) -> Tensor:
    """[n, hidden]: the embedding of this rank's tokens. `ids`: [ranks, n], the tokens of all ranks."""
    return _Embed.apply(table, ids, vocabulary, tile)


class _Embed(torch.autograd.Function):
    @staticmethod
    @owned_by(BLOCKS)
    def forward(ctx: Any, table: Tensor, ids: Tensor, vocabulary: Vocabulary, tile: int) -> Tensor:
        x = table.new_empty(ids.shape[1], table.shape[1])
        for part in vocabulary.tiles(len(x), tile):
            mine, rows = vocabulary.own(vocabulary.of_all_ranks(ids, part))
            found = F.embedding(rows, table).masked_fill_(~mine[:, None], 0.0)
            x[part] = vocabulary.spread.reduce(found)  # one rank has more than zeros, so the sum is exact
        ctx.save_for_backward(ids)
        ctx.call = table.shape, vocabulary, tile
        return x

    @staticmethod
    @once_differentiable
    @owned_by(BLOCKS)
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        (ids,), (shape, vocabulary, tile) = ctx.saved_tensors, ctx.call
        dtable = torch.zeros(shape, dtype=at_least_fp32(dx.dtype), device=dx.device)
        for part in vocabulary.tiles(len(dx), tile):
            mine, rows = vocabulary.own(vocabulary.of_all_ranks(ids, part))
            gradient = vocabulary.spread.gather(dx[part]).to(dtable.dtype)
            dtable.index_add_(0, rows, gradient.masked_fill_(~mine[:, None], 0.0))
        return dtable, None, None, None


@owned_by(LOSS)
def vocabulary_loss(
    spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels: Tensor, vocabulary: Vocabulary, tile: int
) -> Tensor:
    """Σ of the cross-entropy over this rank's valid tokens. `labels`: [ranks, n], those of all ranks."""
    return _VocabularyLoss.apply(spec, x_TE, weight, head, labels, vocabulary, tile, torch.is_grad_enabled())


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        x: Tensor,
        weight: Tensor,
        head: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary,
        tile: int,
        training: bool,
    ) -> Tensor:
        wanted = [training and needed for needed in ctx.needs_input_grad[1:4]]
        tiler = _Tiler(spec, weight, head, labels, vocabulary, *wanted[1:])
        dx = torch.empty_like(x) if wanted[0] else None
        for part in vocabulary.tiles(len(x), tile):
            tiler.add(x, part, dx)
        ctx.grads = dx, tiler.dweight, tiler.dhead
        return tiler.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *scaled_once(ctx, scale), None, None, None, None)


class _Tiler:
    """Loss and gradients tile after tile, with the sums of the weights' gradients."""

    def __init__(
        self,
        spec: Spec,
        weight: Tensor,
        head: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary,
        need_weight: bool,
        need_head: bool,
    ):
        self.spec, self.head, self.labels, self.vocabulary = spec, head, labels, vocabulary
        high = at_least_fp32(weight.dtype)
        self.weight = weight.detach().requires_grad_(need_weight)
        self.weight.grad_dtype = high  # otherwise autograd would round each tile's gradient to the weight's dtype
        self.dweight = torch.zeros_like(weight, dtype=high) if need_weight else None
        self.dhead = torch.zeros_like(head, dtype=high) if need_head else None
        self.loss = weight.new_zeros((), dtype=high)

    def add(self, x: Tensor, part: slice, dx: Tensor | None) -> None:
        """Add a tile; the gradient of its tokens is written to `dx`."""
        spread = self.vocabulary.spread
        with torch.enable_grad():
            x_leaf = x[part].detach().requires_grad_(dx is not None)
            normed = norm(self.spec, x_leaf, self.weight)
        every = spread.gather(normed.detach())
        labels = self.vocabulary.of_all_ranks(self.labels, part)
        losses, dlogits = cross_entropies(F.linear(every, self.head), labels, self.vocabulary)
        self.loss += losses.view(spread.ranks, -1)[spread.rank].sum()
        if self.dhead is not None:
            add_product(self.dhead, dlogits.T, every)
        wanted = [tensor for tensor in (x_leaf, self.weight) if tensor.requires_grad]
        if not wanted:
            return
        grads = list(torch.autograd.grad(normed, wanted, spread.reduce(dlogits @ self.head)))
        if dx is not None:
            dx[part] = grads.pop(0)
        if self.dweight is not None:
            self.dweight += grads.pop(0)


def cross_entropies(logits_TV: Tensor, labels_T: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each token in at least fp32, and the gradient of their sum for this rank's logits.

    Ranks hold the logits of different parts of the vocabulary for the same tokens, and all get the same losses. Logits
    of at least fp32 are overwritten.
    """
    dtype = logits_TV.dtype
    high = logits_TV.to(at_least_fp32(dtype))
    del logits_TV
    valid_T = labels_T != IGNORED
    mine_T, rows_T = vocabulary.own(labels_T)
    picked_T = high.gather(1, rows_T[:, None])[:, 0].where(mine_T, 0.0)
    every = vocabulary.spread.gather(torch.stack((high.logsumexp(-1), picked_T))[None])  # [ranks, 2, T]
    lse_T = every[:, 0].logsumexp(0)
    losses_T = (lse_T - every[:, 1].sum(0)).masked_fill(~valid_T, 0.0)
    grad_TV = high.sub_(lse_T[:, None]).exp_()
    grad_TV.scatter_add_(1, rows_T[:, None], -mine_T[:, None].to(high.dtype))
    return losses_T, grad_TV.masked_fill_(~valid_T[:, None], 0.0).to(dtype)


@owned_by(LOSS)
def token_losses(
    spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, labels: Tensor, vocabulary: Vocabulary, tile: int
) -> Tensor:
    """[n], the cross-entropy of each of this rank's tokens, 0 where there is no label. Without gradients."""
    spread, losses_T = vocabulary.spread, x_TE.new_empty(len(x_TE), dtype=at_least_fp32(x_TE.dtype))
    for part in vocabulary.tiles(len(x_TE), tile):
        logits = F.linear(spread.gather(norm(spec, x_TE[part], weight)), head)
        found, _ = cross_entropies(logits, vocabulary.of_all_ranks(labels, part), vocabulary)
        losses_T[part] = found.view(spread.ranks, -1)[spread.rank]
    return losses_T


@owned_by(LOSS)
def whole_logits(spec: Spec, x_TE: Tensor, weight: Tensor, head: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[n, vocabulary] of this rank's tokens. For small inputs: all logits of all ranks' tokens exist at once."""
    spread, parts = vocabulary.spread, vocabulary.parts
    part_TV = F.linear(spread.gather(norm(spec, x_TE, weight)), head)
    even_TV = F.pad(part_TV, (0, max(map(len, parts)) - part_TV.shape[1]))  # an all-gather needs equal shapes
    every = spread.gather(even_TV[None]).unflatten(1, (spread.ranks, -1))[:, spread.rank]
    return torch.cat([found[:, : len(part)] for found, part in zip(every, parts, strict=True)], 1)
