"""Attention as a walk over tiles: a query tile visits the key/value tiles that its tokens may see.

    forward    each visit gives (o, lse) of the query rows on those keys; they are merged in at least fp32
    backward   the same visits; dq is summed over them, dk and dv are added to sums that belong to the key tiles

Tokens see earlier tokens of their own document, so a query tile sees
    its own tile         causally, one triangle for each document in it
    an earlier tile      through the one document that reaches across the border, if it began early enough: a full
                         rectangle of the document's rows in the query tile and of its keys in the other
Whatever no document reaches is not visited and costs nothing. Visited are the own tile first (every row sees itself,
so all rows have begun), then the earlier ones, the nearest first.

Memory: o and dq of one query tile in fp32, and whatever the kernel takes for one pair of tiles.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ithaca.attention.attend import softmax_scale
from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.model.precision import at_least_fp32, fusable
from ithaca.tape.tiles import Tiles


@dataclass(frozen=True)
class Visit:
    """Some rows of a query tile see some keys of a key tile, as the pieces say; offsets are within the tiles."""

    tile: int
    rows: slice
    keys: slice
    pieces: Pieces


class KeyTiles(Protocol):
    """Where the walk finds earlier keys and values."""

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        """k and v of a tile; `following` is read next."""
        ...

    def release(self, index: int) -> None: ...


@dataclass(frozen=True)
class Walk:
    kernel: Kernel
    tiles: Tiles
    bounds: tuple[int, ...]  # of the documents

    def visits(self, index: int) -> list[Visit]:
        """What query tile `index` visits, in order."""
        rows = self.tiles.rows(index)
        first = bisect_right(self.bounds, rows.start) - 1  # the document of the tile's first token
        last = bisect_right(self.bounds, rows.stop - 1) - 1
        inner = self.bounds[first + 1 : last + 1]
        own = tuple(bound - rows.start for bound in (rows.start, *inner, rows.stop))
        whole = slice(0, rows.stop - rows.start)
        visits = [Visit(index, whole, whole, Pieces.documents(own))]
        start, stop = self.bounds[first], self.bounds[first + 1]
        reach = slice(0, min(stop, rows.stop) - rows.start)
        oldest = self.tiles.holding(start)
        for tile in range(index - 1, oldest - 1, -1):
            other = self.tiles.rows(tile)
            keys = slice(max(start - other.start, 0), other.stop - other.start)
            ragged = reach != whole or keys.start > 0
            pieces = Pieces.rectangle(reach.stop, keys.stop - keys.start, ragged)
            visits.append(Visit(tile, reach, keys, pieces))
        return visits

    def forward(self, index: int, q: Tensor, k: Tensor, v: Tensor, earlier: KeyTiles) -> tuple[Tensor, Tensor]:
        """(o, lse) of a query tile; k and v are those of its own tile."""
        own, *others = self.visits(index)
        scale = softmax_scale(q)
        o, lse = self.kernel.forward(q, k, v, own.pieces, scale)
        if not others:
            return o, lse
        o_sum, lse = o.to(at_least_fp32(o.dtype)), lse.contiguous()
        for visit, following in _with_following(others):
            k, v = earlier.read(visit.tile, following)
            part = self.kernel.forward(q[visit.rows], k[visit.keys], v[visit.keys], visit.pieces, scale)
            earlier.release(visit.tile)
            merge(o_sum[visit.rows], lse[:, visit.rows], *part)
        return o_sum.to(o.dtype), lse

    def backward(
        self,
        index: int,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        earlier: KeyTiles,
        add: Callable[[int, slice, Tensor, Tensor], None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of a query tile and its own keys; `add(tile, keys, dk, dv)` gets those of earlier keys."""
        own, *others = self.visits(index)
        scale = softmax_scale(q)
        dq, dk, dv = self.kernel.backward(do, q, k, v, o, lse, own.pieces, scale)
        if not others:
            return dq, dk, dv
        dq_sum = dq.to(at_least_fp32(dq.dtype))
        for visit, following in _with_following(others):
            rows, keys = visit.rows, visit.keys
            k, v = earlier.read(visit.tile, following)
            dq_part, dk_part, dv_part = self.kernel.backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], visit.pieces, scale
            )
            earlier.release(visit.tile)
            dq_sum[rows] += dq_part
            add(visit.tile, keys, dk_part, dv_part)
        return dq_sum.to(dq.dtype), dk, dv


def merge(o_sum: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Join attention over some keys, o [T, H, D] and lse [H, T], with that over others, in place."""
    if fusable(o_sum):
        from ithaca.attention import fused

        return fused.merge(o_sum, lse, o_part, lse_part)
    total = torch.logaddexp(lse, lse_part)
    keep, take = ((part - total).exp_().T[..., None] for part in (lse, lse_part))
    o_sum.mul_(keep).addcmul_(o_part, take)
    lse.copy_(total)
    return None


def _with_following(visits: list[Visit]) -> list[tuple[Visit, int | None]]:
    following = [visit.tile for visit in visits[1:]]
    return list(zip(visits, [*following, None], strict=True))
