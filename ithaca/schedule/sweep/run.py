"""The sweep: a block runs as one causal pass over chunks, and backward as one reverse pass.

    forward, chunks in order     read x -> project q, k, v -> append k, v to the K/V tapes -> attend to all K/V so far
                                 -> write o -> output projection and MLP -> write the next block's x
    backward, in reverse         read x, o and the residual's gradient -> backward of MLP and output projection
                                 -> attention backward of the chunk against all K/V before it, adding to their dK, dV
                                 -> dK, dV of the chunk itself are now complete, because every later chunk is done
                                 -> backward of the projections -> write the residual's gradient in place

Attention runs once if o and the log-sum-exp are saved; otherwise a chunk's attention is recomputed shortly before its
backward pass. x is read, or rebuilt from o of layers below and the embedding (rebuild_x.py). K and V are recomputed,
each tile when a chunk first visits it, so that reading x hides behind attention; the last layer still has those of its
forward pass.

Of the sequence's full length the device holds K, V (in the dtype of the computation) and their gradients (fp32):
6 · Hkv · D / hidden d, 1.5 d for Llama3-8B. The rest lives where the Plan puts it. Beside that, about 20 hidden states
of a chunk exist while its attention runs backward. cost.py has all of it, and what is sent.

With head rounds (`heads` of the Plan) a block runs over its chunks several times, each time with some K/V heads and the
query heads that read them, so that K, V and their gradients exist for these alone. The first rounds leave their heads
of o on a tape, and the last one completes it and runs output projection and MLP. Backward takes the rounds in reverse,
because the last layer still has K and V of the last round. That one leaves the gradient of o for the others on the same
tape. Given up: the norm before the projections runs, and x, o and the residual are read, once for each round.

Over Ulysses ranks a tile of x, o or the residual is this rank's part of a chunk, with all heads. K, V, their gradients
and the log-sum-exp are of the whole chunk, with this rank's heads. The exchange lies in between, and chunks are
staggered so that it hides behind the attention of their neighbours (`run_chunks`). Ring ranks keep their K and V: a
chunk's queries are gathered over the ring, each rank attends to its own keys, and the outputs are merged. Backward, dq
is reduced, and dK and dV never move (parallel/ring.py).

Blocks exchange tapes, not tensors. A 0-dim tensor, the carrier, takes the autograd graph from block to block. Weights
are inputs of each block's autograd Function, and the carrier's gradient is the upstream scale of the loss.
(From FPDT: chunks and double buffering. From UPipe: head rounds, and where the memory goes.)
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.owners import BLOCKS, owned_by
from ithaca.model.block import Weights, project
from ithaca.model.linear import Summed
from ithaca.model.spec import Heads
from ithaca.parallel.exchange import Exchange, Exchanged
from ithaca.parallel.ring import Ring
from ithaca.schedule.marks import BACKWARD, FORWARD, REBUILD
from ithaca.schedule.pre_post_attention import Projection, post_attention, post_attention_backward, summed
from ithaca.schedule.round_heads import put_heads, take_heads
from ithaca.schedule.sweep.call import SweepCall
from ithaca.schedule.sweep.chunks import is_long
from ithaca.schedule.sweep.kv_tapes import KVGradients, KVTiles, KVWithGradients
from ithaca.schedule.sweep.rebuild_x import OpenReader, XReader, open_xs

ChunkSteps = Iterator[None]  # the work of a chunk; it yields where it has sent something and must wait


def _let_others_run(over: Exchange | Ring) -> ChunkSteps:
    """Yield to neighbouring chunks while a message is on its way; not if there is only one rank."""
    if over.ranks > 1:
        yield


def run_sweep(w: dict[str, Tensor], carrier: Tensor, call: SweepCall) -> Tensor:
    """Run the block from its x tape to the next one; differentiable in the carrier and the weights."""
    return _Sweep.apply(carrier, call, tuple(w), *w.values())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, call: SweepCall, names: tuple[str, ...], *weights: Tensor) -> Tensor:
        with owned_by(BLOCKS):
            _forward(call, dict(zip(names, weights, strict=True)))
        ctx.save_for_backward(*weights)
        ctx.call, ctx.names = call, names
        return carrier.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        if ctx.call.layer == ctx.call.spec.layers - 1 and is_long(ctx.call.walk.tiles.count):
            ctx.call.settle()
        names, wanted = ctx.names, ctx.needs_input_grad[3:]
        given = dict(zip(names, ctx.saved_tensors, strict=True))
        with owned_by(BLOCKS), _open_xs(ctx.call) as open_reader:  # x is rebuilt before there are sums of gradients
            w = summed(ctx.call.spec, given, [name for name, needed in zip(names, wanted, strict=True) if needed])
            _backward(ctx.call, w, open_reader)
        if w.all_sums is not None:
            w.all_sums *= scale
        return scale, None, None, *(w.sums.get(name) for name in names)


def _forward(call: SweepCall, w: Weights) -> None:
    tapes, chunks = call.tapes, range(call.walk.tiles.count)
    for part in call.in_rounds():
        keys = KVTiles(tapes.kv, part.own_kv_heads)
        run_chunks((_chunk_forward(part, w, chunk, keys) for chunk in chunks), call.hops > 0)
        if not part.in_last_round:
            for tape in (tapes.x(call.layer), tapes.between_rounds, *tapes.o_and_lse(call.layer)[1:]):
                tape.prefetch(0)
    tapes.kv_of = call.layer, len(call.rounds) - 1
    tapes.x(call.layer + 1).prefetch(0)  # the next block reads it while the last chunk is still computed


def _chunk_forward(call: SweepCall, w: Weights, chunk: int, keys: KVTiles) -> ChunkSteps:
    xs, ys = call.tapes.x(call.layer), call.tapes.x(call.layer + 1)
    x = xs.read(chunk, toward=1, changed=False)
    q, *kv = project(call.spec, w, x, call.rotation(chunk, x.dtype), call.heads)
    if not call.in_last_round:
        xs.release(x)
    coming = call.exchange.to_heads(call.split, (q,), kv)
    del q, kv
    yield from _let_others_run(call.exchange)
    (q,), kv = coming.wait()
    gathering = call.ring.gather(q)
    del q, coming
    yield from _let_others_run(call.ring)
    keys.put(chunk, *kv)
    (queries,) = gathering.wait()
    call.mark_chunk(FORWARD, chunk)  # here, not above: chunks that overlap attend one after the other
    merging = call.ring.merge(*call.walk.forward(chunk, queries, keys))
    del kv, queries, gathering
    yield from _let_others_run(call.ring)
    o, lse = merging.wait()
    going = call.exchange.to_tokens(call.split, (o,))
    del o, merging
    yield from _let_others_run(call.exchange)
    (o,), _ = going.wait()
    _save_lse(call, chunk, lse)
    o = _join_rounds(call, chunk, o)
    if o is None:
        return
    for tape in call.tapes.o_and_lse(call.layer)[:1]:
        tape.write(chunk, tape.blank(chunk).copy_(o))
    y = ys.blank(chunk)
    post_attention(call.spec, w, x, o, y, call.tile)
    if len(call.rounds) > 1:
        call.tapes.between_rounds.release(o)
    xs.release(x)
    ys.write(chunk, y, again=True)


def _save_lse(call: SweepCall, chunk: int, lse: Tensor) -> None:
    """Save the log-sum-exps of a round beside those of the rounds before it, if a backward pass follows."""
    for tape in call.tapes.o_and_lse(call.layer)[1:]:
        tile = tape.read(chunk, toward=1) if call.round else tape.blank(chunk)
        call.own_lse(tile).copy_(lse)
        tape.write(chunk, tile)


def _join_rounds(call: SweepCall, chunk: int, o: Tensor) -> Tensor | None:
    """o of all heads after the last round. After the others None: their heads wait on a tape."""
    if len(call.rounds) == 1:
        return o
    tape = call.tapes.between_rounds
    whole = tape.read(chunk, toward=1) if call.round else tape.blank(chunk)
    put_heads(whole, call.split, o)
    if call.in_last_round:
        return whole
    tape.write(chunk, whole, again=True)
    return None


def _open_xs(call: SweepCall) -> AbstractContextManager[OpenReader]:
    """Open the block's x for its backward pass."""
    if call.tapes.rebuild(call.layer):
        call.mark(REBUILD, call.layer)
    return open_xs(call.tapes, call.layer, call.advance_from, call.look_up)


