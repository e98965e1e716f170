"""K and V of every layer, kept for new tokens that continue some prompts.

A rank keeps K and V of its own tokens with all key/value heads, on one tape for each layer. A new token is computed by
every context rank; each attends to the tokens that it holds, tile by tile, and the results are merged by their
log-sum-exps, in the order of the ranks. So this is the same under every recipe and head split, and no K or V is held
twice. K and V of new tokens are few: every context rank has all of them, in device memory.

decode_cost.py says how much memory the cache takes and where it lives. Ranks send o and the log-sum-exp of the new
tokens, for each layer.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.attention.merge import merge
from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.model.block import Weights, project
from ithaca.model.rotary import Rotary
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.batch import Batch
from ithaca.parallel.layout import Layout
from ithaca.schedule.sweep.call import Rotations
from ithaca.schedule.tapes import Pass
from ithaca.tape.tape import Tape

Visits = list[tuple[slice, slice]]  # rows of new tokens, and the keys of a tile that they see


class KVCache:
    """K and V of some prompts, each one row of a batch, and of their new tokens."""

    def __init__(
        self,
        spec: Spec,
        kernel: Kernel,
        rotary: Rotary,
        batch: Batch,
        row_tokens: int,
        tapes: list[Tape],
        dtype: torch.dtype,
        rank: int,
        group: dist.ProcessGroup | None,
    ):
        """`row_tokens`: tokens of each row. `rank` and `group`: of the context ranks; a group of one is None."""
        self.spec, self._kernel, self._tapes, self._dtype, self._group = spec, kernel, tapes, dtype, group
        self.device = batch.tokens.device
        self._rotations = Rotations(rotary, batch.positions, tapes[0].tiles)
        ends = range(row_tokens, batch.layout.tokens + 1, row_tokens)
        # A row is continued from its last token, which is computed again: its own K and V are the first new ones
        lasts = [end - 1 for end in ends]
        starts = [batch.bounds[bisect_right(batch.bounds, last) - 1] for last in lasts]
        self.positions = [last - start for start, last in zip(starts, lasts, strict=True)]  # of the last tokens
        self._ranges = [local_range(batch.layout, rank, *span) for span in zip(starts, lasts, strict=True)]
        self._visits: dict[int, Visits] = {}
        self._new: Tensor | None = None  # [layers, rows, new tokens, 2, heads, D]
        self.count = 0  # of new tokens

    def before(self, run: Callable[..., Tensor], layer: int, hidden: Pass | None) -> Callable[..., Tensor]:
        """A block's function that saves K and V first. `hidden`: the pass whose tapes have x; None: x is given."""

        def both(w: Weights, x: Tensor) -> Tensor:
            self._save(w, layer, x, hidden)
            return run(w, x)

        return both

    @torch.no_grad()
    @owned_by(BLOCKS)
    def _save(self, w: Weights, layer: int, x: Tensor, hidden: Pass | None) -> None:
        tape, source = self._tapes[layer], hidden.x(layer) if hidden else None
        heads = Heads(range(0), range(self.spec.kv_heads))
        for index, rows in enumerate(tape.tiles.slices()):
            part = source.read(index, toward=1, changed=False) if source else x[rows]
            rotation = self._rotations.at(index, part.dtype) if self.spec.rope_layers[layer] else None
            _, *kv = project(self.spec, w, part, rotation, heads)
            if source:
                source.release(part)
            tape.write(index, torch.stack(kv, 1, out=tape.blank(index)))

    def begin(self, copies: int, most: int) -> None:
        """Begin `copies` continuations of each row, of up to `most` new tokens. Earlier continuations are forgotten."""
        spec = self.spec
        shape = spec.layers, copies * len(self.positions), most, 2, spec.kv_heads, spec.head_size
        self._new, self.count = torch.empty(shape, dtype=self._dtype, device=self.device), 0
        self._visits = _visits(self._tapes[0].tiles, self._ranges, copies)

    @owned_by(ATTENTION)
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o of one more new token of each continuation, which has `count` of them so far."""
        assert self._new is not None
        new, here = self._new[layer], self.count + 1
        new[:, self.count] = torch.stack((k, v), 1)
        own, rows = new[:, :here].flatten(0, 1), len(q)
        pieces = Pieces(tuple(range(rows + 1)), tuple(range(0, rows * here + 1, here)), causal=False, ragged=here > 1)
        o, lse = self._kernel.forward(q, own[:, 0], own[:, 1], pieces, softmax_scale(q))
        o, lse = o.to(at_least_fp32(q.dtype)), lse.contiguous()
        for part in self._gathered(*self._prompt_part(layer, q)):
            merge(o, lse, part[..., :-1].contiguous(), part[..., -1].T.contiguous())
        return o.to(q.dtype)

    def _prompt_part(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """(o, lse) of the new tokens on the keys of their prompts that this rank holds; -inf where it holds none."""
        high = at_least_fp32(q.dtype)
        o, lse = torch.zeros_like(q, dtype=high), q.new_full((q.shape[1], len(q)), -torch.inf, dtype=high)
        tape, order = self._tapes[layer], list(self._visits)
        for at, index in enumerate(order):
            tile = tape.read(index, changed=False)
            following = order[at + 1] if at + 1 < len(order) else None
            if following is not None:
                tape.prefetch(following)
            else:
                self._tapes[(layer + 1) % len(self._tapes)].prefetch(order[0])
            for rows, keys in self._visits[index]:
                part = q[rows], tile[keys, 0], tile[keys, 1]
                pieces = Pieces.rectangle(len(part[0]), len(part[1]), ragged=True)
                merge(o[rows], lse[:, rows], *self._kernel.forward(*part, pieces, softmax_scale(q)))
            tape.release(tile)
        return o, lse

    @owned_by(EXCHANGE)
    def _gathered(self, o: Tensor, lse: Tensor) -> Sequence[Tensor]:
        """o and the log-sum-exp of every context rank, [rows, heads, D + 1] each."""
        mine = torch.cat((o, lse.T[..., None]), -1)
        if self._group is None:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(parts, mine, group=self._group)
        return parts


def local_range(layout: Layout, rank: int, start: int, stop: int) -> range:
    """The local tokens of a rank between the sequence's tokens `start` and `stop`. A rank's tokens are in order."""
    places = layout.places(rank)
    before, inside = (sum(len(range(place.start, min(place.stop, edge))) for place in places) for edge in (start, stop))
    return range(before, inside)


def _visits(tiles: Tiles, ranges: Sequence[range], copies: int) -> dict[int, Visits]:
    """Which rows of new tokens see which keys of each tile; tiles that no row sees are left out."""
    found: dict[int, Visits] = {}
    for row, seen in enumerate(ranges):
        for index, rows in enumerate(tiles.slices()):
            start, stop = max(seen.start, rows.start), min(seen.stop, rows.stop)
            if start < stop:
                keys = slice(start - rows.start, stop - rows.start)
                found.setdefault(index, []).append((slice(row * copies, (row + 1) * copies), keys))
    return found
