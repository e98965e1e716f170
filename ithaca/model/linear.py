"""Linear layers, and weights whose gradients are summed over tiles in at least fp32.

The backward pass of a tile runs the tile again under autograd. Autograd would return the weight gradients of each tile
in the dtype of the computation, and their sum over 160 tiles in bf16 has five times the error of one GEMM. So the
weights of a backward pass are `Summed`: a linear layer adds its weight gradient to an fp32 sum within the GEMM that
computes it. That costs 7 to 11 % of the GEMM, where a separate addition costs 13 to 34 %. The gradients of the norms'
weights still come from autograd and are added afterwards.

On a GPU, layers that read one input (q, k and v; gate and up) add up its gradient within their products, too. Autograd
would write each part and read it again. Gradients of weights that are not summed leave their product in fp32.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from ithaca.base.precision import at_least_fp32, fusable

ALL = slice(None)
ALIGNED = 128  # numbers: 512 bytes, as torch aligns tensors, which matrix products rely on for their speed
Rows = slice | Sequence[slice]  # some rows of a weight: one run, or several runs one after the other


class Spread(Protocol):
    """Ranks that have different rows or columns of the same weights, and different tokens, seen from one of them.

    A layer reads the tokens of all ranks (`gather`). Its outputs are summed over the ranks, and each rank gets the
    sums of its own tokens (`reduce`). Neither is differentiable: each is the backward pass of the other.
    """

    ranks: int

    def gather(self, x: Tensor) -> Tensor: ...

    def reduce(self, y: Tensor) -> Tensor: ...


class Summed(dict[str, Tensor]):
    """Weights for backward passes over tiles. `sums` holds the gradients of the wanted weights so far.

    `final` names a linear layer whose output no gradient depends on (block.py, `final_linear`). It is differentiated
        like the others, but its output is replaced by zeros that take no memory.

    `apart` names biases that are added outside of their layers (`summed_linear` of a Spread).

    All sums are parts of one tensor, `all_sums`: one operation clears them, and one scales them.
    """

    def __init__(
        self, w: Mapping[str, Tensor], wanted: Iterable[str], final: str | None = None, apart: Sequence[str] = ()
    ):
        super().__init__({name: weight.detach() for name, weight in w.items()})
        self.final = final
        self.sums, self.all_sums = _zeros({name: self[name] for name in wanted})
        # Linear layers add the gradients of matrices and of their biases to the sums themselves
        vectors = [name for name in self.sums if self[name].dim() == 1]
        self._leaves = [name for name in vectors if name in apart or not name.endswith(".bias")]
        for name in self._leaves:
            self[name].requires_grad_()

    def differentiate(
        self,
        outputs: Tensor | Sequence[Tensor] | Sequence[GradientEdge],
        inputs: Sequence[Tensor],
        upstream: Sequence[Tensor],
    ) -> list[Tensor]:
        """The gradients of the inputs. Also adds the gradients of weights that the outputs depend on to the sums."""
        leaves = [self[name] for name in self._leaves]
        found = torch.autograd.grad(outputs, [*inputs, *leaves], upstream, allow_unused=True)
        for name, grad in zip(self._leaves, found[len(inputs) :], strict=True):
            if grad is not None:
                self.sums[name] += grad
        return list(found[: len(inputs)])  # pyrefly: ignore


class Layer(NamedTuple):
    """A linear layer by name, or some rows and columns of it. The bias comes with the first column."""

    name: str
    rows: Rows = ALL
    columns: slice = ALL
    bias: bool = True


def linear(w: Mapping[str, Tensor], name: str, x: Tensor, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
    """x times some rows and columns of a named weight, plus its bias if there is one."""
    (y,) = linears(w, [Layer(name, rows, columns)], x)
    return y


def linears(w: Mapping[str, Tensor], layers: Sequence[Layer], x: Tensor, spread: Spread | None = None) -> list[Tensor]:
    """The outputs of some layers that read one input; with a Spread, of the tokens of all its ranks."""
    calls = [_call(w, layer) for layer in layers]
    if spread is None and not isinstance(w, Summed) and not (fusable(x) and torch.is_grad_enabled()):
        return [F.linear(x, call.weight, call.bias) for call in calls]
    groups = [calls] if spread or fusable(x) else [[call] for call in calls]
    found = []
    for group in groups:
        tensors = [call.weight for call in group] + [call.bias for call in group]
        found += _Linears.apply(x, group, spread, *tensors)
    return found


def summed_linear(
    w: Mapping[str, Tensor], name: str, x: Tensor, columns: slice = ALL, spread: Spread | None = None
) -> Tensor:
    """A layer's output; with a Spread, the sum over its ranks for the caller's tokens. The bias is added once."""
    if spread is None:
        return linear(w, name, x, columns=columns)
    (y,) = linears(w, [Layer(name, columns=columns, bias=False)], x)
    needed = not (isinstance(w, Summed) and w.final == name)
    y = _Sum.apply(y, spread, needed)
    bias = w.get(f"{name}.bias")
    return y if bias is None else y + bias


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a Spread for the caller's tokens. If it is not needed, zeros that take no memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, spread: Spread, needed: bool) -> Tensor:
        ctx.spread = spread
        return spread.reduce(y) if needed else y.new_zeros(1, 1).expand(len(y) // spread.ranks, y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread.gather(dy), None, None


@dataclass(frozen=True)
class _Call:
    """The part of a layer that is multiplied, and where its gradients are added up."""

    layer: Layer
    weight: Tensor
    bias: Tensor | None
    weight_sum: Tensor | None
    bias_sum: Tensor | None
    computed: bool  # False: zeros replace the output


def _call(w: Mapping[str, Tensor], layer: Layer) -> _Call:
    name, rows, columns = layer.name, layer.rows, layer.columns
    weight = take_rows(_columns(w[f"{name}.weight"], columns), rows)
    bias = w.get(f"{name}.bias") if layer.bias and not columns.start else None
    bias = None if bias is None else take_rows(bias, rows)
    if not isinstance(w, Summed):
        return _Call(layer, weight, bias, None, None, computed=True)
    bias_sum = None if bias is None else w.sums.get(f"{name}.bias")
    return _Call(layer, weight, bias, w.sums.get(f"{name}.weight"), bias_sum, name != w.final)


def _zeros(like: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Zeros in at least fp32 for every tensor, as parts of one tensor, which comes with them."""
    if not like:
        return {}, None
    first, *others = like.values()
    assert all(tensor.dtype == first.dtype for tensor in others)
    room = [-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in like.values()]
    whole = torch.zeros(sum(room), dtype=at_least_fp32(first.dtype), device=first.device)
    pairs = zip(like.items(), whole.split(room), strict=True)
    return {name: part[: tensor.numel()].view(tensor.shape) for (name, tensor), part in pairs}, whole


