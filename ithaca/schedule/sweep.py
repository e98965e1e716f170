"""The `sweep` schedule: a block is one causal sweep over chunks, and one reverse sweep backward.

    forward, chunks in order     x tile -> q, k, v -> k, v join the K/V tapes -> attend to K/V so far -> o tile
                                 -> mix and feed -> the next block's x tile
    backward, in reverse         x, o and gradient tiles -> back through feed and mix -> attention backward of the chunk
                                 on all K/V before it, adding to their dK and dV; those of the chunk itself are now
                                 complete, since every later chunk is done -> back through the projections
                                 -> the gradient tile, in place

Attention is never recomputed: o and the log-sum-exp are kept. K and V are made again, each tile when a chunk first
visits it, so that reading x hides behind attention.

Of the tokens' length the device holds K, V (in the dtype of the computation) and their gradients (fp32):
6 · Hkv · D / hidden d, 1.5 d for Llama3-8B; the rest where the Plan puts it. Beside that, about 20 chunk-sized hidden
states while a chunk's attention runs backward, and the slots that host tapes pass through.

Blocks exchange tapes, not tensors. The graph between them is carried by a 0-dim tensor, the token: weights are inputs
of each block's step, and the token's gradient is the upstream scale of the loss, by which theirs are multiplied.
(From FPDT: chunks and double buffering. From UPipe's accounting: where the memory goes.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.walk import Walk
from ithaca.model.block import Heads, Weights, project
from ithaca.model.linear import Summed
from ithaca.model.rope import Turn, turn
from ithaca.model.spec import Spec
from ithaca.parallel.exchange import Exchange
from ithaca.schedule.halves import Projection, finish, finish_backward, summed
from ithaca.schedule.keys import Keys, KeySums
from ithaca.schedule.tapes import Pass


@dataclass(frozen=True)
class SweepCall:
    """What one block needs to know beside its weights."""

    spec: Spec
    layer: int
    tapes: Pass
    walk: Walk
    positions: Tensor
    tile: int
    exchange: Exchange

    def turn(self, chunk: int, dtype: torch.dtype) -> Turn | None:
        if not self.spec.rope_layers[self.layer]:
            return None
        return turn(self.spec.rope, self.spec.head_size, self.positions[self.walk.tiles.rows(chunk)], dtype)


def run_sweep(w: dict[str, Tensor], token: Tensor, call: SweepCall) -> Tensor:
    """Run the block from its x tape to the next one; differentiable in the token and the weights."""
    return _Sweep.apply(token, call, tuple(w), *w.values())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, call: SweepCall, names: tuple[str, ...], *weights: Tensor) -> Tensor:
        _forward(call, dict(zip(names, weights, strict=True)))
        ctx.save_for_backward(*weights)
        ctx.call, ctx.names = call, names
        return token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        names, wanted = ctx.names, ctx.needs_input_grad[3:]
        given = dict(zip(names, ctx.saved_tensors, strict=True))
        w = summed(given, [name for name, needed in zip(names, wanted, strict=True) if needed])
        _backward(ctx.call, w)
        for total in w.sums.values():
            total *= scale
        return scale, None, None, *(w.sums.get(name) for name in names)


def _forward(call: SweepCall, w: Weights) -> None:
    tapes, layer = call.tapes, call.layer
    xs, ys = tapes.x(layer), tapes.x(layer + 1)
    keys = Keys(tapes.keys)
    for chunk in range(call.walk.tiles.count):
        x = xs.read(chunk, toward=1)
        o, lse = _attend(call, w, chunk, x, keys)
        if tapes.kept:
            tapes.o(layer).write(chunk, tapes.o(layer).blank(chunk).copy_(o))
            tapes.lse(layer).write(chunk, tapes.lse(layer).blank(chunk).copy_(lse.T))
        y = ys.blank(chunk)
        finish(call.spec, w, x, o, y, call.tile)
        xs.release(x)
        ys.write(chunk, y)
    ys.prefetch(0)  # for whoever reads it next, while the last chunk is still computed


def _attend(call: SweepCall, w: Weights, chunk: int, x: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
    """o of a chunk's tokens, and the log-sum-exp of its heads; the chunk's K and V join the others."""
    q, k, v = call.exchange.to_heads(*project(call.spec, w, x, call.turn(chunk, x.dtype), Heads.all(call.spec)))
    keys.put(chunk, k, v)
    o, lse = call.walk.forward(chunk, q, keys)
    return call.exchange.to_tokens(o)[0], lse


def _backward(call: SweepCall, w: Summed) -> None:
    tapes, layer = call.tapes, call.layer
    xs, os, lses, gradients = tapes.x(layer), tapes.o(layer), tapes.lse(layer), tapes.gradient
    sums = KeySums(tapes.key_sums)
    keys = _Rebuilt(call, w, sums)
    for chunk in reversed(range(call.walk.tiles.count)):
        x, o, lse, gradient = (tape.read(chunk, toward=-1) for tape in (xs, os, lses, gradients))
        do = torch.empty_like(o)
        finish_backward(call.spec, w, x, o, gradient, gradient, do, call.tile)
        gradient += _attend_backward(call, w, chunk, x, o, lse.T, do, keys, sums)
        gradients.write(chunk, gradient)
        for tape, tile in ((xs, x), (os, o), (lses, lse)):
            tape.release(tile)
    if layer > 0:
        for tape in (tapes.x(layer - 1), tapes.o(layer - 1), tapes.lse(layer - 1), gradients):
            tape.prefetch(call.walk.tiles.count - 1)


def _attend_backward(
    call: SweepCall,
    w: Summed,
    chunk: int,
    x: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    keys: "_Rebuilt",
    sums: KeySums,
) -> Tensor:
    """dx of the projections of a chunk."""
    projection = Projection(call.spec, w, x, call.turn(chunk, x.dtype))
    to_heads = call.exchange.to_heads
    q, k, v = to_heads(*projection.qkv)
    do, o = to_heads(do, o)
    keys.put(chunk, k, v)
    dq = call.walk.backward(chunk, do, q, o, lse, keys, sums.add)
    # The walk may have read x tiles for K and V, the next chunk's among them
    call.tapes.x(call.layer).prefetch(chunk - 1)
    return projection.backward(*call.exchange.to_tokens(dq, *sums.take(chunk, dq.dtype)))


class _Rebuilt(Keys):
    """K and V of earlier chunks, made again from x when they are first visited."""

    def __init__(self, call: SweepCall, w: Summed, sums: KeySums):
        super().__init__(call.tapes.keys)
        self._call, self._w, self._sums = call, w, sums
        self._xs = call.tapes.x(call.layer)

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        self._sums.prefetch(index)  # the walk adds to them as soon as the kernel is done
        tiles = super().read(index, following)
        if following is not None and not self.has(following):
            self._xs.prefetch(following)
        return tiles

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        call, x = self._call, self._xs.read(index)
        with torch.no_grad():
            _, k, v = project(call.spec, self._w, x, call.turn(index, x.dtype), Heads.keys_only(call.spec))
        self._xs.release(x)
        k, v = call.exchange.to_heads(k, v)
        return k, v
