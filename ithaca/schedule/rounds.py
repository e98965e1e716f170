"""Attention of all local tokens over the Ulysses ranks, in rounds of heads.

A round takes a few query heads of every rank: their rows of the projection, by head index, to the ranks that attend
with them, and their outputs back to their places among all heads. K and V go with the first round that reads them and
stay for the others. One round is Ulysses as it was published (`ulysses`, `alst`); more of them (`untied`) need less
memory: of q, and of what attention makes of it, only a round's heads exist at a time.

Backward, where o and the log-sum-exp are there: each round is projected and exchanged again, with o and its gradient,
and dK and dV are summed over the rounds that read them, in at least fp32, before they travel back with the last. Where
they are not, attention runs again first; if it is one round, its tensors are kept in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.attend import attend, softmax_scale
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.model.block import Heads, Weights, project
from ithaca.model.linear import Summed
from ithaca.model.precision import at_least_fp32
from ithaca.model.rope import Turn
from ithaca.model.spec import Spec
from ithaca.parallel.exchange import Exchange
from ithaca.parallel.heads import Rounds, Share
from ithaca.schedule.halves import Projection


@dataclass(frozen=True)
class Attention:
    """What a block's attention needs to know beside its weights and its input."""

    spec: Spec
    kernel: Kernel
    pieces: Pieces  # of the whole sequence
    exchange: Exchange
    rounds: Rounds

    @property
    def one_round(self) -> bool:
        return len(self.rounds) == 1 and len(self.rounds[0]) == 1

    def forward(self, w: Weights, x: Tensor, turn: Turn | None) -> tuple[Tensor, list[Tensor]]:
        """o of the local tokens, all heads; and each round's log-sum-exp of all tokens, this rank's heads."""
        outputs, lses = _Outputs(self.spec, x, self.one_round), []
        for group in self.rounds:
            kv: Sequence[Tensor] = ()
            for share in group:
                fresh = share.kv_heads if share is group[0] else range(0)
                q, *new = project(self.spec, w, x, turn, Heads(share.q_heads, fresh))
                (q,), new = self.exchange.to_heads(share, (q,), new if fresh else ()).arrived()
                kv = new or kv
                o, lse = self.attend(q, *kv)
                del q
                (o,), _ = self.exchange.to_tokens(share, (o,)).arrived()
                outputs.put(share, o)
                lses.append(lse)
        return outputs.whole, lses

    def differentiable(self, w: Weights, x: Tensor, turn: Turn | None) -> Tensor:
        """o, with everything kept for its backward pass by autograd; in one round."""
        q, k, v = project(self.spec, w, x, turn, Heads.all(self.spec))
        if self.exchange.ranks == 1:
            return attend(q, k, v, self.kernel, self.pieces)
        share = self.rounds[0][0]
        q, k, v = _ToHeads.apply(q, k, v, self.exchange, share)
        return _ToTokens.apply(attend(q, k, v, self.kernel, self.pieces), self.exchange, share)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not q.shape[1]:  # a rank with fewer heads than others
            return torch.empty_like(q), q.new_empty(0, len(q), dtype=at_least_fp32(q.dtype))
        return self.kernel.forward(q, k, v, self.pieces, softmax_scale(q))

    def attend_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not q.shape[1]:
            return torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self.kernel.backward(do, q, k, v, o, lse, self.pieces, softmax_scale(q))


class _Outputs:
    """o of all heads, put together from rounds; one round's is taken as it is."""

    def __init__(self, spec: Spec, x: Tensor, one_round: bool):
        self._all = None if one_round else x.new_empty(len(x), spec.heads, spec.head_size)
        self.whole = x if self._all is None else self._all

    def put(self, share: Share, o: Tensor) -> None:
        if self._all is None:
            self.whole = o
        else:
            self._all[:, share.q_heads] = o