class _Linears(torch.autograd.Function):
    """The inputs are x, the calls, a Spread, all weights and all biases. Gradients are added to sums where there are
    any.

        With a Spread, only the caller's tokens are saved. Backward gathers the others again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, calls: Sequence[_Call], spread: Spread | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(calls)], tensors[len(calls) :]
        ctx.save_for_backward(x, *weights)
        ctx.spread = spread
        x = spread.gather(x) if spread else x
        # Not the calls themselves: they hold weights beside those that autograd saves and frees
        ctx.sums = [(call.layer, call.weight_sum, call.bias_sum) for call in calls]
        ctx.set_materialize_grads(False)
        return tuple(
            F.linear(x, weight, bias) if call.computed else x.new_zeros(1, 1).expand(len(x), len(call.weight))
            for call, weight, bias in zip(calls, weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x = ctx.spread.gather(x) if ctx.spread else x
        wanted = ctx.needs_input_grad[3:]
        dx: Tensor | None = None
        grads: list[Tensor | None] = [None] * (2 * len(weights))
        for number, (dy, weight, (layer, weight_sum, bias_sum)) in enumerate(zip(dys, weights, ctx.sums, strict=True)):
            if dy is None or not dy.shape[1]:
                continue
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if weight_sum is not None:
                _add_weight_gradient(weight_sum, dy, x, layer)
            elif wanted[number]:
                grads[number] = _product(dy.T, x)
            if bias_sum is not None:
                _put_rows(bias_sum, layer.rows, take_rows(bias_sum, layer.rows) + dy.sum(0, dtype=bias_sum.dtype))
            elif wanted[len(weights) + number]:
                grads[len(weights) + number] = dy.sum(0, dtype=at_least_fp32(dy.dtype))
        if ctx.spread and dx is not None:
            dx = ctx.spread.reduce(dx)
        return dx, None, None, *grads


def _add_weight_gradient(weight_sum: Tensor, dy: Tensor, x: Tensor, layer: Layer) -> None:
    total = take_rows(weight_sum[:, layer.columns], layer.rows)
    add_product(total, dy.T, x)
    if not isinstance(layer.rows, slice):  # the sums of several runs were copied
        _put_rows(weight_sum[:, layer.columns], layer.rows, total)


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Rows of a tensor: a view of one run, a copy of several. Slices, unlike indices, need nothing on the device."""
    if isinstance(rows, slice):
        return x if _covers(rows, len(x)) else x[rows]
    return torch.cat([x[run] for run in rows])


def _columns(x: Tensor, columns: slice) -> Tensor:
    return x if _covers(columns, x.shape[1]) else x[:, columns]


def _covers(part: slice, length: int) -> bool:
    """Whether a slice covers everything. Such a slice is not taken: autograd would copy its gradient into zeros."""
    return part.indices(length) == (0, length, 1)


def _put_rows(x: Tensor, rows: Rows, values: Tensor) -> None:
    runs = [x[run] for run in ([rows] if isinstance(rows, slice) else rows)]
    for run, part in zip(runs, values.split([len(run) for run in runs]), strict=True):
        run.copy_(part)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where the product is not rounded to a lower precision than the total's."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in at least fp32."""
    high = at_least_fp32(a.dtype)
    if a.dtype == high:
        return a @ b
    return torch.ops.aten.mm.dtype(a, b, high) if a.is_cuda else a.to(high) @ b.to(high)
