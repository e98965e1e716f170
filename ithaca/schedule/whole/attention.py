"""Attention of all local tokens over the Ulysses ranks, in rounds of heads.

A round takes a few query heads of every rank. It projects them by head index, sends them to the ranks that attend with
them, and puts their outputs back in their places among all heads. K and V go with the queries of a round or, if several
rounds read them, before the first of those. One round is Ulysses as published (`ulysses`, `alst`). More rounds
(`untied`) need less memory: q and o of only one round's heads exist at a time.

Backward, if o and the log-sum-exp are saved: each round is projected and exchanged again, with o and its gradient. dK
and dV are summed in at least fp32 over the rounds that read the same K and V before they are sent back. If they are not
saved, attention is recomputed first; with one round its tensors are kept in between. cost.py has what is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel, attend, softmax_scale
from ithaca.base.owners import ATTENTION, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.model.block import Weights, project, project_beside
from ithaca.model.linear import Spread, Summed
from ithaca.model.rotary import Rotation
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.exchange import Alone, Exchange
from ithaca.parallel.head_split import HeadSplit, Rounds
from ithaca.schedule.pre_post_attention import Projection
from ithaca.schedule.round_heads import put_heads, take_heads


@dataclass(frozen=True)
class Attention:
    """A block's attention, with all that it needs beside weights and input."""

    spec: Spec
    kernel: Kernel
    pieces: Pieces  # of the whole sequence
    exchange: Exchange
    rounds: Rounds
    spread: Spread | None = None  # of tensor ranks

    @property
    def one_round(self) -> bool:
        return len(self.rounds) == 1 and len(self.rounds[0]) == 1

    def forward(self, w: Weights, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, list[Tensor]]:
        """o of the local tokens with all heads, and each round's log-sum-exp of all tokens with this rank's heads."""
        outputs, lses = _Outputs(self.spec, x, self.one_round), []
        for group in self.rounds:
            joint = len(group) == 1
            kv = () if joint else self.send_keys(w, x, rotation, group[0])
            for split in group:
                heads = Heads(split.q_heads, split.kv_heads if joint else range(0))
                q, *new = project(self.spec, w, x, rotation, heads, self.spread)
                coming = self.exchange.to_heads(split, (q,), new if joint else ())
                del q, new
                (q,), new = coming.wait()
                o, lse = self.attend(q, *(new or kv))
                del q, new, coming
                (o,), _ = self.exchange.to_tokens(split, (o,)).wait()
                outputs.put(split, o)
                lses.append(lse)
        return outputs.whole, lses

    def send_keys(self, w: Weights, x: Tensor, rotation: Rotation | None, split: HeadSplit) -> Sequence[Tensor]:
        """K and V of this rank's heads, for several rounds."""
        with torch.no_grad():
            _, *kv = project(self.spec, w, x, rotation, Heads(range(0), split.kv_heads), self.spread)
        return self.exchange.to_heads(split, (), kv).wait()[1]

    def differentiable(self, w: Weights, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """x, for the residual, and o in one round, with everything that backward needs kept by autograd."""
        x, (q, k, v) = project_beside(self.spec, w, x, rotation, Heads.all(self.spec), self.spread)
        if isinstance(self.exchange, Alone):
            return x, attend(q, k, v, self.kernel, self.pieces)
        split = self.rounds[0][0]
        q, k, v = _ToHeads.apply(q, k, v, self.exchange, split)
        return x, _ToTokens.apply(attend(q, k, v, self.kernel, self.pieces), self.exchange, split)

    @owned_by(ATTENTION)
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not q.shape[1]:  # this rank has no head left in this round
            return torch.empty_like(q), q.new_empty(0, len(q), dtype=at_least_fp32(q.dtype))
        return self.kernel.forward(q, k, v, self.pieces, softmax_scale(q))

    @owned_by(ATTENTION)
    def attend_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not q.shape[1]:
            return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self.kernel.backward(do, q, k, v, o, lse, self.pieces, softmax_scale(q))


class _Outputs:
    """o of all heads, assembled from rounds; with one round, its output as it is."""

    def __init__(self, spec: Spec, x: Tensor, one_round: bool):
        self._all = None if one_round else x.new_empty(len(x), spec.heads, spec.head_size)
        self.whole = x if self._all is None else self._all

    def put(self, split: HeadSplit, o: Tensor) -> None:
        if self._all is None:
            self.whole = o
        else:
            put_heads(self._all, split, o)


class BackwardAttention:
    """Attention in a block's backward pass. It gives `o`, saved or recomputed; the caller sets `do`."""

    do: Tensor

    def __init__(self, call: Attention, w: Summed, x: Tensor, rotation: Rotation | None, kept: Sequence[Tensor]):
        self._call, self._w, self._x, self._rotation = call, w, x, rotation
        self._held: tuple[Projection, tuple[Tensor, ...]] | None = None
        self._lses: Sequence[Tensor] = ()
        if kept:
            self.o, *self._lses = kept
        elif call.one_round:
            self.o = self._hold()
        else:
            self.o, self._lses = call.forward(w, x, rotation)

    def _project(self, q: Sequence[int], kv: Sequence[int]) -> Projection:
        return Projection(self._call.spec, self._w, self._x, self._rotation, Heads(q, kv), self._call.spread)

    def _hold(self) -> Tensor:
        """Recompute the attention of one round and hold its tensors for its backward pass."""
        call, ((split,),) = self._call, self._call.rounds
        projection = self._project(split.q_heads, split.kv_heads)
        coming = call.exchange.to_heads(split, (projection.q,), projection.kv)
        projection.free_outputs()
        (q,), kv = coming.wait()
        o, lse = call.attend(q, *kv)
        self._held = projection, (q, *kv, o, lse)
        (o,), _ = call.exchange.to_tokens(split, (o,)).wait()
        return o

    def backward(self, dx: Tensor) -> None:
        """Add the gradient through the projections to dx; frees o and do."""
        lses = iter(self._lses)
        for group in self._call.rounds:
            if self._held:
                self._held_round(group[0], dx)
            elif len(group) == 1:
                self._one_round(group[0], lses, dx)
            else:
                self._rounds(group, lses, dx)

    def _held_round(self, split: HeadSplit, dx: Tensor) -> None:
        assert self._held is not None
        projection, (q, k, v, o, lse) = self._held
        coming = self._call.exchange.to_heads(split, (self.do,))
        self._held = None
        del self.o, self.do
        (do,), _ = coming.wait()
        del coming
        dq, *dkv = self._call.attend_backward(do, q, k, v, o, lse)
        del do, q, k, v, o
        self._project_backward(projection, split, dq, dkv, dx)

    def _one_round(self, split: HeadSplit, lses: Iterator[Tensor], dx: Tensor) -> None:
        projection = self._project(split.q_heads, split.kv_heads)
        coming = self._call.exchange.to_heads(split, (projection.q, *self._o_and_do(split)), projection.kv)
        projection.free_outputs()
        (q, o, do), (k, v) = coming.wait()
        del coming
        if self._call.one_round:
            del self.o, self.do
        dq, *dkv = self._call.attend_backward(do, q, k, v, o, next(lses))
        del do, q, k, v, o
        self._project_backward(projection, split, dq, dkv, dx)

    def _rounds(self, group: tuple[HeadSplit, ...], lses: Iterator[Tensor], dx: Tensor) -> None:
        """Rounds that read the same K and V."""
        exchange = self._call.exchange
        k, v = self._call.send_keys(self._w, self._x, self._rotation, group[0])
        sums: Sequence[Tensor] = ()
        for split in group:
            projection = self._project(split.q_heads, range(0))
            coming = exchange.to_heads(split, (projection.q, *self._o_and_do(split)))
            projection.free_outputs()
            (q, o, do), _ = coming.wait()
            del coming
            dq, *dkv = self._call.attend_backward(do, q, k, v, o, next(lses))
            del do, q, o
            sums = _add(sums, dkv)
            self._project_backward(projection, split, dq, (), dx)
        del dq, dkv
        # Projected once more here: keeping the first projection would hold a hidden state through all rounds
        projection, dtype = self._project(range(0), group[0].kv_heads), k.dtype
        del k, v
        projection.free_outputs()
        _, dkv = exchange.to_tokens(group[0], (), [total.to(dtype) for total in sums]).wait()
        dx += projection.backward(*dkv)

    def _project_backward(
        self, projection: Projection, split: HeadSplit, dq: Tensor, dkv: Sequence[Tensor], dx: Tensor
    ) -> None:
        (dq,), dkv = self._call.exchange.to_tokens(split, (dq,), dkv).wait()
        dx += projection.backward(dq, *dkv)

    def _o_and_do(self, split: HeadSplit) -> tuple[Tensor, Tensor]:
        """o and do with a round's heads."""
        if self._call.one_round:
            return self.o, self.do
        return take_heads(self.o, split), take_heads(self.do, split)


def _add(sums: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    if not sums:
        return [part.to(at_least_fp32(part.dtype)) for part in parts]
    return [total.add_(part) for total, part in zip(sums, parts, strict=True)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, split: HeadSplit) -> tuple[Tensor, ...]:
        ctx.call = exchange, split
        (q,), kv = exchange.to_heads(split, (q,), (k, v)).wait()
        return q, *kv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        exchange, split = ctx.call
        (dq,), dkv = exchange.to_tokens(split, (dq,), (dk, dv)).wait()
        return dq, *dkv, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, exchange: Exchange, split: HeadSplit) -> Tensor:
        ctx.call = exchange, split
        (o,), _ = exchange.to_tokens(split, (o,)).wait()
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        exchange, split = ctx.call
        (do,), _ = exchange.to_heads(split, (do,)).wait()
        return do, None, None
