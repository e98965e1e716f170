"""Attention as a walk over tiles: a query tile visits the key/value tiles that its tokens see (visits.py).

    forward    each visit gives (o, lse) of some query rows on some keys; they are merged in at least fp32
    backward   the same visits; dq is summed over them, dk and dv are added to the sums of the key tiles

A tile without heads walks too: it reads and releases the same key/value tiles, and calls no kernel.

Memory: o or dq of one query tile in fp32, and the memory of the kernel for one visit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.attention.merge import merge
from ithaca.attention.visits import Segments, TileVisits, Visit, plan_visits
from ithaca.base.owners import ATTENTION, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles


class KVSource(Protocol):
    """Where the walk reads K and V."""

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        """k and v of a tile; `following` is the tile that is read next."""
        ...

    def release(self, index: int) -> None: ...


@dataclass(frozen=True)
class Walk:
    """Attention of query tiles to key/value tiles, by one kernel."""

    kernel: Kernel
    tiles: Tiles
    bounds: tuple[int, ...]  # offsets of the documents
    runs: Segments | None = None  # the keys that a key tile holds; None: those of the query tile with the same number

    ends: int | None = None  # a rehearsal of memory makes this many visits at either end of a walk; None: all are made

    def visits(self, index: int) -> list[TileVisits]:
        visits = plan_visits(self.tiles, self.bounds, index, self.runs)
        if self.ends is None or len(visits) <= 2 * self.ends:
            return visits
        return visits[: self.ends] + visits[-self.ends :]

    @owned_by(ATTENTION)
    def forward(self, index: int, q: Tensor, keys: KVSource) -> tuple[Tensor, Tensor]:
        """(o, lse) of a query tile; a row that sees no key has zeros and -inf."""
        high = at_least_fp32(q.dtype)
        o: Tensor | None = None
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=high)
        visits = self.visits(index)
        for here, following in _with_following(visits):
            k, v = keys.read(here.tile, following)
            for visit in here.visits if q.shape[1] else ():
                part = self.kernel.forward(*_slices(visit, q, k, v), visit.pieces, softmax_scale(q))
                if o is None and part[0].shape == q.shape:
                    o, lse = part
                    continue
                if o is None:
                    o = torch.zeros_like(q, dtype=high)
                # Converted only now: most tiles of packed documents need one visit and no merge
                o, lse = o.to(high), lse.contiguous()
                merge(o[visit.rows], lse[:, visit.rows], *part)
            keys.release(here.tile)
        if o is None:
            assert not q.shape[1]
            return torch.empty_like(q), lse
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
        """dq of a query tile; `add(tile, keys, dk, dv)` receives its share of the gradients of keys and values."""
        high = at_least_fp32(q.dtype)
        dq: Tensor | None = None
        for here, following in _with_following(self.visits(index)):
            k, v = keys.read(here.tile, following)
            for visit in here.visits if q.shape[1] else ():
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
        if dq is None:
            assert not q.shape[1]
            return torch.empty_like(q)
        return dq.to(q.dtype)


def _slices(visit: Visit, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[visit.rows], k[visit.keys], v[visit.keys]


def _with_following(visits: list[TileVisits]) -> list[tuple[TileVisits, int | None]]:
    following = [visit.tile for visit in visits[1:]]
    return list(zip_longest(visits, following))
