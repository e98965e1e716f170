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

from ithaca.attention.visits import Run, Runs
from ithaca.attention.walk import merge
from ithaca.model.precision import at_least_fp32
from ithaca.parallel.layout import Layout
from ithaca.parallel.transport import Transport, Wait

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
        everyone = self._everyones(torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous())

        def arrive() -> Sequence[Tensor]:
            runs = everyone().unflatten(1, (2, -1))  # of each rank: one from the front of the chunk, one from the back
            return torch.cat((runs[:, 0], runs[:, 1].flip(0))).flatten(0, 1).split(widths, 1)

        return arrive

    def merge(self, o: Tensor, lse: Tensor) -> Arrive[tuple[Tensor, Tensor]]:
        """o [T, H, D], lse [H, T] of the chunk on this rank's keys -> of its own tokens on all keys."""
        if self._transport is None:
            return lambda: (o, lse)
        outputs, sums = self._scatter(o), self._scatter(lse.T)

        def arrive() -> tuple[Tensor, Tensor]:
            parts, lses = outputs(), sums().transpose(1, 2).contiguous()  # as the merge wants them
            # One's own first: it alone has seen something of every row, and what has not is -inf
            total, whole = parts[self.rank].to(at_least_fp32(parts.dtype)), lses[self.rank]
            for rank in (rank for rank in range(self.ranks) if rank != self.rank):
                merge(total, whole, parts[rank], lses[rank])
            return total.to(parts.dtype), whole

        return arrive

    def reduce(self, dq: Tensor) -> Arrive[Tensor]:
        if self._transport is None:
            return lambda: dq
        parts, dtype = self._scatter(dq), dq.dtype
        return lambda: parts().sum(0, dtype=at_least_fp32(dtype)).to(dtype)

    def pass_on(self, k: Tensor, v: Tensor) -> Arrive[tuple[Tensor, Tensor]]:
        """Send K and V, or their gradients, to the next rank; from the one before come its."""
        sent = torch.stack((k, v))
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sizes = [[sent.numel() * (rank == peer) for rank in range(self.ranks)] for peer in (before, after)]
        coming = self._swap(sent, *sizes)

        def arrive() -> tuple[Tensor, Tensor]:
            k, v = coming()
            return k, v

        return arrive

    def everyones(self, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V of all ranks."""
        return [(part[0], part[1]) for part in self._everyones(torch.stack((k, v)))()]

    def homeward(self, at_once: bool) -> "Homeward":
        """For the gradients of everybody's K and V, a block after the other."""
        return _AllAtOnce(self) if at_once else _Travelling(self)

    def swap(self, parts: Tensor) -> Arrive[Tensor]:
        """[R, …]: a part for each rank -> a part from each."""
        sizes = [parts[0].numel()] * self.ranks
        return self._swap(parts, sizes, sizes)

    def _scatter(self, chunk: Tensor) -> Arrive[Tensor]:
        """[R, L, …]: what each rank has for this rank's tokens."""
        runs = chunk.unflatten(0, (2 * self.ranks, -1))
        coming = self.swap(torch.stack((runs[: self.ranks], runs[self.ranks :].flip(0)), 1).contiguous())
        return lambda: coming().flatten(1, 2)

    def _swap(self, sent: Tensor, here_sizes: list[int], sent_sizes: list[int]) -> Arrive[Tensor]:
        assert self._transport is not None
        here = torch.empty_like(sent)
        return _arriving(here, sent, self._transport.swap(here.view(-1), sent.view(-1), here_sizes, sent_sizes))

    def _everyones(self, sent: Tensor) -> Arrive[Tensor]:
        assert self._transport is not None
        here = sent.new_empty(self.ranks, *sent.shape)
        return _arriving(here, sent, self._transport.gather(here.view(-1), sent.view(-1)))


def _arriving(here: Tensor, sent: Tensor, wait: Wait) -> Arrive[Tensor]:
    kept = [sent]

    def arrive() -> Tensor:
        wait()
        kept.clear()
        return here

    return arrive


def ring_runs(layout: Layout, rank: int) -> Runs:
    """The keys of each tile on a ring rank."""

    def runs(tile: int) -> list[Run]:
        return [Run(at * len(span), span) for at, span in enumerate(layout.spans(rank, tile))]

    return runs


class Homeward(Protocol):
    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:
        """What this rank's queries give to the gradients of a rank's K and V; owners come in the order of the ring."""
        ...

    def arrived(self) -> tuple[Tensor, Tensor]:
        """The sums over all ranks for one's own."""
        ...


class _Travelling:
    """The sums of a block go with it, one step behind."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._coming: Arrive[tuple[Tensor, Tensor]] | None = None

    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002
        if self._coming is not None:
            for total, part in zip((dk, dv), self._coming(), strict=True):
                total += part
        self._coming = self._ring.pass_on(dk, dv)

    def arrived(self) -> tuple[Tensor, Tensor]:
        assert self._coming is not None
        return self._coming()


class _AllAtOnce:
    """All blocks' wait here, and are scattered together."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._parts: dict[int, Tensor] = {}

    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:
        self._parts[owner] = torch.stack((dk, dv))

    def arrived(self) -> tuple[Tensor, Tensor]:
        total = self._ring.swap(torch.stack([self._parts[rank] for rank in range(self._ring.ranks)]))().sum(0)
        return total[0], total[1]
