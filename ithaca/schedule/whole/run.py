"""Blocks that run over all local tokens at once, with the MLP in tiles if the Plan says so.

Activation checkpointing decides what a block saves, per local token in units of a hidden state d (Llama3-8B):
    none       every intermediate, about 17 d; nothing is computed twice
    selective  x and o (2 d, and the log-sum-exp); norms, projections and MLP are recomputed, attention is not
    full       x (1 d, on the device, the host or the disk); everything is recomputed
The checkpointed forms are one autograd Function per block. Its backward runs the block again in two halves: the half
after attention, and the projections before it (which `full` needs first, to have the attention's output again).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.owners import BLOCKS, owned_by
from ithaca.model.block import Weights, mlp, output_projection
from ithaca.model.rotary import Rotation
from ithaca.model.spec import Heads
from ithaca.schedule.marks import BACKWARD, FORWARD, Mark, no_mark
from ithaca.schedule.pre_post_attention import post_attention, post_attention_backward, summed
from ithaca.schedule.tapes import Pass
from ithaca.schedule.whole.attention import Attention, BackwardAttention
from ithaca.tape.tape import Tape


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one block beside its weights and its input."""

    attention: Attention
    layer: int
    rotation: Rotation | None
    checkpoint: str
    tile: int | None
    tapes: Pass | None  # with this layer's x, if that is not saved on the device
    mark: Mark = no_mark


@owned_by(BLOCKS)
def run_block(w: dict[str, Tensor], x_TE: Tensor, call: BlockCall) -> Tensor:
    """The block's output; differentiable in x and the weights."""
    call.mark(FORWARD, call.layer)
    y = (
        _keeping_all(w, x_TE, call)
        if call.checkpoint == "none"
        else _Checkpointed.apply(x_TE, call, tuple(w), *w.values())
    )
    if y.requires_grad and call.mark is not no_mark:
        y.register_hook(partial(_mark_backward, call.mark, call.layer))
    return y


def _keeping_all(w: dict[str, Tensor], x_TE: Tensor, call: BlockCall) -> Tensor:
    spec, spread = call.attention.spec, call.attention.spread
    x, o = call.attention.differentiable(w, x_TE, call.rotation)
    return mlp(spec, w, output_projection(spec, w, x, o, Heads.all(spec), spread), spread=spread)


def _mark_backward(mark: Mark, layer: int, gradient: Tensor) -> None:  # noqa: ARG001
    """Mark the backward pass of a block when the gradient of its output is there. The gradient stays as it is."""
    mark(BACKWARD, layer)


class _Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: BlockCall, names: tuple[str, ...], *weights: Tensor) -> Tensor:
        w: Weights = dict(zip(names, weights, strict=True))
        o, lses = call.attention.forward(w, x, call.rotation)
        kept = (o, *lses) if call.checkpoint == "selective" else ()
        if call.tapes is None:
            kept = (x, *kept)
        elif call.tapes.training:
            _put(call.tapes.x(call.layer), x)
        ctx.save_for_backward(*weights, *kept)
        ctx.call, ctx.names = call, names
        y = torch.empty_like(x)
        post_attention(call.attention.spec, w, x, o, y, call.tile or len(x), call.attention.spread)
        return y

    @staticmethod
    @once_differentiable
    @owned_by(BLOCKS)
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call, names, spec, spread = ctx.call, ctx.names, ctx.call.attention.spec, ctx.call.attention.spread
        if call.tapes is not None:
            call.tapes.waits = False
        weights, kept = ctx.saved_tensors[: len(names)], list(ctx.saved_tensors[len(names) :])
        wanted = [name for name, needed in zip(names, ctx.needs_input_grad[3:], strict=True) if needed]
        w = summed(spec, dict(zip(names, weights, strict=True)), wanted, spread)
        x = kept.pop(0) if call.tapes is None else _get(call.tapes.x(call.layer))
        attention = BackwardAttention(call.attention, w, x, call.rotation, kept)
        tile = call.tile or len(x)
        dx, attention.do = post_attention_backward(spec, w, x, attention.o, dy, tile, spread=spread)
        attention.backward(dx)
        return dx, None, None, *(w.sums.get(name) for name in names)


def _put(tape: Tape, x: Tensor) -> None:
    for index, rows in enumerate(tape.tiles.slices()):
        tape.write(index, tape.blank(index).copy_(x[rows]))


def _get(tape: Tape) -> Tensor:
    x = None
    for index, rows in enumerate(tape.tiles.slices()):
        tile = tape.read(index, toward=1)
        x = tile.new_empty(tape.tiles.length, *tile.shape[1:]) if x is None else x
        x[rows] = tile
        tape.release(tile)
    assert x is not None
    return x
