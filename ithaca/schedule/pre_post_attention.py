"""The two halves of a block, before and after its attention, forward and backward over some tokens.

The half after attention runs tile by tile, because an MLP's intermediates are several times as wide as a hidden state.
Backward of a half runs it again under autograd, with weights that sum their gradients (`summed`). The block's own
output is not computed again: backward does not need it.

With a Spread (model/linear.py), o and its gradient are of the tokens of all its ranks, one rank's behind the other's,
and a tile has some tokens of each."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ithaca.base.tiles import Tiles
from ithaca.model.block import ADDED, Weights, final_linear, mlp, mlp_beside, output_projection, project
from ithaca.model.linear import Spread, Summed
from ithaca.model.rotary import Rotation
from ithaca.model.spec import Heads, Spec


def summed(spec: Spec, w: Weights, wanted: Iterable[str], spread: Spread | None = None) -> Summed:
    """A block's weights for its backward pass."""
    return Summed(w, wanted, final_linear(spec), [f"{name}.bias" for name in ADDED] if spread else ())


def post_attention(
    spec: Spec, w: Weights, x: Tensor, o: Tensor, y: Tensor, tile: int, spread: Spread | None = None
) -> None:
    """Write the block's output, output projection and MLP of x and o, to y. y may be x."""
    for part in Tiles(len(x), tile).slices():
        middle = output_projection(spec, w, x[part], _tokens(o, part, spread), Heads.all(spec), spread)
        mlp(spec, w, middle, out=y[part], spread=spread)


def post_attention_backward(
    spec: Spec,
    w: Summed,
    x: Tensor,
    o: Tensor,
    dy: Tensor,
    tile: int,
    dx: Tensor | None = None,
    spread: Spread | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and o. That of x is written to `dx`, if given, which may be dy."""
    if tile >= len(x):
        found_dx, do = _tile_backward(spec, w, x, o, dy, spread)
        return (found_dx if dx is None else dx.copy_(found_dx)), do
    dx, do = torch.empty_like(dy) if dx is None else dx, torch.empty_like(o)
    for part in Tiles(len(x), tile).slices():
        dx[part], found = _tile_backward(spec, w, x[part], _tokens(o, part, spread), dy[part], spread)
        if spread:
            by_rank = do.unflatten(0, (spread.ranks, -1))[:, part]
            by_rank.copy_(found.view_as(by_rank))
        else:
            do[part] = found
    return dx, do


def _tokens(o: Tensor, part: slice, spread: Spread | None) -> Tensor:
    """o of a tile's tokens."""
    if spread is None:
        return o[part]
    by_rank = o.unflatten(0, (spread.ranks, -1))
    whole = part.indices(by_rank.shape[1]) == (0, by_rank.shape[1], 1)
    return o if whole else by_rank[:, part].flatten(0, 1)


def _tile_backward(spec: Spec, w: Summed, x: Tensor, o: Tensor, dy: Tensor, spread: Spread | None) -> list[Tensor]:
    x, o = (tensor.detach().requires_grad_() for tensor in (x, o))
    with torch.enable_grad():
        middle, y = mlp_beside(spec, w, output_projection(spec, w, x, o, Heads.all(spec), spread), spread)
    # The block's result is their sum, whose gradient is that of both
    return w.differentiate((middle, y), (x, o), (dy, dy))


class Projection:
    """q, k and v of some tokens and heads. Keeps the normed x, 1 d of these tokens, for its backward pass."""

    def __init__(
        self,
        spec: Spec,
        w: Summed,
        x: Tensor,
        rotation: Rotation | None,
        heads: Heads,
        spread: Spread | None = None,
    ):
        self._w, self._x = w, x.detach().requires_grad_()
        with torch.enable_grad():
            outputs = project(spec, w, self._x, rotation, heads, spread)
        self.q, *self.kv = (output.detach() for output in outputs)
        # Edges, not outputs, so that sent tensors can be freed; there may be no query or no key/value head
        self._edges = [get_gradient_edge(output) for output in outputs if output.shape[1]]

    def free_outputs(self) -> None:
        """Free q, k and v after they were sent: backward needs none of them."""
        del self.q, self.kv

    def backward(self, *grads: Tensor) -> Tensor:
        """dx, given the gradients of q, k, v with heads; gradients of weights are added to their sums."""
        (dx,) = self._w.differentiate(self._edges, (self._x,), grads)
        return dx