def _backward(call: SweepCall, w: Summed, open_reader: OpenReader) -> None:
    tapes, layer, count = call.tapes, call.layer, call.walk.tiles.count
    for part in reversed(call.in_rounds()):
        _round_backward(part, w, open_reader)
    if layer > 0 and not tapes.rebuild(layer - 1):
        for tape in (tapes.x(layer - 1), *tapes.o_and_lse(layer - 1), tapes.residual):
            tape.prefetch(count - 1)


def _round_backward(call: SweepCall, w: Summed, open_reader: OpenReader) -> None:
    tapes, count = call.tapes, call.walk.tiles.count
    xs = open_reader(call.round == 0)
    sums = KVGradients(tapes.kv_gradients, call.own_kv_heads)
    keys = _RebuiltKV(call, w, open_reader(False))
    chunks = reversed(range(count))
    run_chunks((_chunk_backward(call, w, chunk, xs, keys, sums) for chunk in chunks), call.hops > 0)
    if call.round:  # another one follows
        for tape in (xs, *tapes.o_and_lse(call.layer), tapes.between_rounds, tapes.residual):
            tape.prefetch(count - 1)


def _chunk_backward(
    call: SweepCall, w: Summed, chunk: int, xs: XReader, keys: "_RebuiltKV", sums: KVGradients
) -> ChunkSteps:
    kept, residuals = call.tapes.o_and_lse(call.layer), call.tapes.residual
    read = kept if call.in_last_round else (*kept, call.tapes.between_rounds)
    x, *tiles = (tape.read(chunk, toward=-1, changed=False) for tape in (xs, *read))
    if kept:
        projection, o, lse, arrived = None, tiles[0], call.own_lse(tiles[1]), ()
    else:
        projection = call.project(w, chunk, x)
        arrived, o, lse = yield from _recompute_attention(call, chunk, projection, keys, xs)
    keys.prefetch(chunk + call.hops)  # the chunk that attends next begins with its own
    if call.in_last_round:
        alone = call.walk.tiles.count == 1  # then the gradient takes another slot, and need not wait for this one
        residual = residuals.read(chunk, toward=-1, changed=not alone)
        dx, do = post_attention_backward(
            call.spec, w, x, o, residual, call.tile, residuals.blank(chunk) if alone else residual
        )
        if alone:
            residuals.release(residual)
        residual = dx
        _leave_gradient(call, chunk, do)
    else:
        residual, do = None, tiles[2]
    if projection is None:  # after the MLP, which takes most memory
        projection = call.project(w, chunk, x)
        o, do = take_heads(o, call.split), take_heads(do, call.split)
        coming = keys.send(chunk, (projection.q, o, do), projection.kv)
        projection.free_outputs()
    else:
        coming = call.exchange.to_heads(call.split, (do,))
    del o, do
    yield from _let_others_run(call.exchange)
    gathering = call.ring.gather(*arrived, *coming.wait()[0])
    gathering_lse = call.ring.gather(lse.T[..., None])
    del arrived, coming
    yield from _let_others_run(call.ring)
    (q, o, do), (lse,) = gathering.wait(), gathering_lse.wait()
    call.mark_chunk(BACKWARD, chunk)
    dq = call.walk.backward(chunk, do, q, o, lse[..., 0].T, KVWithGradients(keys, sums, chunk), sums.add)
    reducing = call.ring.reduce(dq)
    del q, o, do, dq, lse, gathering, gathering_lse
    for tape, tile in zip(read, tiles, strict=True):
        tape.release(tile)
    if kept:
        # The walk may have read x tiles for K and V, also the one that comes next
        xs.prefetch(chunk - 1 - call.hops)
    yield from _let_others_run(call.ring)
    dq = reducing.wait()
    going = call.exchange.to_tokens(call.split, (dq,), sums.take(chunk, dq.dtype))
    del dq, reducing
    yield from _let_others_run(call.exchange)
    (dq,), dkv = going.wait()
    if residual is None:
        residual = residuals.read(chunk, toward=-1)
    residual += projection.backward(dq, *dkv)
    residuals.write(chunk, residual, again=True)
    xs.release(x)


