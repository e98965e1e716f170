"""The arguments of a block of the sweep beside its weights, in each of its head rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ithaca.attention.walk import Walk
from ithaca.base.tiles import Tiles
from ithaca.model.linear import Summed
from ithaca.model.rotary import Rotary, Rotation
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.exchange import Exchange
from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.ring import Ring
from ithaca.parallel.sharding import Readable
from ithaca.schedule.embedding import LookedUp
from ithaca.schedule.marks import Mark, no_mark
from ithaca.schedule.pre_post_attention import Projection, post_attention
from ithaca.schedule.sweep.chunks import hops
from ithaca.schedule.sweep.rebuild_x import Advance
from ithaca.schedule.tapes import Pass


class Rotations:
    """Cosines and sines of a chunk's tokens. The last ones are kept: the layers of a single chunk share them."""

    def __init__(self, rotary: Rotary, positions: Tensor, tiles: Tiles):
        """`positions`: of the local tokens, which are cut into these tiles."""
        self._rotary, self._positions, self._tiles = rotary, positions, tiles
        self._last: tuple[tuple[int, torch.dtype], Rotation] | None = None

    def at(self, chunk: int, dtype: torch.dtype) -> Rotation:
        if self._last is None or self._last[0] != (chunk, dtype):
            self._last = None  # freed before the next one is made
            rotation = self._rotary.at(self._positions[self._tiles.rows(chunk)], dtype)
            self._last = (chunk, dtype), rotation
        return self._last[1]


@dataclass(frozen=True)
class SweepCall:
    """The arguments of one block beside its weights."""

    spec: Spec
    layer: int
    tapes: Pass
    walk: Walk  # over the chunks of the whole sequence
    rotations: Rotations
    tile: int
    exchange: Exchange
    ring: Ring
    rounds: tuple[HeadSplit, ...]
    weights_of: Sequence[Readable]  # by layer
    table: Readable  # the embedding's
    tokens: Tensor  # of this rank
    settle: Callable[[], None]  # frees the memory that reductions of gradients hold (parallel/sharding.py)
    mark: Mark = no_mark
    round: int = 0  # the head round that runs

    def in_rounds(self) -> list["SweepCall"]:
        """The call in each of its head rounds."""
        return [replace(self, round=number) for number in range(len(self.rounds))]

    @property
    def split(self) -> HeadSplit:
        """The heads of this round, rank by rank."""
        return self.rounds[self.round]

    @property
    def heads(self) -> Heads:
        """The heads of this round, of all ranks together."""
        return Heads(self.split.q_heads, self.split.kv_heads)

    @property
    def in_last_round(self) -> bool:
        """Whether o is complete after this round: it runs output projection and MLP, and comes first in backward."""
        return self.round == len(self.rounds) - 1

    @property
    def own_kv_heads(self) -> int:
        """K/V heads of this rank in this round."""
        return len(self.split.kv[self.exchange.rank])

    def own_lse(self, tile: Tensor) -> Tensor:
        """[heads, tokens]: the part of a log-sum-exp tile that belongs to this rank's heads in this round."""
        mine, first = self.split.q[self.exchange.rank], self.rounds[0].q[self.exchange.rank]
        start = mine.start - first.start
        return tile.view(tile.shape[::-1])[start : start + len(mine)]

    def mark_chunk(self, phase: str, chunk: int) -> None:
        """Mark that a chunk's attention begins. Chunks are numbered through all rounds."""
        self.mark(phase, self.layer, self.round * self.walk.tiles.count + chunk)

    @contextmanager
    def advance_from(self, layer: int) -> Iterator[Advance]:
        """Output projection and MLP of another layer, while its weights are gathered."""
        with self.weights_of[layer]() as w:
            yield lambda x, o, y: post_attention(self.spec, w, x, o, y, self.tile)

    @contextmanager
    def look_up(self) -> Iterator[LookedUp]:
        """x of layer 0, while the embedding's table is gathered."""
        with self.table() as w:
            yield LookedUp(w["weight"], self.tokens, self.tapes.residual.tiles)

    @property
    def hops(self) -> int:
        """Exchanges between a chunk's projections and its attention, each hidden behind a neighbouring chunk."""
        return hops(self.exchange.ranks, self.ring.ranks)

    def rotation(self, chunk: int, dtype: torch.dtype) -> Rotation | None:
        return self.rotations.at(chunk, dtype) if self.spec.rope_layers[self.layer] else None

    def project(self, w: Summed, chunk: int, x: Tensor) -> Projection:
        return Projection(self.spec, w, x, self.rotation(chunk, x.dtype), self.heads)
