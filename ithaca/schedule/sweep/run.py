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
states while a chunk's attention runs backward (over a ring, those within attention are of all its ranks' tokens), and
the slots that host tapes pass through.

Over Ulysses ranks a tile of x, o or the gradient is this rank's part of a chunk, with all heads; K, V, their gradients
and the log-sum-exp are of the whole chunk, with this rank's heads. In between is the exchange, and chunks are staggered
so that it travels while their neighbours attend (stages.py). Ring ranks keep their K and V: a chunk's queries are
gathered from all of them before it attends, and what each found with its own keys is merged after it; backward, dq is
summed, and dK and dV never move (parallel/ring.py). What is sent: plans/traffic.py.

Blocks exchange tapes, not tensors. The graph between them is carried by a 0-dim tensor, the token: weights are inputs
of each block's step, and the token's gradient is the upstream scale of the loss, by which theirs are multiplied.
(From FPDT: chunks and double buffering. From UPipe's accounting: where the memory goes.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.walk import Walk
from ithaca.model.block import Weights, project
from ithaca.model.linear import Summed
from ithaca.model.rotary import Rotary, Rotation
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.exchange import Exchange, Exchanged
from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.layout import hops
from ithaca.parallel.ring import Ring
from ithaca.schedule.pre_post_attention import Projection, post_attention, post_attention_backward, summed
from ithaca.schedule.sweep.kv_tapes import KVGradients, KVTiles, KVWithGradients
from ithaca.schedule.sweep.pipeline import Stages, run_chunks
from ithaca.schedule.sweep.rebuild_x import Step, Xs, open_xs
from ithaca.schedule.tapes import Pass


@dataclass(frozen=True)
class SweepCall:
    """What one block needs to know beside its weights."""

    spec: Spec
    layer: int
    tapes: Pass
    walk: Walk  # over the chunks of the whole sequence
    rotary: Rotary
    positions: Tensor  # of the local tokens
    tile: int
    exchange: Exchange
    ring: Ring
    split: HeadSplit
    weights_of: Callable[[int], AbstractContextManager[Weights]]  # of another layer, to be read

    @contextmanager
    def step_from(self, layer: int) -> Iterator[Step]:
        """Mix and feed of another layer."""
        with self.weights_of(layer) as w:
            yield lambda x, o, y: post_attention(self.spec, w, x, o, y, self.tile)

    @property
    def hops(self) -> int:
        """Exchanges between a chunk's projections and its attention, each of which a neighbour can compute behind."""
        return hops(self.exchange.ranks, self.ring.ranks)

    def rotation(self, chunk: int, dtype: torch.dtype) -> Rotation | None:
        if not self.spec.rope_layers[self.layer]:
            return None
        positions = self.positions[self.tapes.residual.tiles.rows(chunk)]
        return self.rotary.at(positions, dtype)

    def project(self, w: Summed, chunk: int, x: Tensor) -> Projection:
        return Projection(self.spec, w, x, self.rotation(chunk, x.dtype), Heads.all(self.spec))


def _meanwhile(over: Exchange | Ring) -> Stages:
    """Let neighbouring chunks go on, where what was sent has a way to go."""
    if over.ranks > 1:
        yield


def run_sweep(w: dict[str, Tensor], carrier: Tensor, call: SweepCall) -> Tensor:
    """Run the block from its x tape to the next one; differentiable in the token and the weights."""
    return _Sweep.apply(carrier, call, tuple(w), *w.values())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, call: SweepCall, names: tuple[str, ...], *weights: Tensor) -> Tensor:
        _forward(call, dict(zip(names, weights, strict=True)))
        ctx.save_for_backward(*weights)
        ctx.call, ctx.names = call, names
        return carrier.clone()

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
    keys, chunks = KVTiles(call.tapes.kv), range(call.walk.tiles.count)
    run_chunks((_chunk_forward(call, w, chunk, keys) for chunk in chunks), call.hops > 0)
    call.tapes.kv_of_layer = call.layer
    call.tapes.x(call.layer + 1).prefetch(0)  # for whoever reads it next, while the last chunk is still computed


def _chunk_forward(call: SweepCall, w: Weights, chunk: int, keys: KVTiles) -> Stages:
    xs, ys, kept = call.tapes.x(call.layer), call.tapes.x(call.layer + 1), call.tapes.attended(call.layer)
    x = xs.read(chunk, toward=1)
    q, *kv = project(call.spec, w, x, call.rotation(chunk, x.dtype), Heads.all(call.spec))
    coming = call.exchange.to_heads(call.split, (q,), kv)
    del q, kv
    yield from _meanwhile(call.exchange)
    (q,), kv = coming.wait()
    gathering = call.ring.gather(q)
    del q, coming
    yield from _meanwhile(call.ring)
    keys.put(chunk, *kv)
    (queries,) = gathering.wait()
    merging = call.ring.merge(*call.walk.forward(chunk, queries, keys))
    del kv, queries, gathering
    yield from _meanwhile(call.ring)
    o, lse = merging.wait()
    going = call.exchange.to_tokens(call.split, (o,))
    del o, merging
    yield from _meanwhile(call.exchange)
    (o,), _ = going.wait()
    for tape, tile in zip(kept, (o, lse.T), strict=False):
        tape.write(chunk, tape.blank(chunk).copy_(tile))
    y = ys.blank(chunk)
    post_attention(call.spec, w, x, o, y, call.tile)
    xs.release(x)
    ys.write(chunk, y)


