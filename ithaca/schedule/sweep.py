"""The `sweep` schedule: a block is one causal sweep over chunks, and one reverse sweep backward.

    forward, chunks in order     x tile -> q, k, v -> k, v join the K/V tapes -> attend to K/V so far -> o tile
                                 -> mix and feed -> the next block's x tile
    backward, in reverse         x, o and gradient tiles -> back through feed and mix -> attention backward of the chunk
                                 on all K/V before it, adding to their dK and dV; those of the chunk itself are now
                                 complete, since every later chunk is done -> back through the projections
                                 -> the gradient tile, in place

Attention runs once where o and the log-sum-exp are kept; where they are not, a chunk's comes again just before its
backward pass. x is read, or made again from the o of layers below (rising.py). K and V are made again, each tile when a
chunk first visits it, so that reading x hides behind attention; the last layer still has those of its forward pass.

Of the tokens' length the device holds K, V (in the dtype of the computation) and their gradients (fp32):
6 · Hkv · D / hidden d, 1.5 d for Llama3-8B; the rest where the Plan puts it. Beside that, about 20 chunk-sized hidden
states while a chunk's attention runs backward, and the slots that host tapes pass through.

Blocks exchange tapes, not tensors. The graph between them is carried by a 0-dim tensor, the token: weights are inputs
of each block's step, and the token's gradient is the upstream scale of the loss, by which theirs are multiplied.
(From FPDT: chunks and double buffering. From UPipe's accounting: where the memory goes.)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from ithaca.schedule.keys import Keys, KeysBeside, KeySums
from ithaca.schedule.rising import Step, Xs, open_xs
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
    weights_of: Callable[[int], AbstractContextManager[Weights]]  # of another layer, to be read

    @contextmanager
    def step_from(self, layer: int) -> Iterator[Step]:
        """Mix and feed of another layer."""
        with self.weights_of(layer) as w:
            yield lambda x, o, y: finish(self.spec, w, x, o, y, self.tile)

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
    xs, ys, kept = tapes.x(layer), tapes.x(layer + 1), tapes.attended(layer)
    keys = Keys(tapes.keys)
    for chunk in range(call.walk.tiles.count):
        x = xs.read(chunk, toward=1)
        q, k, v = call.exchange.to_heads(*project(call.spec, w, x, call.turn(chunk, x.dtype), Heads.all(call.spec)))
        keys.put(chunk, k, v)
        o, lse = call.walk.forward(chunk, q, keys)
        (o,) = call.exchange.to_tokens(o)
        for tape, tile in zip(kept, (o, lse.T), strict=False):
            tape.write(chunk, tape.blank(chunk).copy_(tile))
        y = ys.blank(chunk)
        finish(call.spec, w, x, o, y, call.tile)
        xs.release(x)
        ys.write(chunk, y)
    tapes.keys_of = layer
    ys.prefetch(0)  # for whoever reads it next, while the last chunk is still computed


def _backward(call: SweepCall, w: Summed) -> None:
    tapes, layer, count = call.tapes, call.layer, call.walk.tiles.count
    with open_xs(tapes, layer, call.step_from) as xs:
        sums = KeySums(tapes.key_sums)
        keys = _KeysAgain(call, w, xs)
        for chunk in reversed(range(count)):
            _chunk_backward(call, w, chunk, xs, keys, sums)
    if layer > 0 and not tapes.rebuild(layer - 1):
        for tape in (tapes.x(layer - 1), *tapes.attended(layer - 1), tapes.gradient):
            tape.prefetch(count - 1)


def _chunk_backward(call: SweepCall, w: Summed, chunk: int, xs: Xs, keys: "_KeysAgain", sums: KeySums) -> None:
    kept, gradients = call.tapes.attended(call.layer), call.tapes.gradient
    x, *tiles, gradient = (tape.read(chunk, toward=-1) for tape in (xs, *kept, gradients))
    if kept:
        query, (o, lse) = None, tiles
        lse = lse.T
    else:
        query = _Query(call, w, chunk, x, keys)
        o, lse = call.walk.forward(chunk, query.q, keys)
        (o,) = call.exchange.to_tokens(o)
    do = torch.empty_like(o)
    finish_backward(call.spec, w, x, o, gradient, gradient, do, call.tile)
    query = query or _Query(call, w, chunk, x, keys)  # only now, where it can wait: MLPs are wide
    gradient += query.backward(do, o, lse, sums)
    gradients.write(chunk, gradient)
    for tape, tile in zip(kept, tiles, strict=True):
        tape.release(tile)
    xs.release(x)


class _Query:
    """q of a chunk, with what its backward pass needs; the chunk's k and v join the others."""

    def __init__(self, call: SweepCall, w: Summed, chunk: int, x: Tensor, keys: "_KeysAgain"):
        self._call, self._chunk, self._keys = call, chunk, keys
        self._projection = Projection(call.spec, w, x, call.turn(chunk, x.dtype))
        self.q, k, v = call.exchange.to_heads(*self._projection.qkv)
        if not keys.has(chunk):
            keys.put(chunk, k, v)

    def backward(self, do: Tensor, o: Tensor, lse: Tensor, sums: KeySums) -> Tensor:
        """dx of the projections, after attention's backward pass."""
        call, chunk = self._call, self._chunk
        do, o = call.exchange.to_heads(do, o)
        dq = call.walk.backward(chunk, do, self.q, o, lse, KeysBeside(self._keys, sums), sums.add)
        self._keys.xs.prefetch(chunk - 1)  # the walk may have read x tiles for K and V, the next chunk's among them
        return self._projection.backward(*call.exchange.to_tokens(dq, *sums.take(chunk, dq.dtype)))


class _KeysAgain(Keys):
    """K and V of earlier chunks, made again from x when they are first visited."""

    def __init__(self, call: SweepCall, w: Summed, xs: Xs):
        still_there = range(call.walk.tiles.count) if call.tapes.keys_of == call.layer else ()
        super().__init__(call.tapes.keys, still_there)
        self._call, self._w, self.xs = call, w, xs

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        tiles = super().read(index, following)
        if following is not None and not self.has(following):
            self.xs.prefetch(following)
        return tiles

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        call, x = self._call, self.xs.read(index)
        with torch.no_grad():
            _, k, v = project(call.spec, self._w, x, call.turn(index, x.dtype), Heads.keys_only(call.spec))
        self.xs.release(x)
        k, v = call.exchange.to_heads(k, v)
        return k, v
