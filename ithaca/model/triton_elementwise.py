"""Rotary embedding and gated activation in one pass over memory each, as Triton kernels for GPUs.

Eager torch reads and writes these wide tensors two to five times, which takes a fifth as long as a block's GEMMs. Each
kernel has a plain twin where it is used (rotary.py, block.py), which also serves float64. The kernels compute in fp32
and round once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements per program of the flat kernels


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
