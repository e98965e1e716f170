"""A rank's tokens through the decoder: embedding, blocks, then the loss or the logits.

`loss_sum` and `logits` run inside the decoder's call, so that FSDP2 has gathered its weights. Under the schedule
`whole` a tensor of hidden states goes from block to block. Under `sweep` hidden states are on tapes, and a 0-dim
tensor, the carrier, takes the autograd graph from block to block.

Only these tensors are arguments of a unit's call. All else is bound to the function: FSDP2 walks through every
argument, field by field, in search of tensors."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.attention.walk import Walk
from ithaca.base.owners import BLOCKS, owned_by
from ithaca.model.decoder import Decoder
from ithaca.parallel.batch import Batch
from ithaca.parallel.exchange import Exchange
from ithaca.parallel.head_split import Rounds
from ithaca.parallel.layout import Layout
from ithaca.parallel.ring import Ring, ring_runs
from ithaca.parallel.sharding import readable, settle
from ithaca.plans.plan import Plan
from ithaca.schedule.embedding import embed
from ithaca.schedule.kv_cache import KVCache
from ithaca.schedule.loss import head_logits, tape_loss, tape_token_losses, tiled_loss, token_losses
from ithaca.schedule.marks import LOSS, Mark, no_mark
from ithaca.schedule.sweep.call import Rotations, SweepCall
from ithaca.schedule.sweep.run import run_sweep
from ithaca.schedule.tapes import Pass
from ithaca.schedule.tensor.run import TensorPass, TensorRanks
from ithaca.schedule.whole.attention import Attention
from ithaca.schedule.whole.ring_kernel import RingKernel
from ithaca.schedule.whole.run import BlockCall, run_block


@dataclass(frozen=True)
class ForwardContext:
    """How a batch is run."""

    plan: Plan
    kernel: Kernel
    layout: Layout
    exchange: Exchange
    ring: Ring
    rounds: Rounds
    tapes: Pass | None  # None: the Plan needs none
    visits: int | None = None  # a rehearsal of memory makes this many visits at either end of a walk; None: all
    mark: Mark = no_mark
    cache: KVCache | None = None  # saves K and V of every block, for tokens that will be added
    tensor: TensorRanks | None = None  # None: ranks hold whole weights
    bounds: Tensor | None = None  # of the documents, on the device, in place of the batch's (cuda_graph.py)


def loss_sum(decoder: Decoder, batch: Batch, context: ForwardContext) -> Tensor:
    """Σ of the cross-entropy over this rank's valid tokens, a scalar."""
    spec, tile, tensor = decoder.spec, context.plan.loss_tile, _begin_tensor(batch, context)

    def run(w: dict[str, Tensor], state: Tensor) -> Tensor:
        weight, head = w["norm.weight"], _head(decoder, w)
        context.mark(LOSS)
        if tensor:
            return tensor.loss_sum(decoder, state, weight, head, tile)
        if context.plan.sweeps:
            assert context.tapes is not None
            return tape_loss(spec, state, context.tapes, weight, head, batch.labels, tile)
        return tiled_loss(spec, state, weight, head, batch.labels, tile)

    return decoder.head(run, _through_blocks(decoder, batch, context, tensor))


def losses(decoder: Decoder, batch: Batch, context: ForwardContext) -> Tensor:
    """[tokens], the cross-entropy of each of this rank's tokens, 0 where it has no label. Without gradients."""
    spec, tile, tensor = decoder.spec, context.plan.loss_tile, _begin_tensor(batch, context)

    def run(w: dict[str, Tensor], state: Tensor) -> Tensor:
        weight, head = w["norm.weight"], _head(decoder, w)
        if tensor:
            return tensor.losses(decoder, state, weight, head, tile)
        if context.plan.sweeps:
            assert context.tapes is not None
            return tape_token_losses(spec, context.tapes, weight, head, batch.labels, tile)
        return token_losses(spec, state, weight, head, batch.labels, tile)

    return decoder.head(run, _through_blocks(decoder, batch, context, tensor))


def logits(decoder: Decoder, batch: Batch, context: ForwardContext) -> Tensor:
    """[tokens, vocabulary], all at once."""

    tensor = _begin_tensor(batch, context)

    def run(w: dict[str, Tensor], state: Tensor) -> Tensor:
        weight, head = w["norm.weight"], _head(decoder, w)
        if tensor:
            return tensor.logits(decoder, state, weight, head)
        return head_logits(decoder.spec, _read_all(context) if context.plan.sweeps else state, weight, head)

    return decoder.head(run, _through_blocks(decoder, batch, context, tensor))


