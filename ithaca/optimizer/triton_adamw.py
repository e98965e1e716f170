"""AdamW over many tensors in one pass over memory, and the sum of squares of their gradients, as Triton kernels.

torch clips with two kernels, one of which reads and writes every gradient, and updates with a third. That is 40 bytes a
parameter: 4 for the norm, 8 to scale the gradients, 28 to read weights, gradients and moments and to write all but the
gradients. Here gradients are scaled while the update reads them: 32 bytes. One launch serves all tensors of a group, by
a table of their addresses, so the host takes no longer for a small model with many tensors.

All numbers are fp32. `torch.optim.AdamW` and `torch.nn.utils.clip_grad_norm_` are the slow twins; results differ from
theirs by rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS, WARPS = 4096, 4, 8  # a program goes over ROUNDS × BLOCK elements of one tensor
ALIGNED = 16  # bytes, which one instruction of a thread reads

# The table has a row for each parameter: five addresses and the number of elements
WEIGHT, GRADIENT, FIRST, SECOND, STEP, COUNT = map(tl.constexpr, range(6))
COLUMNS = tl.constexpr(6)


@dataclass(frozen=True)
class Tensors:
    """Contiguous fp32 tensors of one parameter on one GPU; `step` is 0-dim."""

    weight: Tensor
    gradient: Tensor
    first: Tensor  # moments
    second: Tensor
    step: Tensor

    @property
    def all(self) -> tuple[Tensor, ...]:
        return self.weight, self.gradient, self.first, self.second, self.step


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Σ g² over all elements of contiguous fp32 tensors on one GPU; 0-dim, in float64."""
    device = gradients[0].device
    _check(gradients, device)
    work = _work([[0, gradient.data_ptr(), 0, 0, 0, gradient.numel()] for gradient in gradients], device)
    if work is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    sums = torch.empty(len(work.owner), dtype=torch.float32, device=device)
    _squares[(len(sums),)](
        work.table, work.owner, work.start, sums, ALIGNED=work.aligned, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=WARPS
    )
    return sums.sum(dtype=torch.float64)


