"""Every kernel against `naive`: output, log-sum-exp and all gradients, at shapes that do not divide."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels import packed
from ithaca.attention.kernels.choose import choose_kernel, make_kernel
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import attend
from ithaca.base.errors import PlanError
from tests.models import relative

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def tensors(rows: int, keys: int, heads: int, kv_heads: int, size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads), (keys, kv_heads), (keys, kv_heads), (rows, heads))
    return [torch.randn(*shape, size, generator=generator, dtype=torch.float64) for shape in shapes]


def everything(name: str, given: list[Tensor], pieces: Pieces) -> list[Tensor]:
    q, k, v, do = given
    kernel = make_kernel(name)
    o, lse = kernel.forward(q, k, v, pieces, 0.3)
    other_strides = lse.T.contiguous().T  # as a tape of tokens gives it back
    return [o, lse, *kernel.backward(do, q, k, v, o, other_strides, pieces, 0.3)]


def assert_close(found: list[Tensor], wanted: list[Tensor], bound: float) -> None:
    for name, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
        assert ours.shape == theirs.shape, name
        # Of one token that sees itself, dq and dk are zero but for rounding; what is given is of size 1
        assert relative(ours.double().cpu(), theirs, floor=1e-3) <= bound, name


def documents(lengths: list[int]) -> Pieces:
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return Pieces.documents(tuple(bounds))


class InCalls(packed.PackedKernel):
    """A packed kernel whose calls are those of `naive`, and are counted."""

    facts = KERNEL_FACTS["naive"]

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def call_forward(self, q, k, v, pieces, scale):
        self.lengths(pieces, q, k)  # no row and no key outside of the pieces
        self.counts.append(len(pieces.q_bounds) - 1)
        return make_kernel("naive").forward(q, k, v, pieces, scale)

    def call_backward(self, do, q, k, v, o, lse, pieces, scale):
        self.lengths(pieces, q, k)
        self.counts.append(len(pieces.q_bounds) - 1)
        return make_kernel("naive").backward(do, q, k, v, o, lse, pieces, scale)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_more_pieces_than_a_grid_has_places(most: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go in several calls, which together give what one would."""
    monkeypatch.setattr(packed, "MOST_PIECES", most)
    rows, keys = (0, 3, 4, 9, 10, 12, 17, 18), (0, 3, 4, 9, 10, 12, 17, 18) if causal else (0, 2, 9, 10, 11, 15, 16, 20)
    pieces, kernel = Pieces(rows, keys, causal), InCalls()
    q, k, v, do = given = tensors(rows[-1], keys[-1], 4, 2, 8, most)
    o, lse = kernel.forward(q, k, v, pieces, 0.3)
    found = [o, lse, *kernel.backward(do, q, k, v, o, lse.T.contiguous().T, pieces, 0.3)]
    assert_close(found, everything("naive", given, pieces), 1e-13)
    assert sum(kernel.counts) == 14
    assert max(kernel.counts) == min(most, 7)
    assert len(kernel.counts) == 2 * -(-7 // most)


def test_naive_is_softmax_attention() -> None:
    """The twin itself, against autograd through torch's own definition."""
    q, k, v, do = (tensor.requires_grad_() for tensor in tensors(9, 9, 6, 2, 8, 0))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    heads = [x.repeat_interleave(6 // x.shape[1], 1).transpose(0, 1) for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3).transpose(0, 1)
    grads = torch.autograd.grad(wanted, (q, k, v), do)
    scores = torch.einsum("htd,hud->htu", heads[0], heads[1]) * 0.3
    lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    plain = [x.detach() for x in (q, k, v, do)]
    assert_close(everything("naive", plain, documents([9])), [wanted.detach(), lse.detach(), *grads], 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 1), (7, 1), (6, 2)]),
    size=st.sampled_from([2, 8, 20]),
    seed=st.integers(0, 99),
)
def test_torch_cpu(lengths: list[int], heads: tuple[int, int], size: int, seed: int) -> None:
    given = tensors(sum(lengths), sum(lengths), *heads, size, seed)
    wanted = everything("naive", given, documents(lengths))
    assert_close(everything("torch-cpu", given, documents(lengths)), wanted, 1e-10)


