"""Merge of attention over different keys in one pass over memory, a Triton kernel; merge.py has the plain twin."""

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # tokens of one head per program


@triton.jit
def _merge(
    o_sum, lse, o_part, lse_part, rows, size, sum_row, sum_head, part_row, part_head, lse_head, lse_part_head,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, feature = tl.program_id(1).to(tl.int64), tl.arange(0, SIZE)
    mask = (row < rows)[:, None] & (feature < size)[None, :]
    old = tl.load(lse + head * lse_head + row, mask=row < rows, other=0.0)
    new = tl.load(lse_part + head * lse_part_head + row, mask=row < rows, other=0.0)
    top = tl.maximum(old, new)
    total = top + tl.log(tl.exp(old - top) + tl.exp(new - top))
    wide = row.to(tl.int64)[:, None]
    target = o_sum + wide * sum_row + head * sum_head + feature[None, :]
    source = o_part + wide * part_row + head * part_head + feature[None, :]
    joined = tl.load(target, mask=mask) * tl.exp(old - total)[:, None]
    joined += tl.load(source, mask=mask).to(o_sum.dtype.element_ty) * tl.exp(new - total)[:, None]
    tl.store(target, joined, mask=mask)
    tl.store(lse + head * lse_head + row, total, mask=row < rows)


def merge(o_sum: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    rows, heads, size = o_sum.shape
    strides = (*o_sum.stride()[:2], *o_part.stride()[:2], lse.stride(0), lse_part.stride(0))
    assert o_sum.stride(2) == o_part.stride(2) == lse.stride(1) == lse_part.stride(1) == 1
    grid = (triton.cdiv(rows, ROWS), heads)
    _merge[grid](
        o_sum, lse, o_part, lse_part, rows, size, *strides, ROWS=ROWS, SIZE=triton.next_power_of_2(size)
    )  # fmt: skip