def fill_cache(decoder: Decoder, batch: Batch, context: ForwardContext) -> Tensor:
    """Run the blocks so that the context's cache saves their K and V. The result has no meaning."""
    assert context.cache is not None
    return _through_blocks(decoder, batch, context, _begin_tensor(batch, context))


def _begin_tensor(batch: Batch, context: ForwardContext) -> TensorPass | None:
    return context.tensor.begin(batch) if context.tensor else None


def _through_blocks(decoder: Decoder, batch: Batch, context: ForwardContext, tensor: TensorPass | None) -> Tensor:
    """The last block's output [tokens, hidden]; under `sweep` the carrier, with the output on the residual tape."""
    return (
        _run_sweep_blocks(decoder, batch, context)
        if context.plan.sweeps
        else _run_whole_blocks(decoder, batch, context, tensor)
    )


def _run_whole_blocks(decoder: Decoder, batch: Batch, context: ForwardContext, tensor: TensorPass | None) -> Tensor:
    spec, plan, spread = decoder.spec, context.plan, tensor.spread if tensor else None
    if tensor:
        x = decoder.embed(lambda table: tensor.embed(table, plan.loss_tile))
    else:
        x = decoder.embed(lambda table: _lookup(table, batch.tokens))
    with owned_by(BLOCKS):
        rope = decoder.rotary.at(tensor.positions.flatten() if tensor else batch.positions, x.dtype)
    kernel = context.kernel
    if context.ring.ranks > 1:
        kernel = RingKernel(kernel, context.ring, context.layout, batch.bounds, plan.travel == "gather")
    pieces = Pieces.documents(batch.bounds)
    if context.bounds is not None:
        pieces = Pieces.changing(context.bounds, len(batch.tokens))
    attention = Attention(spec, kernel, pieces, context.exchange, context.rounds, spread)
    places, checkpoint = plan.placement(spec.layers).x, plan.checkpoint or "full"
    for layer, (block, rotates) in enumerate(zip(decoder.blocks, spec.rope_layers, strict=True)):
        rotation, tapes = rope if rotates else None, context.tapes if places[layer] != "device" else None
        call = BlockCall(attention, layer, rotation, checkpoint, plan.tile, tapes, context.mark)
        run = partial(run_block, call=call)
        run = tensor.sharing(run) if tensor else run
        x = block(context.cache.before(run, layer, None) if context.cache else run, x)
    return x


def _run_sweep_blocks(decoder: Decoder, batch: Batch, context: ForwardContext) -> Tensor:
    spec, tapes, tile = decoder.spec, context.tapes, context.plan.tile
    assert tapes is not None
    assert tile is not None
    layout, ring = context.layout, context.ring
    walk = Walk(context.kernel, layout.chunks, batch.bounds, ring_runs(layout, ring.rank), context.visits)
    rounds = tuple(split for (split,) in context.rounds)
    rotations = Rotations(decoder.rotary, batch.positions, tapes.residual.tiles)
    carrier = decoder.embed(lambda table: embed(table, batch.tokens, tapes, tile))
    weights_of = [readable(block) for block in decoder.blocks]
    for layer, block in enumerate(decoder.blocks):
        call = SweepCall(
            spec,
            layer,
            tapes,
            walk,
            rotations,
            tile,
            context.exchange,
            ring,
            rounds,
            weights_of,
            readable(decoder.embedding),
            batch.tokens,
            partial(settle, decoder),
            context.mark,
        )
        run = partial(run_sweep, call=call)
        carrier = block(context.cache.before(run, layer, tapes) if context.cache else run, carrier)
    return carrier


@owned_by(BLOCKS)
def _lookup(table: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, table)


def _read_all(context: ForwardContext) -> Tensor:
    assert context.tapes is not None
    tape = context.tapes.residual
    tiles = []
    for index in range(tape.tiles.count):
        tile = tape.read(index, toward=1, changed=False)
        tiles.append(tile.clone())
        tape.release(tile)
    return torch.cat(tiles)


def _head(decoder: Decoder, w: dict[str, Tensor]) -> Tensor:
    return decoder.table() if decoder.spec.tied else w["weight"]
