"""Pieces cut into a few shapes: each pair once, few shapes, and results equal to the naive kernel over the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ithaca.attention.documents import MOST_PIECES, Pieces
from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.cudnn_flash import BUCKET, CudnnAndFlash
from ithaca.attention.kernels.cut import cut_pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS, KernelFacts
from ithaca.attention.visits import Visit
from ithaca.rehearsal.memory_meter import Meter


@st.composite
def pieces_of(draw: st.DrawFn) -> Pieces:
    """Documents, or a rectangle that documents or tiles made."""
    if draw(st.booleans()):
        return Pieces.rectangle(draw(st.integers(1, 40)), draw(st.integers(1, 40)), ragged=draw(st.booleans()))
    lengths = draw(st.one_of(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.just([17] * 3)))
    return Pieces.documents((0, *np.cumsum(lengths).tolist()))


def pairs(pieces: Pieces) -> np.ndarray:
    """[rows, keys]: how often each pair is seen."""
    seen = np.zeros((pieces.q_bounds[-1], pieces.k_bounds[-1]), dtype=int)
    for rows, keys in pieces.spans():
        view = seen[rows, keys]
        view += np.tril(np.ones_like(view)) if pieces.causal else 1
    return seen


@settings(max_examples=200, deadline=None)
@given(pieces=pieces_of(), bucket=st.integers(1, 5), squares=st.sampled_from([1, 2, 4, 8]))
def test_each_pair_once_in_few_shapes(pieces: Pieces, bucket: int, squares: int) -> None:
    longest, seen = bucket * squares, np.zeros_like(pairs(pieces))
    sides = {bucket << power for power in range(7)}
    visits = cut_pieces(pieces, bucket, longest)
    for visit in visits:
        part = pairs(visit.pieces)
        assert seen[visit.rows, visit.keys].shape == part.shape  # the pieces cover the visit
        seen[visit.rows, visit.keys] += part
        shapes = [(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in visit.pieces.spans()]
        if visit.pieces.ragged:
            assert all(min(shape) < bucket for shape in shapes)
            assert not visit.pieces.causal or visit.pieces.q_bounds[-1] <= longest
        elif visit.pieces.causal:
            assert all(rows <= longest for rows, _ in shapes)
        if pieces.ragged and not visit.pieces.ragged:
            assert len(shapes) == 1
            assert set(shapes[0]) <= sides
    assert np.array_equal(seen, pairs(pieces))


def test_the_cut_of_a_triangle() -> None:
    """Of seven buckets and a row, beside a document of one row whose triangle joins that of the last row."""

    def square(start: int, stop: int) -> Visit:
        return Visit(slice(start, stop), slice(start, stop), Pieces.documents((0, stop - start)))

    def rectangle(rows: slice, keys: slice, ragged: bool = False) -> Visit:
        return Visit(rows, keys, Pieces.rectangle(rows.stop - rows.start, keys.stop - keys.start, ragged))

    assert cut_pieces(Pieces.documents((0, 15, 16)), 2, 16) == (
        square(0, 8),
        square(8, 12),
        rectangle(slice(8, 12), slice(0, 8)),
        square(12, 14),
        rectangle(slice(12, 14), slice(0, 8)),
        rectangle(slice(12, 14), slice(8, 12)),
        rectangle(slice(14, 15), slice(0, 14), ragged=True),
        Visit(slice(14, 16), slice(14, 16), Pieces((0, 1, 2), (0, 1, 2), causal=True, ragged=True)),
    )


def test_a_long_triangle_is_cut_into_few_shapes() -> None:
    """A million tokens in squares of 64K: each with at most four rectangles beside it, of four shapes in all."""
    longest = KERNEL_FACTS["cudnn+flash"].longest
    assert longest is not None
    visits = cut_pieces(Pieces.documents((0, 2**20)), BUCKET, longest)
    assert not any(visit.pieces.ragged for visit in visits)
    squares = [visit for visit in visits if visit.pieces.causal]
    assert [visit.rows for visit in squares] == [slice(at, at + longest) for at in range(0, 2**20, longest)]
    shapes = {
        (len(range(2**20)[visit.rows]), len(range(2**20)[visit.keys])) for visit in visits if visit not in squares
    }
    assert shapes == {(longest, longest << power) for power in range(4)}
    assert len(visits) == 16 + sum(bin(index).count("1") for index in range(16))


@settings(max_examples=80, deadline=None)
@given(
    pieces=pieces_of(),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2)]),
    bucket=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_cut_and_merged_equals_the_whole(pieces: Pieces, heads: tuple[int, int], bucket: int, seed: int) -> None:
    """The kernel with cuDNN and flash attention replaced by kernels for the CPU, in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = pieces.q_bounds[-1], pieces.k_bounds[-1]
    shapes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    q, k, v, do = (torch.randn(*shape, 8, generator=generator, dtype=torch.float64) for shape in shapes)
    before = [tensor.clone() for tensor in (q, k, v, do)]
    twin, kernel = make_kernel("naive"), CudnnAndFlash(make_kernel("naive"), make_kernel("torch-cpu"), bucket)
    o, lse = twin.forward(q, k, v, pieces, 0.3)
    wanted = [o, lse, *twin.backward(do, q, k, v, o, lse, pieces, 0.3)]
    found_o, found_lse = kernel.forward(q, k, v, pieces, 0.3)
    found = [found_o, found_lse, *kernel.backward(do, q, k, v, o, lse.T.contiguous().T, pieces, 0.3)]
    for what, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert ours.shape == theirs.shape, what
        assert (ours - theirs).abs().max().item() <= 1e-10, what
    assert all(torch.equal(*pair) for pair in zip((q, k, v, do), before, strict=True))