@pytest.mark.parametrize("name", ["naive", "torch-cpu"])
def test_rectangles_see_only_their_keys(name: str) -> None:
    given = tensors(11, 9, 4, 2, 8, 3)
    found = everything(name, given, Pieces((0, 4, 11), (0, 7, 9), causal=False))
    for rows, keys in ((slice(0, 4), slice(0, 7)), (slice(4, 11), slice(7, 9))):
        q, k, v, do = (x[part] for x, part in zip(given, (rows, keys, keys, rows), strict=True))
        wanted = everything("naive", [q, k, v, do], Pieces((0, len(q)), (0, len(k)), causal=False))
        parts = (found[0][rows], found[1][:, rows], found[2][rows], found[3][keys], found[4][keys])
        assert_close(list(parts), wanted, 1e-12)


def test_attend_is_differentiable() -> None:
    q, k, v, _ = tensors(5, 5, 4, 2, 4, 1)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    kernel = choose_kernel("auto", CPU, torch.float64, 4)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, kernel, documents([2, 3])), (q, k, v))


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 9, 0)
    assert choose_kernel("auto", CPU, torch.float32, 64).name == "torch-cpu"
    monkeypatch.setattr("ithaca.attention.kernels.facts._installed", lambda _: False)
    assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "cudnn+flash"
    assert choose_kernel("auto", GPU, torch.bfloat16, 256).name == "flash"
    assert choose_kernel("auto", GPU, torch.float64, 128).name == "naive"
    with pytest.raises(PlanError, match="did you mean 'flash'"):
        choose_kernel("flahs", CPU, torch.float32, 64)
    with pytest.raises(PlanError, match=r"runs on a CUDA GPU, the model is on cpu; usable are auto, torch-cpu, naive"):
        choose_kernel("cudnn", CPU, torch.float32, 64)


@pytest.mark.parametrize("name", ["cudnn+flash", "cudnn", "flash"])
def test_fused_kernels_need_ampere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 7, 5)
    with pytest.raises(PlanError, match=r"needs a GPU of compute capability 8.0 or higher, cuda:0 has 7.5; usable .*n"):
        choose_kernel(name, GPU, torch.float16, 128)
    assert choose_kernel("auto", GPU, torch.float16, 128).name == "naive"
    capability(monkeypatch, 8, 0)
    assert choose_kernel(name, GPU, torch.float16, 128).name == name


def test_every_kernel_has_facts() -> None:
    for name, facts in KERNEL_FACTS.items():
        assert make_kernel(name).name == facts.name == name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn+flash", "cudnn", "flash", "naive"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (7, 1)])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("lengths", [[1000], [256, 3, 128, 613], [1, 999], [250] * 4, [2] * 500])
def test_gpu_kernels(name: str, heads: tuple[int, int], size: int, lengths: list[int]) -> None:
    given = [x.bfloat16() for x in tensors(1000, 1000, *heads, size, 7)]
    wanted = everything("naive", [x.double() for x in given], documents(lengths))
    found = everything(name, [x.to(GPU) for x in given], documents(lengths))
    assert_close(found, wanted, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn+flash", "cudnn", "flash"])
@pytest.mark.parametrize(
    "pieces",
    [
        Pieces.rectangle(300, 1000, False),
        Pieces.rectangle(300, 1000, True),
        Pieces((0, 100, 200, 300), (0, 300, 600, 900), causal=False),
        Pieces.rectangle(1, 1000, False),
        Pieces.rectangle(300, 2, False),
    ],
)
def test_gpu_rectangles(name: str, pieces: Pieces) -> None:
    keys = pieces.k_bounds[-1]
    given = [x.bfloat16() for x in tensors(pieces.q_bounds[-1], keys, 8, 2, 128, 8)]
    wanted = everything("naive", [x.double() for x in given], pieces)
    assert_close(everything(name, [x.to(GPU) for x in given], pieces), wanted, 1e-2)


def test_facts_do_not_load_torch() -> None:
    code = "import sys, ithaca.attention.kernels.facts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