class AttentionAgain:
    """The same attention in a block's backward pass: `o`, kept or made again, and then its gradients."""

    def __init__(self, call: Attention, w: Summed, x: Tensor, turn: Turn | None, kept: Sequence[Tensor]):
        self._call, self._w, self._x, self._turn = call, w, x, turn
        self._held: tuple[Projection, tuple[Tensor, ...]] | None = None
        self._lses: Sequence[Tensor] = ()
        if kept:
            self.o, *self._lses = kept
        elif call.one_round:
            self.o = self._hold()
        else:
            self.o, self._lses = call.forward(w, x, turn)

    def _project(self, q: Sequence[int], kv: Sequence[int]) -> Projection:
        return Projection(self._call.spec, self._w, self._x, self._turn, Heads(q, kv))

    def _hold(self) -> Tensor:
        """Attention again, of one round, whose tensors stay for its backward pass."""
        call, ((share,),) = self._call, self._call.rounds
        projection = self._project(share.q_heads, share.kv_heads)
        (q,), kv = call.exchange.to_heads(share, (projection.q,), projection.kv).arrived()
        projection.let_go()
        o, lse = call.attend(q, *kv)
        self._held = projection, (q, *kv, o, lse)
        (o,), _ = call.exchange.to_tokens(share, (o,)).arrived()
        return o

    def backward(self, do: Tensor) -> Tensor:
        """dx of the projections."""
        dx: Tensor | None = None
        lses = iter(self._lses)
        for group in self._call.rounds:
            for part in self._group_backward(group, do, lses):
                dx = part if dx is None else dx.add_(part)
        assert dx is not None
        return dx

    def _group_backward(self, group: tuple[Share, ...], do: Tensor, lses: Iterator[Tensor]) -> Iterator[Tensor]:
        """Parts of dx, from rounds that read the same K and V."""
        exchange, kv, sums = self._call.exchange, (), ()
        keys = None if len(group) == 1 else self._project(range(0), group[0].kv_heads)  # they go back with the last
        for share in group:
            first, last = share is group[0], share is group[-1]
            if self._held:
                queries, (q, *kv, o, lse) = self._held
                self._held = None
                (do_heads,), _ = exchange.to_heads(share, (do,)).arrived()
            else:
                queries = self._project(share.q_heads, range(0) if keys else share.kv_heads)
                mine = (self._of(share, tensor) for tensor in (do, self.o))
                coming = exchange.to_heads(share, (queries.q, *mine), (keys or queries).kv if first else ())
                queries.let_go()
                (q, do_heads, o), new = coming.arrived()
                kv, lse = new or kv, next(lses)
            dq, *dkv = self._call.attend_backward(do_heads, q, *kv, o=o, lse=lse)
            del q, o, do_heads
            sums = _add(sums, dkv) if keys else dkv
            coming = exchange.to_tokens(share, (dq,), [total.to(dq.dtype) for total in sums] if last else ())
            del dq
            (dq,), dkv = coming.arrived()
            yield queries.backward(dq, *(() if keys else dkv))
            if keys and last:
                yield keys.backward(*dkv)

    def _of(self, share: Share, tensor: Tensor) -> Tensor:
        """Some heads of a tensor of all."""
        return tensor if self._call.one_round else tensor[:, share.q_heads]


def _add(sums: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    if not sums:
        return [part.to(at_least_fp32(part.dtype)) for part in parts]
    return [total.add_(part) for total, part in zip(sums, parts, strict=True)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, share: Share) -> tuple[Tensor, ...]:
        ctx.call = exchange, share
        (q,), kv = exchange.to_heads(share, (q,), (k, v)).arrived()
        return q, *kv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        exchange, share = ctx.call
        (dq,), dkv = exchange.to_tokens(share, (dq,), (dk, dv)).arrived()
        return dq, *dkv, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, exchange: Exchange, share: Share) -> Tensor:
        ctx.call = exchange, share
        (o,), _ = exchange.to_tokens(share, (o,)).arrived()
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        exchange, share = ctx.call
        (do,), _ = exchange.to_heads(share, (do,)).arrived()
        return do, None, None
