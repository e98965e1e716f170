"""Exchanges between ring ranks, which hold the K and V of different tokens for the same heads.

Under `sweep`, K and V stay on the rank that computed them. The queries of a chunk are gathered from all ring ranks,
each rank attends with them to the keys that it holds, and its result returns to the rank that the query came from:

    gather    q of this rank's two runs of a chunk [L, H, D]           ->  q of the chunk in order [R · L, H, D]
    merge     (o, log-sum-exp) of the chunk on this rank's keys        ->  of this rank's own queries on all keys
    reduce    dq of the chunk from this rank's keys                    ->  of this rank's own queries, from all keys

The bytes depend on the chunk alone, not on the chunks before it. Where blocks run over all tokens, K and V move instead
(`send_recv`, `all_gather`), and the sums of their gradients return to the ranks that own them (`kv_gradient_sums`).
Every call returns a handle and overlaps with the computation until its `wait()`. A ring of one rank sends nothing, and
neither does one whose ranks have no heads in a head round: all of them have the same heads.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ithaca.attention.merge import merge
from ithaca.attention.visits import Segment, Segments
from ithaca.base.owners import EXCHANGE, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.parallel.collectives import Group, Pending
from ithaca.parallel.layout import Layout


class Ring:
    """The ring ranks of this rank's sequence; `group` is None for a ring of one."""

    def __init__(self, group: Group | None):
        self._group = group
        self.ranks, self.rank = (group.ranks, group.rank) if group else (1, 0)

    @owned_by(EXCHANGE)
    def gather(self, *tensors: Tensor) -> Pending[Sequence[Tensor]]:
        """The chunk's tensors in the order of its tokens; all given ones have the same tokens and dtype."""
        if self._group is None or not tensors[0].shape[1]:
            return Pending(lambda: tensors)
        widths = [tensor.shape[1] for tensor in tensors]

        def in_order(parts_RLHD: Tensor) -> Sequence[Tensor]:
            # Each rank has one run from the front of the chunk and one from the back
            runs = parts_RLHD.unflatten(1, (2, -1))
            chunk = torch.empty_like(runs).view(-1, *runs.shape[2:])
            for rank in range(self.ranks):
                chunk[rank], chunk[-1 - rank] = runs[rank]
            return chunk.flatten(0, 1).split(widths, 1)

        return self.all_gather(torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous()).then(in_order)

    @owned_by(EXCHANGE)
    def merge(self, o: Tensor, lse: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """o [T, H, D] and lse [H, T] of the chunk on this rank's keys -> of its own tokens on all keys."""
        if self._group is None or not o.shape[1]:
            return Pending(lambda: (o, lse))
        outputs, sums = self._scatter(o), self._scatter(lse.T)

        def merged() -> tuple[Tensor, Tensor]:
            parts, lses = outputs.wait(), sums.wait().transpose(1, 2).contiguous()
            # This rank's part comes first: it alone has a key for every row. A row without any key has lse -inf
            total, whole = parts[self.rank].to(at_least_fp32(parts.dtype)), lses[self.rank].clone()
            for rank in (rank for rank in range(self.ranks) if rank != self.rank):
                merge(total, whole, parts[rank], lses[rank])
            return total.to(parts.dtype), whole

        return Pending(merged)

    @owned_by(EXCHANGE)
    def reduce(self, dq: Tensor) -> Pending[Tensor]:
        """dq of the chunk from this rank's keys -> of its own tokens, from all keys, summed in at least fp32."""
        if self._group is None or not dq.shape[1]:
            return Pending(lambda: dq)
        dtype = dq.dtype
        return self._scatter(dq).then(lambda parts: parts.sum(0, dtype=at_least_fp32(dtype)).to(dtype))

    @owned_by(EXCHANGE)
    def send_recv(self, kv: Tensor) -> Pending[Tensor]:
        """Send K and V, or their gradients, [2, …] to the next rank and receive those of the rank before."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sizes = [[kv.numel() * (rank == peer) for rank in range(self.ranks)] for peer in (before, after)]
        return self._all_to_all(kv, *sizes)

    @owned_by(EXCHANGE)
    def all_gather(self, sent: Tensor) -> Pending[Tensor]:
        """[R, …]: the tensors of all ranks."""
        assert self._group is not None
        here = sent.new_empty(self.ranks, *sent.shape)
        return self._group.all_gather(here.view(-1), sent.view(-1)).then(lambda _: here)

    @owned_by(EXCHANGE)
    def reduce_scatter(self, parts: Tensor) -> Pending[Tensor]:
        """[R, …], a part for each rank -> the sum of all ranks' parts for this one."""
        assert self._group is not None
        total = torch.empty_like(parts[0])
        return self._group.reduce_scatter(total.view(-1), parts.view(-1)).then(lambda _: total)

    def kv_gradient_sums(self, at_once: bool) -> "KVGradientSums":
        """Where the gradients of all ranks' K and V are summed, one rank's block after the other."""
        return _SumsAtOnce(self) if at_once else _TravellingSums(self)

    def _scatter(self, chunk: Tensor) -> Pending[Tensor]:
        """[R, L, …]: what each rank computed for this rank's tokens."""
        runs = chunk.unflatten(0, (2 * self.ranks, -1))
        parts = chunk.new_empty(self.ranks, 2, *runs.shape[1:])
        for rank in range(self.ranks):
            parts[rank, 0], parts[rank, 1] = runs[rank], runs[-1 - rank]
        sizes = [parts[0].numel()] * self.ranks
        return self._all_to_all(parts, sizes, sizes).then(lambda here: here.flatten(1, 2))

    def _all_to_all(self, sent: Tensor, here_sizes: list[int], sent_sizes: list[int]) -> Pending[Tensor]:
        assert self._group is not None
        here = torch.empty_like(sent)
        return self._group.all_to_all(here.view(-1), sent.view(-1), here_sizes, sent_sizes).then(lambda _: here)


def ring_runs(layout: Layout, rank: int) -> Segments:
    """The keys of each tile on a ring rank."""

    def runs(tile: int) -> list[Segment]:
        return [Segment(at * len(span), span) for at, span in enumerate(layout.spans(rank, tile))]

    return runs


class KVGradientSums(Protocol):
    """Sums of the gradients of K and V, [2, …] in at least fp32; blocks come in the order of the ring."""

    def begin(self, owner: int, kv: Tensor) -> Tensor:
        """Zeros, to which this rank adds the gradients that its queries give to the K and V of rank `owner`."""
        ...

    def end(self) -> None:
        """End the block that `begin` began."""
        ...

    def wait(self) -> Tensor:
        """The sums over all ranks for this rank's own K and V."""
        ...


class _TravellingSums:
    """The sums of a block travel around the ring with it, one step behind."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._mine: Tensor | None = None
        self._coming: Pending[Tensor] | None = None

    def begin(self, owner: int, kv: Tensor) -> Tensor:  # noqa: ARG002
        self._mine = torch.zeros_like(kv, dtype=at_least_fp32(kv.dtype))
        return self._mine

    def end(self) -> None:
        assert self._mine is not None
        if self._coming is not None:
            self._mine += self._coming.wait()
        self._coming, self._mine = self._ring.send_recv(self._mine), None

    def wait(self) -> Tensor:
        assert self._coming is not None
        return self._coming.wait()


class _SumsAtOnce:
    """The sums of all blocks are held here and scattered together."""

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
        return self._ring.reduce_scatter(self._parts).wait()
