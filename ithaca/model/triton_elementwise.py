"""Rotary embedding, gated activation and the RMS norm's backward in one pass over memory each, as Triton kernels.

Eager torch reads and writes these wide tensors two to five times, which takes a fifth as long as a block's GEMMs. Each
kernel has a plain twin where it is used (rotary.py, block.py), which also serves float64. The kernels compute in fp32
and round once.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements per program of the flat kernels
NORM_TILE = 2048  # elements that a program of the norm's backward holds at a time, where a row has no more
NORM_PROGRAMS = 4  # of the norm's backward on each multiprocessor: each adds up a weight gradient of its own


@triton.jit
def _rotate(x, y, cos, sin, x_token, x_head, heads, half, WAY: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One token per program: all its heads rotate by the same angles."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, HALF)
    c = tl.load(cos + token * half + feature, mask=feature < half).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + feature, mask=feature < half).to(tl.float32)[None, :] * WAY
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        mask = (head < heads)[:, None] & (feature < half)[None, :]
        source = x + token * x_token + head[:, None] * x_head + feature[None, :]
        first = tl.load(source, mask=mask).to(tl.float32)
        second = tl.load(source + half, mask=mask).to(tl.float32)
        target = y + (token * heads + head[:, None]) * 2 * half + feature[None, :]
        tl.store(target, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
        tl.store(target + half, (second * c + first * s).to(y.dtype.element_ty), mask=mask)


def rotated(x_THD: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    tokens, heads, size = x_THD.shape
    x = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        widest = min(triton.next_power_of_2(heads), 16)
        _rotate[(tokens,)](
            x, y, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), heads, size // 2,
            WAY=way, HEADS=widest, HALF=triton.next_power_of_2(size // 2),
        )  # fmt: skip
    return y


@triton.jit
def _gated(gate, up, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    g, u = tl.load(gate + place, mask=mask).to(tl.float32), tl.load(up + place, mask=mask).to(tl.float32)
    tl.store(y + place, (g / (1 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gated_backward(dy, gate, up, dgate, dup, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    d = tl.load(dy + place, mask=mask).to(tl.float32)
    g, u = tl.load(gate + place, mask=mask).to(tl.float32), tl.load(up + place, mask=mask).to(tl.float32)
    share = 1 / (1 + tl.exp(-g))
    tl.store(dup + place, (d * g * share).to(dup.dtype.element_ty), mask=mask)
    tl.store(dgate + place, (d * u * share * (1 + g * (1 - share))).to(dgate.dtype.element_ty), mask=mask)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if gate.numel():
        _gated[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, y, gate.numel(), BLOCK=BLOCK)
    return y


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if gate.numel():
        grid = (triton.cdiv(gate.numel(), BLOCK),)
        _gated_backward[grid](dy, gate, up, dgate, dup, gate.numel(), BLOCK=BLOCK)
    return dgate, dup


@triton.jit
def _norm_backward(
    dy, x, weight, beside, dx, parts, rows, inner, width, eps, dy_outer, dy_inner, x_outer, x_inner,
    BESIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every program takes ROWS rows at a time, writes their dx, and adds up its part of the weight's gradient."""
    feature = tl.arange(0, WIDTH)
    w = tl.load(weight + feature, mask=feature < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (feature < width)[None, :]
        outer, within = row // inner, row % inner
        from_x = (outer * x_outer + within * x_inner)[:, None] + feature[None, :]
        from_dy = (outer * dy_outer + within * dy_inner)[:, None] + feature[None, :]
        v = tl.load(x + from_x, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + from_dy, mask=mask, other=0.0).to(tl.float32)
        scale = (1 / tl.sqrt(tl.sum(v * v, 1) / width + eps))[:, None]
        normed = v * scale
        total += tl.sum(g * normed, 0)
        g = g * w
        share = (tl.sum(g * normed, 1) / width)[:, None]
        found = (g - normed * share) * scale
        place = (row * width)[:, None] + feature[None, :]
        if BESIDE:
            found += tl.load(beside + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + place, found.to(dx.dtype.element_ty), mask=mask)
    tl.store(parts + tl.program_id(0) * width + feature, total, mask=feature < width)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, [rows, width] or [tokens, heads, width], and of the weight, in fp32.

    `beside`: another gradient of x, which is added to it.
    """
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Two strides lead to every row; a matrix has one row at each place of the outer dimension
    (x, x_outer, x_inner), (dy, dy_outer, dy_inner) = _with_strides(x), _with_strides(dy)
    wide = triton.next_power_of_2(width)
    height = max(NORM_TILE // wide, 1)
    programs = max(min(NORM_PROGRAMS * _multiprocessors(x.device), triton.cdiv(rows, height)), 1)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        dy, x, weight.contiguous(), None if beside is None else beside.contiguous(), dx, parts, rows,
        x.shape[1] if x.dim() == 3 else 1, width, eps, dy_outer, dy_inner, x_outer, x_inner,
        BESIDE=beside is not None, ROWS=height, WIDTH=wide, num_warps=min(max(height * wide // 512, 4), 16),
    )  # fmt: skip
    return dx, parts.sum(0)


def _with_strides(x: Tensor) -> tuple[Tensor, int, int]:
    """A tensor whose rows are dense, and its strides from row to row."""
    assert x.dim() in (2, 3)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride(0), x.stride(1) if x.dim() == 3 else 0


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