def update(
    parameters: Sequence[Tensors],
    scale: Tensor | None,
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW in place, with gradients times `scale`, a 0-dim fp32 tensor. The gradients are not changed.

    The caller has counted the steps already: the first update finds 1.
    """
    device = parameters[0].weight.device
    for one in parameters:
        _check(one.all, device)
    rows = [[*(tensor.data_ptr() for tensor in one.all), one.weight.numel()] for one in parameters]
    work = _work(rows, device)
    if work is not None:
        _adamw[(len(work.owner),)](
            work.table, work.owner, work.start, scale, rate, rate * weight_decay,
            1 - betas[0], 1 - betas[1], _log2(betas[0]), _log2(betas[1]), eps,
            SCALED=scale is not None, ALIGNED=work.aligned, BLOCK=BLOCK, ROUNDS=ROUNDS, num_warps=WARPS,
        )  # fmt: skip


def _check(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Assert dtype, layout and device, because the kernels get bare addresses."""
    assert all(one.dtype == torch.float32 and one.is_contiguous() and one.device == device for one in tensors)


def _log2(beta: float) -> float:
    """log2 of a beta; for 0 a number so low that all powers of the beta are 0, because -inf × 0 would be NaN."""
    return log2(beta) if beta else -1e4


@dataclass(frozen=True)
class _Work:
    """The table of a launch, and each program's part of it."""

    table: Tensor
    owner: Tensor  # for each program, the row of its tensor
    start: Tensor  # and the first of its elements there
    aligned: bool  # whether all addresses of tensors are multiples of ALIGNED


def _work(rows: list[list[int]], device: torch.device) -> _Work | None:
    """The programs for the rows of a table; None if there are no elements. The host does not wait for the copy."""
    rows = [row for row in rows if row[-1]]
    if not rows:
        return None
    aligned = all(address % ALIGNED == 0 for row in rows for address in row[:4])
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return _Work(table, *_programs(tuple(row[-1] for row in rows), device), aligned)


@lru_cache(maxsize=8)
def _programs(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`owner` and `start` for tensors with this many elements."""
    size = BLOCK * ROUNDS
    lengths = torch.tensor([-(-count // size) for count in counts])
    owner = torch.arange(len(counts)).repeat_interleave(lengths)
    begun = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    start = (torch.arange(len(owner)) - begun) * size
    return owner.to(device, torch.int32), start.to(device)


@triton.jit
def _pointer(table, row, COLUMN: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + row * COLUMNS + COLUMN).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _squares(table, owner, start, sums, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0)
    row, begin = tl.load(owner + program), tl.multiple_of(tl.load(start + program), 16)
    count, gradient = tl.load(table + row * COLUMNS + COUNT), _pointer(table, row, GRADIENT, ALIGNED)
    total = tl.zeros([BLOCK], tl.float32)
    # Without a mask, threads read four numbers at once: only a tensor's last program has one
    if begin + ROUNDS * BLOCK <= count:
        for turn in range(ROUNDS):
            g = tl.load(gradient + begin + turn * BLOCK + tl.arange(0, BLOCK))
            total += g * g
    else:
        for turn in range(ROUNDS):
            place = begin + turn * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(gradient + place, mask=place < count, other=0.0)
            total += g * g
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _adamw(
    table, owner, start, scale, rate, decay, share1, share2, log_beta1, log_beta2, eps,
    SCALED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, begin = tl.load(owner + program), tl.multiple_of(tl.load(start + program), 16)
    count = tl.load(table + row * COLUMNS + COUNT)
    weights, gradients = _pointer(table, row, WEIGHT, ALIGNED), _pointer(table, row, GRADIENT, ALIGNED)
    firsts, seconds = _pointer(table, row, FIRST, ALIGNED), _pointer(table, row, SECOND, ALIGNED)
    # In float64: 1 - 0.999 has 4 digits left in fp32
    step = tl.load(_pointer(table, row, STEP, False)).to(tl.float64)
    rate1 = (rate / (1 - tl.exp2(step * log_beta1))).to(tl.float32)
    root2 = (1 / tl.sqrt(1 - tl.exp2(step * log_beta2))).to(tl.float32)
    factor = 1.0
    if SCALED:
        factor = tl.load(scale)
    if begin + ROUNDS * BLOCK <= count:
        for turn in range(ROUNDS):
            place = begin + turn * BLOCK + tl.arange(0, BLOCK)
            w, g = tl.load(weights + place), tl.load(gradients + place)
            m, v = tl.load(firsts + place), tl.load(seconds + place)
            w, m, v = _update_block(w, g * factor, m, v, rate1, root2, decay, share1, share2, eps)
            tl.store(weights + place, w)
            tl.store(firsts + place, m)
            tl.store(seconds + place, v)
    else:
        for turn in range(ROUNDS):
            place = begin + turn * BLOCK + tl.arange(0, BLOCK)
            mask = place < count
            w, g = tl.load(weights + place, mask=mask), tl.load(gradients + place, mask=mask)
            m, v = tl.load(firsts + place, mask=mask), tl.load(seconds + place, mask=mask)
            w, m, v = _update_block(w, g * factor, m, v, rate1, root2, decay, share1, share2, eps)
            tl.store(weights + place, w, mask=mask)
            tl.store(firsts + place, m, mask=mask)
            tl.store(seconds + place, v, mask=mask)


@triton.jit
def _update_block(w, g, m, v, rate1, root2, decay, share1, share2, eps):
    m += share1 * (g - m)
    v += share2 * (g * g - v)
    # One rounding of the weight: a decay of 1e-6 is a few units of its last place
    w -= decay * w + rate1 * m / (tl.sqrt(v) * root2 + eps)
    return w, m, v
