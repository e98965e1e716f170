"""Linear layers, and weights whose gradients are summed over tiles in at least fp32.

The backward pass of a tile runs the tile again under autograd. Autograd would return the weight gradients of each tile
in the dtype of the computation, and their sum over 160 tiles in bf16 has five times the error of one GEMM. So the
weights of a backward pass are `Summed`: a linear layer adds its weight gradient to an fp32 sum within the GEMM that
computes it. That costs 7 to 11 % of the GEMM, where a separate addition costs 13 to 34 %. The gradients of the norms'
weights still come from autograd and are added afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge

from ithaca.base.precision import at_least_fp32

ALL = slice(None)
ALIGNED = 128  # numbers: 512 bytes, as torch aligns tensors, which matrix products rely on for their speed
Rows = slice | Sequence[slice]  # some rows of a weight: one run, or several runs one after the other


class Summed(dict[str, Tensor]):
    """Weights for backward passes over tiles. `sums` holds the gradients of the wanted ones so far.

    `final` names a linear layer whose output no gradient depends on (block.py, `final_linear`). It is differentiated
    like the others, but zeros without memory stand for its output.

    All sums are parts of one tensor, `all_sums`: one operation clears them, and one scales them.
    """

    def __init__(self, w: Mapping[str, Tensor], wanted: Iterable[str], final: str | None = None):
        super().__init__({name: weight.detach() for name, weight in w.items()})
        self.final = final
        self.sums, self.all_sums = _zeros({name: self[name] for name in wanted})
        # Linear layers add the gradients of matrices and biases to the sums themselves
        self._leaves = [name for name in self.sums if self[name].dim() == 1 and not name.endswith(".bias")]
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


def linear(w: Mapping[str, Tensor], name: str, x: Tensor, rows: Rows = ALL, columns: slice = ALL) -> Tensor:
    """x times some rows and columns of a named weight; the bias, where there is one, comes with the first column."""
    weight = take_rows(_columns(w[f"{name}.weight"], columns), rows)
    bias = w.get(f"{name}.bias") if not columns.start else None
    bias = None if bias is None else take_rows(bias, rows)
    if not isinstance(w, Summed):
        return F.linear(x, weight, bias)
    weight_sum = w.sums.get(f"{name}.weight")
    bias_sum = None if bias is None else w.sums.get(f"{name}.bias")
    return _Linear.apply(x, weight, bias, weight_sum, bias_sum, (rows, columns), name != w.final)


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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_sum: Tensor | None,
        bias_sum: Tensor | None,
        part: tuple[Rows, slice],
        computed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.part = (weight_sum, bias_sum), part
        return F.linear(x, weight, bias) if computed else x.new_zeros(1, 1).expand(len(x), len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (weight_sum, bias_sum), (rows, columns) = ctx.sums, ctx.part
        if weight_sum is not None:
            total = take_rows(weight_sum[:, columns], rows)
            add_product(total, dy.T, x)
            if not isinstance(rows, slice):  # the sums of several runs were copied
                _put_rows(weight_sum[:, columns], rows, total)
        if bias_sum is not None:
            total = take_rows(bias_sum, rows) + dy.sum(0, dtype=bias_sum.dtype)
            _put_rows(bias_sum, rows, total)
        return dy @ weight, None, None, None, None, None, None


def take_rows(x: Tensor, rows: Rows) -> Tensor:
    """Rows of a tensor: a view of one run, a copy of several. Slices, unlike indices, need nothing on the device."""
    if isinstance(rows, slice):
        return x if _covers(rows, len(x)) else x[rows]
    return torch.cat([x[run] for run in rows])


def _columns(x: Tensor, columns: slice) -> Tensor:
    return x if _covers(columns, x.shape[1]) else x[:, columns]


def _covers(part: slice, length: int) -> bool:
    """Whether a slice is everything. Then it is not taken: autograd would copy its gradient into zeros."""
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
