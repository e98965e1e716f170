"""Linear layers that sum their weight gradients over tiles, against plain autograd over all rows at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.base.tiles import Tiles
from ithaca.model.linear import Summed, add_product, linear

ROWS, HIDDEN, INNER = 23, 6, 9
HALVES = slice(0, 4), slice(4, INNER)
SHAPES = {
    "norm.weight": (HIDDEN,),
    "first.weight": (INNER, HIDDEN),
    "first.bias": (INNER,),
    "inner_norm.weight": (4,),
    "second.weight": (HIDDEN, INNER),
    "second.bias": (HIDDEN,),
}
WANTED = {
    "all": tuple(SHAPES),
    "matrices": ("first.weight", "second.weight"),
    "biases": ("first.bias", "second.bias"),
    "norms": ("norm.weight", "inner_norm.weight"),
    "one of each": ("second.weight", "first.bias", "norm.weight"),
    "none": (),
}


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def make_weights() -> dict[str, Tensor]:
    return dict(zip(SHAPES, numbers(*SHAPES.values()), strict=True))


def sliced(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Two layers by `linear`: the first in slices of its rows, the second in the same slices of its columns."""
    normed = F.rms_norm(x, (HIDDEN,), w["norm.weight"])
    a, b = (linear(w, "first", normed, rows=part) for part in HALVES)
    a = F.rms_norm(a, (4,), w["inner_norm.weight"])
    return x + linear(w, "second", a, columns=HALVES[0]) + linear(w, "second", b.tanh(), columns=HALVES[1])