def _backward(call: SweepCall, w: Summed) -> None:
    tapes, layer, count = call.tapes, call.layer, call.walk.tiles.count
    with open_xs(tapes, layer, call.step_from) as xs:
        sums = KVGradients(tapes.kv_gradients)
        keys = _RebuiltKV(call, w, xs)
        chunks = reversed(range(count))
        run_chunks((_chunk_backward(call, w, chunk, xs, keys, sums) for chunk in chunks), call.hops > 0)
    if layer > 0 and not tapes.rebuild(layer - 1):
        for tape in (tapes.x(layer - 1), *tapes.attended(layer - 1), tapes.residual):
            tape.prefetch(count - 1)


def _chunk_backward(call: SweepCall, w: Summed, chunk: int, xs: Xs, keys: "_RebuiltKV", sums: KVGradients) -> Stages:
    kept, residuals = call.tapes.attended(call.layer), call.tapes.residual
    x, *tiles, residual = (tape.read(chunk, toward=-1) for tape in (xs, *kept, residuals))
    if kept:
        projection, (o, lse) = None, tiles
        lse, there = lse.T, ()
    else:
        projection = call.project(w, chunk, x)
        there, o, lse = _attend_again(call, chunk, projection, keys)
    do = torch.empty_like(o)
    post_attention_backward(call.spec, w, x, o, residual, residual, do, call.tile)
    if projection is None:  # only now, where it can wait: MLPs are wide
        projection = call.project(w, chunk, x)
        coming = keys.send(chunk, (projection.q, o, do), projection.kv)
        projection.let_go()
    else:
        coming = call.exchange.to_heads(call.split, (do,))
    del o, do
    yield from _meanwhile(call.exchange)
    gathering = call.ring.gather(*there, *coming.wait()[0])
    gathering_lse = call.ring.gather(lse.T[..., None])
    del there, coming
    yield from _meanwhile(call.ring)
    (q, o, do), (lse,) = gathering.wait(), gathering_lse.wait()
    dq = call.walk.backward(chunk, do, q, o, lse[..., 0].T, KVWithGradients(keys, sums), sums.add)
    reducing = call.ring.reduce(dq)
    del q, o, do, dq, lse, gathering, gathering_lse
    for tape, tile in zip(kept, tiles, strict=True):
        tape.release(tile)
    # The walk may have read x tiles for K and V, among them the one that comes next
    xs.prefetch(chunk - 1 - call.hops)
    yield from _meanwhile(call.ring)
    dq = reducing.wait()
    going = call.exchange.to_tokens(call.split, (dq,), sums.take(chunk, dq.dtype))
    del dq, reducing
    yield from _meanwhile(call.exchange)
    (dq,), dkv = going.wait()
    residual += projection.backward(dq, *dkv)
    residuals.write(chunk, residual)
    xs.release(x)


def _attend_again(
    call: SweepCall, chunk: int, projection: Projection, keys: "_RebuiltKV"
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """(q, o) of this rank's heads, o of its tokens, and the log-sum-exp."""
    coming = keys.send(chunk, (projection.q,), projection.kv)
    projection.let_go()
    ((q,), _) = coming.wait()
    (queries,) = call.ring.gather(q).wait()
    o, lse = call.ring.merge(*call.walk.forward(chunk, queries, keys)).wait()
    (mine,), _ = call.exchange.to_tokens(call.split, (o,)).wait()
    return (q, o), mine, lse


class _RebuiltKV(KVTiles):
    """K and V of earlier chunks, made again from x when they are first visited."""

    def __init__(self, call: SweepCall, w: Summed, xs: Xs):
        still_there = range(call.walk.tiles.count) if call.tapes.kv_of_layer == call.layer else ()
        super().__init__(call.tapes.kv, still_there)
        self._call, self._w, self._xs = call, w, xs
        self._coming: dict[int, Exchanged] = {}

    def send(self, chunk: int, queries: Sequence[Tensor], kv: Sequence[Tensor]) -> Exchanged:
        """Send query-like tensors of a chunk to their heads; its K and V go with them if nobody has asked for those."""
        missing = not self.has(chunk) and chunk not in self._coming
        coming = self._call.exchange.to_heads(self._call.split, queries, kv if missing else ())
        if missing:
            self._coming[chunk] = coming
        return coming

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        tiles = super().read(index, following)
        if following is not None and not self.has(following) and following not in self._coming:
            if self._call.exchange.ranks > 1:  # to be here when this tile's attention is done
                self._coming[following] = self._begin(following)
                self._xs.prefetch(following - 1)
            else:
                self._xs.prefetch(following)
        return tiles

    def make(self, index: int) -> tuple[Tensor, Tensor]:
        coming = self._coming.pop(index, None) or self._begin(index)
        _, (k, v) = coming.wait()
        return k, v

    def _begin(self, index: int) -> Exchanged:
        call, x = self._call, self._xs.read(index)
        with torch.no_grad():
            _, *kv = project(call.spec, self._w, x, call.rotation(index, x.dtype), Heads.keys_only(call.spec))
        self._xs.release(x)
        return call.exchange.to_heads(call.split, (), kv)