def _leave_gradient(call: SweepCall, chunk: int, do: Tensor) -> None:
    """Save the gradient of o for the rounds that follow."""
    if len(call.rounds) > 1:
        tape = call.tapes.between_rounds
        tape.write(chunk, tape.blank(chunk).copy_(do), again=True)


def _recompute_attention(
    call: SweepCall, chunk: int, projection: Projection, keys: "_RebuiltKV", xs: XReader
) -> Generator[None, None, tuple[tuple[Tensor, Tensor], Tensor, Tensor]]:
    """(q, o) of this rank's heads, o of this rank's tokens, and the log-sum-exp."""
    keys.prefetch(chunk + call.hops)
    coming = keys.send(chunk, (projection.q,), projection.kv)
    projection.free_outputs()
    yield from _let_others_run(call.exchange)
    ((q,), _) = coming.wait()
    gathering = call.ring.gather(q)
    del coming
    yield from _let_others_run(call.ring)
    (queries,) = gathering.wait()
    merging = call.ring.merge(*call.walk.forward(chunk, queries, keys))
    del queries, gathering
    xs.prefetch(chunk - 1 - call.hops)  # the walk may have read it for K and V
    yield from _let_others_run(call.ring)
    o, lse = merging.wait()
    going = call.exchange.to_tokens(call.split, (o,))
    del merging
    yield from _let_others_run(call.exchange)
    (mine,), _ = going.wait()
    return (q, o), mine, lse


