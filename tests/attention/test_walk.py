"""Which pairs of tokens a walk over tiles visits, and its results against one naive kernel call over the whole
sequence.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.seam import softmax_scale
from ithaca.attention.merge import merge
from ithaca.attention.visits import plan_visits
from ithaca.attention.walk import Walk
from ithaca.base.tiles import Tiles


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Tiles, tuple[int, ...]]:
    """A length cut into tiles, and into up to eight documents."""
    length = draw(st.integers(1, 60))
    inner = draw(st.sets(st.integers(1, length - 1), max_size=7)) if length > 1 else set()
    smallest = -(-length // 20)  # twenty tiles are enough
    return Tiles(length, draw(st.integers(smallest, 25))), (0, *sorted(inner), length)


def visible(bounds: tuple[int, ...]) -> np.ndarray:
    """[tokens, tokens]: the pairs (query, key) that see each other."""
    mask = np.zeros((bounds[-1], bounds[-1]), dtype=bool)
    for start, stop in pairwise(bounds):
        mask[start:stop, start:stop] = True
    return np.tril(mask)


@settings(max_examples=150, deadline=None)
@given(cut=cuts())
def test_each_visible_pair_is_visited_once_and_no_other(cut: tuple[Tiles, tuple[int, ...]]) -> None:
    tiles, bounds = cut
    times = np.zeros((tiles.length, tiles.length), dtype=int)
    for index in range(tiles.count):
        for here in plan_visits(tiles, bounds, index):
            for visit in here.visits:
                view = times[tiles.rows(index), tiles.rows(here.tile)][visit.rows, visit.keys]
                # Every row and key that the kernel is given belongs to a piece: nothing is computed for nothing
                assert view.size
                for size, edges in zip(view.shape, (visit.pieces.q_bounds, visit.pieces.k_bounds), strict=True):
                    assert (edges[0], edges[-1]) == (0, size)
                for rows, keys in visit.pieces.spans():
                    pairs = np.ones_like(view[rows, keys])
                    view[rows, keys] += np.tril(pairs) if visit.pieces.causal else pairs
    assert np.array_equal(times, visible(bounds))


@settings(max_examples=100, deadline=None)
@given(cut=cuts())
def test_own_tile_first_then_the_nearest_that_a_document_reaches(cut: tuple[Tiles, tuple[int, ...]]) -> None:
    tiles, bounds = cut
    mask = visible(bounds)
    for index in range(tiles.count):
        seen = [tile for tile in range(tiles.count) if mask[tiles.rows(index), tiles.rows(tile)].any()]
        visits = plan_visits(tiles, bounds, index)
        assert [here.tile for here in visits] == sorted(seen, reverse=True)
        assert visits[0].tile == index
        assert all(here.visits for here in visits)


def comes_again(tiles: Tiles, bounds: tuple[int, ...], index: int, tile: int) -> bool:
    """Whether what a tile sees of another is all of it or, of itself, documents of equal lengths."""
    rows = tiles.rows(index)
    if tile < index:
        oldest = tiles.rows(tile).start
        return any(start <= oldest and rows.stop <= stop for start, stop in pairwise(bounds))
    shares = (min(stop, rows.stop) - max(start, rows.start) for start, stop in pairwise(bounds))
    return len({share for share in shares if share > 0}) == 1


@settings(max_examples=150, deadline=None)
@given(cut=cuts())
def test_visits_are_ragged_unless_their_shape_comes_again(cut: tuple[Tiles, tuple[int, ...]]) -> None:
    tiles, bounds = cut
    for index in range(tiles.count):
        for here in plan_visits(tiles, bounds, index):
            (visit,) = here.visits
            assert visit.pieces.ragged == (not comes_again(tiles, bounds, index, here.tile))


class InMemory:
    """Keys and values that are there while a tile is open and NaN afterwards, read in the order that was announced."""

    def __init__(self, k: Tensor, v: Tensor, tiles: Tiles):
        self._k, self._v, self._tiles = k, v, tiles
        self._following: int | None = None
        self.open: dict[int, tuple[Tensor, Tensor]] = {}

    def read(self, index: int, following: int | None) -> tuple[Tensor, Tensor]:
        assert not self.open
        assert self._following in (None, index)
        self._following = following
        rows = self._tiles.rows(index)
        self.open[index] = self._k[rows].clone(), self._v[rows].clone()
        return self.open[index]

    def release(self, index: int) -> None:
        for tensor in self.open.pop(index):
            tensor.fill_(torch.nan)

    @property
    def finished(self) -> bool:
        return not self.open and self._following is None


def walked(walk: Walk, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """o, lse, dq, dk and dv, tile by tile."""
    tiles, keys = walk.tiles, InMemory(k, v, walk.tiles)
    o, lse = torch.full_like(q, torch.nan), torch.full_like(q[..., 0].T, torch.nan)
    dq, dk, dv = torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)
    for index in range(tiles.count):
        # torch's kernel divides by the numbers of rows and keys: a visit to none would end the process
        parts = [part for here in walk.visits(index) for visit in here.visits for part in (visit.rows, visit.keys)]
        assert all(part.start < part.stop for part in parts)
        rows = tiles.rows(index)
        o[rows], lse[:, rows] = walk.forward(index, q[rows], keys)
        assert keys.finished

    def add(tile: int, part: slice, dk_part: Tensor, dv_part: Tensor) -> None:
        dk[tiles.rows(tile)][part] += dk_part
        dv[tiles.rows(tile)][part] += dv_part

    for index in reversed(range(tiles.count)):
        rows = tiles.rows(index)
        dq[rows] = walk.backward(index, do[rows], q[rows], o[rows], lse[:, rows], keys, add)
        assert keys.finished
    return [o, lse, dq, dk, dv]


@settings(max_examples=60, deadline=None)
@given(
    cut=cuts(),
    heads=st.sampled_from([(1, 1), (4, 1), (7, 1), (6, 2)]),
    name=st.sampled_from(["naive", "torch-cpu"]),
    seed=st.integers(0, 99),
)
def test_tiles_equal_the_whole(
    cut: tuple[Tiles, tuple[int, ...]], heads: tuple[int, int], name: str, seed: int
) -> None:
    tiles, bounds = cut
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tiles.length, count, 8) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, do = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    before = [tensor.clone() for tensor in (q, k, v, do)]
    twin, pieces, scale = make_kernel("naive"), Pieces.documents(bounds), softmax_scale(q)
    o, lse = twin.forward(q, k, v, pieces, scale)
    wanted = [o, lse, *twin.backward(do, q, k, v, o, lse, pieces, scale)]
    kernel = make_kernel(name)
    found = walked(Walk(kernel, tiles, bounds), q, k, v, do)
    for what, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert ours.shape == theirs.shape, what
        assert (ours - theirs).abs().max().item() <= 1e-10, what  # what is given is of size 1
    assert all(torch.equal(*pair) for pair in zip((q, k, v, do), before, strict=True))


def test_what_visits_give_is_summed_in_fp32() -> None:
    """With a kernel of constants: in half precision each step would be rounded, in fp32 only the result is."""

    class Constants:
        name = "constants"

        def refuses(self, *_: object) -> None:
            return None

        def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
            # Own keys say 1 and earlier ones 0, each with the same weight
            return torch.full_like(q, float(pieces.causal)), torch.zeros(q.shape[1], q.shape[0])

        def backward(self, do: Tensor, q: Tensor, *rest: object) -> tuple[Tensor, ...]:  # noqa: ARG002
            pieces = rest[-2]
            assert isinstance(pieces, Pieces)
            dq = torch.full_like(q, 1 if pieces.causal else 2**-11)  # 1 + 2⁻¹¹ is 1 in fp16
            return dq, torch.zeros_like(q), torch.zeros_like(q)

    last = 32
    tiles = Tiles(last + 1, 1)
    walk = Walk(Constants(), tiles, (0, tiles.length))
    keys = torch.zeros(tiles.length, 1, 2, dtype=torch.float16)
    tile, lse = keys[:1], torch.zeros(1, 1)
    o, total = walk.forward(last, tile, InMemory(keys, keys, tiles))
    assert torch.equal(o, torch.full_like(tile, 1 / (last + 1)))
    assert total.dtype == torch.float32
    dq = walk.backward(last, tile, tile, tile, lse, InMemory(keys, keys, tiles), lambda *_: None)
    assert torch.equal(dq, torch.full_like(tile, 1 + last * 2**-11))


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("half", [1, 6, 12])
def test_merging_two_halves_gives_the_whole(size: float, half: int) -> None:
    """At size 300 the log-sum-exp lies hundreds apart and its exponential would overflow."""
    generator = torch.Generator().manual_seed(half)
    q, k, v = (torch.randn(n, 4, 8, generator=generator, dtype=torch.float64) for n in (5, 13, 13))
    twin = make_kernel("naive")
    wanted = twin.forward(size * q, k, v, Pieces.rectangle(5, 13, ragged=True), 1.0)
    parts = [
        twin.forward(size * q, k[keys], v[keys], Pieces.rectangle(5, len(k[keys]), ragged=True), 1.0)
        for keys in (slice(0, half), slice(half, 13))
    ]
    for (o, lse), other in (parts, parts[::-1]):
        o, lse = o.clone(), lse.clone()
        merge(o, lse, *other)
        assert (o - wanted[0]).abs().max().item() <= 1e-10
        assert (lse - wanted[1]).abs().max().item() <= 1e-10


def test_merging_changes_only_the_rows_it_is_given() -> None:
    generator = torch.Generator().manual_seed(0)
    o, o_part = (torch.randn(n, 2, 8, generator=generator, dtype=torch.float64) for n in (6, 4))
    lse, lse_part = (torch.randn(2, n, generator=generator, dtype=torch.float64) for n in (6, 4))
    o_sum, lse_sum = o.clone(), lse.clone()
    merge(o_sum[:4], lse_sum[:, :4], o_part, lse_part)
    assert torch.equal(o_sum[4:], o[4:])
    assert torch.equal(lse_sum[:, 4:], lse[:, 4:])
    weights = lse[:, :4].exp(), lse_part.exp()
    mean = sum(w.T[..., None] * part for w, part in zip(weights, (o[:4], o_part), strict=True))
    assert (o_sum[:4] - mean / sum(weights).T[..., None]).abs().max().item() <= 1e-10
    assert (lse_sum[:, :4] - sum(weights).log()).abs().max().item() <= 1e-10


def test_merging_with_no_keys_changes_nothing() -> None:
    """Rows that have seen nothing, here or there, are zeros with lse = -inf."""
    generator = torch.Generator().manual_seed(0)
    o, lse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 2, 8), (2, 6)))
    nothing = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for first, second in (((o, lse), nothing), (nothing, (o, lse))):
        o_sum, lse_sum = (tensor.clone() for tensor in first)
        merge(o_sum, lse_sum, *second)
        assert torch.equal(o_sum, o)
        assert torch.equal(lse_sum, lse)
