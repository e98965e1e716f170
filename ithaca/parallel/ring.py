"""Between ring ranks, which hold different tokens' K and V for the same heads.

Under `sweep`, K and V stay where they were made. A chunk's queries are gathered from all ranks, each attends to the
keys that it has, and what it found goes back to the rank that the query came from:

    gather    [L, heads, D] of this rank's two runs of a chunk  ->  [R · L, heads, D], the chunk in order
    merge     (o, log-sum-exp) of the chunk on this rank's keys ->  those of its own runs on everybody's keys
    reduce    dq of the chunk by this rank's keys               ->  that of its own runs, by everybody's

Each begins at the call and travels beside the computation; what arrives is asked for by another call. Bytes depend on
the chunk, not on how many there were before it. Where blocks run over all tokens, K and V travel (`pass_on`,
`everyones`), and their gradients go home (`homeward`). One ring rank has everything.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ithaca.attention.visits import Segment, Segments
from ithaca.attention.walk import merge
from ithaca.base.precision import at_least_fp32
from ithaca.parallel.collectives import Transport, Wait
from ithaca.parallel.layout import Layout

T = TypeVar("T")


Arrive = Callable[[], T]  # what was sent is kept until then: its memory belongs to the stream of the computation


class Ring:
    def __init__(self, transport: Transport | None):
        self._transport = transport
        self.ranks, self.rank = (transport.ranks, transport.rank) if transport else (1, 0)

    def gather(self, *tensors: Tensor) -> Arrive[Sequence[Tensor]]:
        """The chunk's, of tensors with the same tokens and the same dtype."""
        if self._transport is None:
            return lambda: tensors
        widths = [tensor.shape[1] for tensor in tensors]
        everyone = self._all_gather(torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous())

        def arrive() -> Sequence[Tensor]:
            # Of each rank one run from the front of the chunk, one from the back; put in order without a third copy
            runs = everyone().unflatten(1, (2, -1))
            chunk = torch.empty_like(runs).view(-1, *runs.shape[2:])
            for rank in range(self.ranks):
                chunk[rank], chunk[-1 - rank] = runs[rank]
            return chunk.flatten(0, 1).split(widths, 1)

        return arrive

    def merge(self, o: Tensor, lse: Tensor) -> Arrive[tuple[Tensor, Tensor]]:
        """o [T, H, D], lse [H, T] of the chunk on this rank's keys -> of its own tokens on all keys."""
        if self._transport is None:
            return lambda: (o, lse)
        outputs, sums = self._scatter(o), self._scatter(lse.T)

        def arrive() -> tuple[Tensor, Tensor]:
            parts, lses = outputs(), sums().transpose(1, 2).contiguous()  # as the merge wants them
            # One's own first: it alone has seen something of every row, and what has not is -inf
            total, whole = parts[self.rank].to(at_least_fp32(parts.dtype)), lses[self.rank].clone()
            for rank in (rank for rank in range(self.ranks) if rank != self.rank):
                merge(total, whole, parts[rank], lses[rank])
            return total.to(parts.dtype), whole

        return arrive

    def reduce(self, dq: Tensor) -> Arrive[Tensor]:
        if self._transport is None:
            return lambda: dq
        parts, dtype = self._scatter(dq), dq.dtype
        return lambda: parts().sum(0, dtype=at_least_fp32(dtype)).to(dtype)

    def send_recv(self, kv: Tensor) -> Arrive[Tensor]:
        """Send K and V, or their gradients, [2, …] to the next rank; from the one before come its."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sizes = [[kv.numel() * (rank == peer) for rank in range(self.ranks)] for peer in (before, after)]
        return self._all_to_all(kv, *sizes)

    def all_gather(self, kv: Tensor) -> Tensor:
        """[R, 2, …]: K and V of all ranks."""
        return self._all_gather(kv)()

    def homeward(self, at_once: bool) -> "Homeward":
        """For the gradients of everybody's K and V, a block after the other."""
        return _AllAtOnce(self) if at_once else _Travelling(self)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """[R, …]: a part for each rank -> the sum of those for this one."""
        assert self._transport is not None
        total = torch.empty_like(parts[0])
        self._transport.reduce_scatter(total.view(-1), parts.view(-1))()
        return total

    def _scatter(self, chunk: Tensor) -> Arrive[Tensor]:
        """[R, L, …]: what each rank has for this rank's tokens."""
        runs = chunk.unflatten(0, (2 * self.ranks, -1))
        parts = chunk.new_empty(self.ranks, 2, *runs.shape[1:])
        for rank in range(self.ranks):
            parts[rank, 0], parts[rank, 1] = runs[rank], runs[-1 - rank]
        sizes = [parts[0].numel()] * self.ranks
        coming = self._all_to_all(parts, sizes, sizes)
        return lambda: coming().flatten(1, 2)

    def _all_to_all(self, sent: Tensor, here_sizes: list[int], sent_sizes: list[int]) -> Arrive[Tensor]:
        assert self._transport is not None
        here = torch.empty_like(sent)
        return _arriving(here, sent, self._transport.all_to_all(here.view(-1), sent.view(-1), here_sizes, sent_sizes))

    def _all_gather(self, sent: Tensor) -> Arrive[Tensor]:
        assert self._transport is not None
        here = sent.new_empty(self.ranks, *sent.shape)
        return _arriving(here, sent, self._transport.all_gather(here.view(-1), sent.view(-1)))


def _arriving(here: Tensor, sent: Tensor, wait: Wait) -> Arrive[Tensor]:
    kept = [sent]

    def arrive() -> Tensor:
        wait()
        kept.clear()
        return here

    return arrive


def ring_runs(layout: Layout, rank: int) -> Segments:
    """The keys of each tile on a ring rank."""

    def runs(tile: int) -> list[Segment]:
        return [Segment(at * len(span), span) for at, span in enumerate(layout.spans(rank, tile))]

    return runs


class Homeward(Protocol):
    """Sums of the gradients of K and V, [2, …] in at least fp32; owners come in the order of the ring."""

    def begin(self, owner: int, kv: Tensor) -> Tensor:
        """Zeros, to which this rank adds what its queries give to the gradients of a rank's K and V."""
        ...

    def end(self) -> None:
        """That has been done."""
        ...

    def wait(self) -> Tensor:
        """The sums over all ranks for one's own."""
        ...


class _Travelling:
    """The sums of a block go with it, one step behind."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._mine: Tensor | None = None
        self._coming: Arrive[Tensor] | None = None

    def begin(self, owner: int, kv: Tensor) -> Tensor:  # noqa: ARG002
        self._mine = torch.zeros_like(kv, dtype=at_least_fp32(kv.dtype))
        return self._mine

    def end(self) -> None:
        assert self._mine is not None
        if self._coming is not None:
            self._mine += self._coming()
        self._coming, self._mine = self._ring.send_recv(self._mine), None

    def wait(self) -> Tensor:
        assert self._coming is not None
        return self._coming()


class _AllAtOnce:
    """All blocks' wait here, and are scattered together."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._parts: Tensor | None = None

    def begin(self, owner: int, kv: Tensor) -> Tensor:
        if self._parts is None:
            self._parts = kv.new_zeros(self._ring.ranks, *kv.shape, dtype=at_least_fp32(kv.dtype))
        return self._parts[owner]

    def end(self) -> None: ...

    def wait(self) -> Tensor:
        assert self._parts is not None
        return self._ring.reduce_scatter(self._parts)