def plain(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same without slices and without `linear`."""
    a, b = (F.rms_norm(x, (HIDDEN,), w["norm.weight"]) @ w["first.weight"].T + w["first.bias"]).split((4, 5), dim=1)
    inner = torch.cat((F.rms_norm(a, (4,), w["inner_norm.weight"]), b.tanh()), dim=1)
    return x + inner @ w["second.weight"].T + w["second.bias"]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max().item() <= 1e-10


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("summed", [False, True])
def test_linear_is_the_product_on_rows_and_columns(biased: bool, summed: bool) -> None:
    weight, bias, x = numbers((7, 5), (7,), (4, 5))
    w = {"layer.weight": weight} | ({"layer.bias": bias} if biased else {})
    w = Summed(w, w) if summed else w
    zero = torch.zeros(7, dtype=torch.float64)
    offset = bias if biased else zero
    assert_close(linear(w, "layer", x), x @ weight.T + offset)
    assert_close(linear(w, "layer", x, rows=slice(2, 6)), x @ weight[2:6].T + offset[2:6])
    assert_close(linear(w, "layer", x[:, :3], columns=slice(0, 3)), x[:, :3] @ weight[:, :3].T + offset)
    # The bias came with the first column
    assert_close(linear(w, "layer", x[:, 3:], columns=slice(3, 5)), x[:, 3:] @ weight[:, 3:].T)
    both = linear(w, "layer", x[:, 1:3], rows=slice(2, 6), columns=slice(1, 3))
    assert_close(both, x[:, 1:3] @ weight[2:6, 1:3].T)
    assert linear(w, "layer", x, rows=slice(0, 0)).shape == (4, 0)
    runs = [slice(0, 2), slice(3, 4), slice(5, 7)]
    assert_close(linear(w, "layer", x, rows=runs), (x @ weight.T + offset)[:, [0, 1, 3, 5, 6]])


def test_plain_weights_are_differentiated_by_autograd() -> None:
    weight, bias, x = numbers((7, 5), (7,), (4, 5))
    w = {"layer.weight": weight.requires_grad_(), "layer.bias": bias.requires_grad_()}
    found = torch.autograd.grad(linear(w, "layer", x).sin().sum(), (weight, bias))
    wanted = torch.autograd.grad(F.linear(x, weight, bias).sin().sum(), (weight, bias))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tile", [1, 7, ROWS])
@pytest.mark.parametrize("wanted", WANTED)
def test_sums_over_tiles_equal_autograd_over_all_rows(tile: int, wanted: str) -> None:
    x, dy = numbers((ROWS, HIDDEN), (ROWS, HIDDEN), seed=1)
    given = make_weights()
    leaves = {name: weight.clone().requires_grad_() for name, weight in given.items()}
    x_leaf = x.clone().requires_grad_()
    dx_wanted, *grads = torch.autograd.grad(plain(leaves, x_leaf), (x_leaf, *leaves.values()), dy)

    w = Summed(given, WANTED[wanted])
    dx = torch.full_like(x, torch.nan)
    for rows in Tiles(ROWS, tile).slices():
        part = x[rows].clone().requires_grad_()
        (dx[rows],) = w.differentiate(sliced(w, part), (part,), (dy[rows],))
    assert_close(dx, dx_wanted)
    assert set(w.sums) == set(WANTED[wanted])  # a frozen weight has no sum
    for name, grad in zip(leaves, grads, strict=True):
        if name in w.sums:
            assert_close(w.sums[name], grad)
    # Neither the values nor the leaves of whoever gave the weights are touched
    assert all(torch.equal(given[name], fresh) for name, fresh in make_weights().items())
    assert not any(weight.requires_grad or weight.grad is not None for weight in given.values())


def test_sums_of_several_runs_of_rows() -> None:
    """Only their rows get something, and on top of what was there."""
    given = make_weights()
    x, dy = numbers((ROWS, HIDDEN), (ROWS, 5), seed=4)
    runs, rows = [slice(1, 3), slice(4, 6), slice(8, 9)], [1, 2, 4, 5, 8]
    w = Summed(given, SHAPES)
    for _ in range(2):
        part = x.clone().requires_grad_()
        (dx,) = w.differentiate(linear(w, "first", part, rows=runs), (part,), (dy,))
    assert_close(dx, dy @ given["first.weight"][rows])
    wanted = {name: torch.zeros_like(given[name]) for name in ("first.weight", "first.bias")}
    wanted["first.weight"][rows], wanted["first.bias"][rows] = 2 * dy.T @ x, 2 * dy.sum(0)
    for name, total in wanted.items():
        assert_close(w.sums[name], total)


def test_only_what_is_wanted_of_norms_is_differentiated() -> None:
    w = Summed(make_weights(), WANTED["one of each"])
    assert [name for name in w if w[name].requires_grad] == ["norm.weight"]


def test_weights_of_a_graph_are_cut_from_it() -> None:
    """Weights come from modules, where they are learned; the sums are theirs, autograd's gradients are not."""
    w = Summed({name: weight.requires_grad_() for name, weight in make_weights().items()}, ())
    assert not any(weight.requires_grad for weight in w.values())


def test_gradients_of_several_inputs_and_outputs_come_in_order() -> None:
    """And a wanted weight that the outputs do not depend on keeps its sum."""
    x, y, dq, dk = numbers((5, HIDDEN), (5, HIDDEN), (5, INNER), (5, HIDDEN), seed=2)
    given = make_weights()
    w = Summed(given, SHAPES)
    x.requires_grad_()
    y.requires_grad_()
    q = linear(w, "first", F.rms_norm(x * y, (HIDDEN,), w["norm.weight"]))
    dx, dy = w.differentiate((q, 3 * y), (x, y), (dq, dk))
    wanted = torch.autograd.grad(
        (F.rms_norm(x * y, (HIDDEN,), given["norm.weight"]) @ given["first.weight"].T, 3 * y), (x, y), (dq, dk)
    )
    for found, other in zip((dx, dy), wanted, strict=True):
        assert_close(found, other)
    for name in ("inner_norm.weight", "second.weight", "second.bias"):
        assert torch.equal(w.sums[name], torch.zeros_like(given[name]))
    assert_close(w.sums["first.bias"], dq.sum(0))


def test_a_final_layer_gives_the_same_gradients_without_its_output() -> None:
    x, dy = numbers((ROWS, HIDDEN), (ROWS, HIDDEN), seed=3)
    results = []
    for final in (None, "second"):
        w = Summed(make_weights(), SHAPES, final)
        part = x.clone().requires_grad_()
        y = sliced(w, part)
        (dx,) = w.differentiate(y, (part,), (dy,))
        results.append([dx, *w.sums.values()])
        if final:
            assert y.shape == dy.shape
            # Only the residual is in it, no product and no bias
            assert torch.equal(y, x)
    for computed, left_out in zip(*results, strict=True):
        assert torch.equal(computed, left_out)


def test_the_output_of_a_final_layer_takes_no_memory() -> None:
    w = Summed(make_weights(), SHAPES, final="first")
    (x,) = numbers((ROWS, HIDDEN))
    y = linear(w, "first", x, rows=HALVES[1])
    assert y.shape == (ROWS, 5)
    assert y.dtype == torch.float64
    assert y.untyped_storage().nbytes() == 8


def test_sums_of_half_precision_weights_are_fp32() -> None:
    w = Summed({name: weight.half() for name, weight in make_weights().items()}, SHAPES)
    assert {total.dtype for total in w.sums.values()} == {torch.float32}
    assert {total.dtype for total in Summed(make_weights(), SHAPES).sums.values()} == {torch.float64}


def test_products_of_half_precision_are_summed_in_fp32() -> None:
    """Whole numbers, so that fp32 is exact; the sums are beyond fp16's largest number."""
    generator = torch.Generator().manual_seed(0)
    a, b, total = (torch.randint(0, 99, shape, generator=generator) for shape in ((3, 500), (500, 4), (3, 4)))
    wanted = total + a @ b
    assert wanted.min() > torch.finfo(torch.float16).max
    found = total.float()
    add_product(found, a.half(), b.half())
    assert torch.equal(found, wanted.float())