def test_cut_pieces_are_summed_in_fp32() -> None:
    """In half precision 1 + 2⁻¹¹ is 1: a sum that is rounded at each visit would lose what visits add."""

    class Constants:
        name = "constants"

        def backward(self, do, q, k, v, o, lse, pieces, scale):  # noqa: ARG002
            return [torch.full_like(x, 1 if pieces.causal else 2**-11) for x in (q, k, v)]

    kernel, length = CudnnAndFlash(Constants(), Constants(), bucket=1), 64  # 8 squares of 8  # pyrefly: ignore
    x = torch.zeros(length, 1, 2, dtype=torch.float16)
    dq, dk, _ = kernel.backward(x, x, x, x, x, torch.zeros(1, length), Pieces.documents((0, length)), 1.0)
    blocks = range(8)
    assert torch.equal(dq[::8, 0, 0], torch.tensor([1 + bin(i).count("1") * 2**-11 for i in blocks]).half())
    above = [sum(1 for i in blocks if i > j) for j in blocks]  # rows that see these keys through a rectangle
    assert torch.equal(dk[::8, 0, 0], torch.tensor([1 + count * 2**-11 for count in above]).half())


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("tokens", [2**16, 2**17, 3 * 2**16, 72 * 1024, 2**20, 2**20 + 2**16, 2**20 + 1, 10**6])
def test_workspace_is_that_of_the_largest_call(tokens: int, group: int) -> None:
    """Counted call by call: sums of dq, dk and dv in fp32, and beside them what a call gives and takes."""
    facts, k = KERNEL_FACTS["cudnn+flash"], 1.0
    assert facts.longest is not None
    shared = 2 * group if group > 1 else 0
    visits = cut_pieces(Pieces.documents((0, tokens)), BUCKET, facts.longest)
    calls = [
        (1 + facts.workspace_q) * group * k * (visit.rows.stop - visit.rows.start) / tokens
        + (2 + shared) * k * (visit.keys.stop - visit.keys.start) / tokens
        for visit in visits
    ]
    gradients = group * k + 2 * k
    wanted = 2 * gradients + max(*calls, gradients) if len(visits) > 1 else calls[0]
    found = gradients + facts.workspace(group * k, k, group, tokens, causal=True)
    assert -1e-9 <= found / wanted - 1 <= 0.04  # never less


DOCUMENTS = {
    "equal": [4000] * 262,
    "two lengths": [3000, 5000] * 131,
    "short ones": [100, 300] * 2622,
    "a long one first": [12 * 1024, *[4000] * 259],
    "a long one with an end first": [12000, *[3000, 5000] * 129],
    "one for each token": [1] * 2**17,
}


@pytest.mark.parametrize("heads", [(1, 1), (3, 1)], ids=["1", "3 to 1"])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_workspace_does_not_depend_on_documents(lengths: list[int], heads: tuple[int, int]) -> None:
    """What is allocated at once, counted with kernels that allocate what their facts say: never more than predicted."""
    tokens, group, facts = sum(lengths), heads[0] / heads[1], KERNEL_FACTS["cudnn+flash"]
    shapes = [(tokens, count, 2) for count in (heads[0], heads[1], heads[1], heads[0], heads[0])]
    fakes = [Allocates(KERNEL_FACTS[name]) for name in ("cudnn", "flash")]
    kernel = CudnnAndFlash(*fakes)  # pyrefly: ignore
    with Meter(torch.device("cpu"), torch.bfloat16) as meter:
        q, k, v, o, do = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        lse, pieces = torch.zeros(heads[0], tokens), Pieces.documents((0, *np.cumsum(lengths).tolist()))
        before = sum(meter.now.values())
        meter.restart()
        kernel.backward(do, q, k, v, o, lse, pieces, 1.0)
    predicted = q.nbytes + 2 * k.nbytes + facts.workspace(q.nbytes, k.nbytes, group, tokens, causal=True)
    assert sum(meter.peak.values()) - before <= predicted
    assert facts.longest is not None
    assert all(rows <= facts.longest for rows, _ in fakes[1].calls)
    assert all(count <= MOST_PIECES for fake in fakes for _, count in fake.calls)


class Allocates:
    """Takes what a kernel's facts say, and returns gradients of no value."""

    def __init__(self, facts: KernelFacts):
        self.facts = facts
        self.calls: list[tuple[int, int]] = []  # rows and pieces

    def backward(self, do, q, k, v, o, lse, pieces, scale):  # noqa: ARG002
        self.calls.append((len(q), len(pieces.q_bounds) - 1))
        group = q.shape[1] / k.shape[1]
        size = int(self.facts.workspace(q.nbytes, k.nbytes, group, len(q), causal=True))
        taken = torch.empty(size, dtype=torch.uint8)
        found = [torch.empty_like(x) for x in (q, k, v)]
        del taken  # a kernel holds it until its gradients are there
        return found


def test_bounds_are_those_of_the_pieces() -> None:
    """A piece of one shape that repeats goes to the kernel as it is."""
    pieces = Pieces.documents((0, 4, 8))
    (visit,) = cut_pieces(pieces, 2, 16)
    assert visit.pieces is pieces
    assert [*pairwise(visit.pieces.q_bounds)] == [(0, 4), (4, 8)]
