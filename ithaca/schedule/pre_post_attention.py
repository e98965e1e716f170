"""The two halves of a block, before and after its attention, forward and backward over some tokens.

The half after attention runs tile by tile, because an MLP's intermediates are several times as wide as a hidden state.
Backward of a half runs it again under autograd, with weights that sum their gradients (`summed`). The block's own
output is not computed again: backward does not need it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ithaca.base.tiles import Tiles
from ithaca.model.block import Weights, final_linear, mlp, mlp_beside, output_projection, project
from ithaca.model.linear import Summed
from ithaca.model.rotary import Rotation
from ithaca.model.spec import Heads, Spec


def summed(spec: Spec, w: Weights, wanted: Iterable[str]) -> Summed:
    """A block's weights for its backward pass."""
    return Summed(w, wanted, final_linear(spec))


def post_attention(spec: Spec, w: Weights, x: Tensor, o: Tensor, y: Tensor, tile: int) -> None:
    """Write the block's output, output projection and MLP of x and o, to y. y may be x."""
    for part in Tiles(len(x), tile).slices():
        mlp(spec, w, output_projection(spec, w, x[part], o[part], Heads.all(spec)), out=y[part])


def post_attention_backward(
    spec: Spec, w: Summed, x: Tensor, o: Tensor, dy: Tensor, tile: int, dx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and o. That of x is written to `dx`, if given, which may be dy."""
    if tile >= len(x):
        found_dx, do = _tile_backward(spec, w, x, o, dy)
        return (found_dx if dx is None else dx.copy_(found_dx)), do
    dx, do = torch.empty_like(dy) if dx is None else dx, torch.empty_like(o)
    for part in Tiles(len(x), tile).slices():
        dx[part], do[part] = _tile_backward(spec, w, x[part], o[part], dy[part])
    return dx, do


def _tile_backward(spec: Spec, w: Summed, x: Tensor, o: Tensor, dy: Tensor) -> list[Tensor]:
    x, o = (tensor.detach().requires_grad_() for tensor in (x, o))
    with torch.enable_grad():
        middle, y = mlp_beside(spec, w, output_projection(spec, w, x, o, Heads.all(spec)))
    # The block's result is their sum, whose gradient is that of both
    return w.differentiate((middle, y), (x, o), (dy, dy))


class Projection:
    """q, k and v of some tokens and heads. Keeps the normed x, 1 d of these tokens, for its backward pass."""

    def __init__(self, spec: Spec, w: Summed, x: Tensor, rotation: Rotation | None, heads: Heads):
        self._w, self._x = w, x.detach().requires_grad_()
        with torch.enable_grad():
            outputs = project(spec, w, self._x, rotation, heads)
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
