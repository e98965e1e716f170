"""Attention as a walk over tiles: a query tile visits the key/value tiles that its tokens may see (visits.py).

    forward    each visit gives (o, lse) of some query rows on some keys; they are merged in at least fp32
    backward   the same visits; dq is summed over them, dk and dv are added to sums that belong to the key tiles

Memory: o and dq of one query tile in fp32, and whatever the kernel takes for one visit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.attention.visits import Segments, TileVisits, Visit, plan_visits
from ithaca.base.owners import ATTENTION, owned_by
from ithaca.base.precision import at_least_fp32, fusable
from ithaca.base.tiles import Tiles


class KVSource(Protocol):
    """Where the walk finds keys and values."""

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        """k and v of a tile; `following` is read next."""
        ...

    def release(self, index: int) -> None: ...


@dataclass(frozen=True)
class Walk:
    kernel: Kernel
    tiles: Tiles
    bounds: tuple[int, ...]  # of the documents
    runs: Segments | None = None  # which keys a key tile holds; None: those of the query tile with the same number

    ends: int | None = None  # a rehearsal of memory makes so many visits at either end of a walk; None: all are made

    def visits(self, index: int) -> list[TileVisits]:
        visits = plan_visits(self.tiles, self.bounds, index, self.kernel.bucket, self.runs)
        if self.ends is None or len(visits) <= 2 * self.ends:
            return visits
        return visits[: self.ends] + visits[-self.ends :]

    @owned_by(ATTENTION)
    def forward(self, index: int, q: Tensor, keys: KVSource) -> tuple[Tensor, Tensor]:
        """(o, lse) of a query tile; of a row that sees no key here, zeros and -inf."""
        high = at_least_fp32(q.dtype)
        o: Tensor | None = None
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=high)
        visits = self.visits(index)
        for here, following in _with_following(visits):
            k, v = keys.read(here.tile, following)
            for visit in here.visits:
                part = self.kernel.forward(*_slices(visit, q, k, v), visit.pieces, softmax_scale(q))
                if o is None and part[0].shape == q.shape:
                    o, lse = part
                    continue
                if o is None:
                    o = torch.zeros_like(q, dtype=high)
                # Only now, and once: most tiles of packed documents are done after one visit
                o, lse = o.to(high), lse.contiguous()
                merge(o[visit.rows], lse[:, visit.rows], *part)
            keys.release(here.tile)
        assert o is not None
        return o.to(q.dtype), lse

    @owned_by(ATTENTION)
    def backward(
        self,
        index: int,
        do: Tensor,
        q: Tensor,
        o: Tensor,
        lse: Tensor,
        keys: KVSource,
        add: Callable[[int, slice, Tensor, Tensor], None],
    ) -> Tensor:
        """dq of a query tile; `add(tile, keys, dk, dv)` gets what it gives to the gradients of keys and values."""
        high = at_least_fp32(q.dtype)
        dq: Tensor | None = None
        for here, following in _with_following(self.visits(index)):
            k, v = keys.read(here.tile, following)
            for visit in here.visits:
                rows = visit.rows
                dq_part, dk, dv = self.kernel.backward(
                    do[rows], *_slices(visit, q, k, v), o[rows], lse[:, rows], visit.pieces, softmax_scale(q)
                )
                add(here.tile, visit.keys, dk, dv)
                if dq is None and dq_part.shape == q.shape:
                    dq = dq_part
                    continue
                dq = torch.zeros_like(q, dtype=high) if dq is None else dq.to(high)
                dq[rows] += dq_part
            keys.release(here.tile)
        assert dq is not None
        return dq.to(q.dtype)


def merge(o_sum: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Join attention over some keys, o [T, H, D] and lse [H, T], with that over others, in place.

    Rows that have seen nothing yet have lse = -inf.
    """
    if fusable(o_sum):
        from ithaca.attention import triton_merge as fused

        fused.merge(o_sum, lse, o_part, lse_part)
        return
    total = torch.logaddexp(lse, lse_part)
    keep, take = ((part - total).exp_().T[..., None] for part in (lse, lse_part))
    o_sum.mul_(keep).addcmul_(o_part, take)
    lse.copy_(total)


def _slices(visit: Visit, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[visit.rows], k[visit.keys], v[visit.keys]


def _with_following(visits: list[TileVisits]) -> list[tuple[TileVisits, int | None]]:
    following = [visit.tile for visit in visits[1:]]
    return list(zip_longest(visits, following))