class _RebuiltKV(KVTiles):
    """K and V of earlier chunks, recomputed from x when a chunk first visits them."""

    def __init__(self, call: SweepCall, w: Summed, xs: XReader):
        still_valid = range(call.walk.tiles.count) if call.tapes.kv_of == (call.layer, call.round) else ()
        super().__init__(call.tapes.kv, call.own_kv_heads, still_valid)
        self._call, self._w, self._xs = call, w, xs
        self._coming: dict[int, Exchanged] = {}

    def send(self, chunk: int, queries: Sequence[Tensor], kv: Sequence[Tensor]) -> Exchanged:
        """Send query-like tensors of a chunk to their heads, with its K and V if no chunk has asked for those yet."""
        missing = not self.has(chunk) and chunk not in self._coming
        coming = self._call.exchange.to_heads(self._call.split, queries, kv if missing else ())
        if missing:
            self._coming[chunk] = coming
        return coming

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        tiles = super().read(index, following)
        if following is not None and not self.has(following) and following not in self._coming:
            if self._call.exchange.ranks > 1:  # arrives while this tile's attention runs
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
        with torch.no_grad(), owned_by(BLOCKS):
            _, *kv = project(call.spec, self._w, x, call.rotation(index, x.dtype), Heads(range(0), call.heads.kv))
        self._xs.release(x)
        return call.exchange.to_heads(call.split, (), kv)


def run_chunks(chunks: Iterable[ChunkSteps], staggered: bool) -> None:
    """Run all chunks to their end, as a pipeline if `staggered`: while one waits for a message, its neighbours compute.

    In order, a chunk is done before the next begins. Staggered, each begins one step before its predecessor goes on:

        chunk 0   project and send   attend and send   finish
        chunk 1                      (before it:) project and send   attend and send   finish

    Both ways run each step's chunks in the same order, so all sums are the same.
    """
    running: list[ChunkSteps] = []
    for chunk in chunks:
        running = _advance([chunk, *running])
        while running and not staggered:
            running = _advance(running)
    while running:
        running = _advance(running)


def _advance(running: list[ChunkSteps]) -> list[ChunkSteps]:
    """Run each chunk to its next yield. Return the chunks that are not done."""
    ended = object()
    return [chunk for chunk in running if next(chunk, ended) is not ended]
