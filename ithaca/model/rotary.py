"""Rotary positions as numbers: queries and keys are turned by angles that grow with their position.

The inverse frequencies are the fp32 numbers that `transformers` has, bit for bit. The angle is their product with
the position in float64: at position 5M an fp32 angle is off by a quarter radian. Cosines and sines are made for the
tokens at hand (two tables of tokens × head_size / 2), never for the whole context.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.precision import fusable
from ithaca.model.rope import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """[head_size / 2] fp32, on the CPU: how many radians a feature pair turns from one token to the next."""
    steps = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    wavelengths = rope.theta**steps
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_size)
    inverse = 1.0 / wavelengths
    if rope.kind == "linear":
        return inverse / rope.factor
    return _llama3(rope, inverse) if rope.kind == "llama3" else inverse


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between are blended."""
    turns = 2 * math.pi / inverse
    longest, shortest = (
        rope.trained_positions / rope.low_freq_factor,
        rope.trained_positions / rope.high_freq_factor,
    )
    blend = (rope.trained_positions / turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * inverse / rope.factor + blend * inverse
    return torch.where(turns > longest, inverse / rope.factor, torch.where(turns < shortest, inverse, between))


def _yarn(rope: Rope, wavelengths: Tensor, head_size: int) -> Tensor:
    """A linear ramp over the feature pairs, from kept (fast turning) to slowed by the factor (slow turning)."""

    def pair_that_turns(times: float) -> float:
        return (head_size * math.log(rope.trained_positions / (times * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    kept = 1 - torch.clamp((torch.arange(head_size // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of some tokens, [tokens, 1, head_size / 2] each, ready to rotate [tokens, heads, head_size]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """The rotary embedding of one model. It copies the inverse frequencies to a device once, when they are first used.

    A copy for each chunk would make the host wait for the GPU each time.
    """

    def __init__(self, rope: Rope, head_size: int):
        self._rope, self._head_size = rope, head_size
        self._inverse: dict[torch.device, Tensor] = {}  # [head_size / 2] float64

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines of tokens at these positions, in this dtype."""
        device = positions.device
        if device not in self._inverse:
            inverse = inverse_frequencies(self._rope, self._head_size).to(torch.float64)
            self._inverse[device] = inverse.to(device, non_blocking=True)
        angles, factor = positions.to(torch.float64)[:, None, None] * self._inverse[device], self._rope.attention_factor
        return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (feature i, feature i + head_size / 2), the order of Hugging Face weights."""
    return _Rotate.apply(x_THD, rotation.cos, rotation.sin)


class _Rotate(torch.autograd.Function):
    """By hand because it is cheap: nothing of x is kept, and the gradient is the rotation the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    if fusable(x):
        from ithaca.model import triton_elementwise as fused

        return fused.rotated(x, cos, sin, way)
    y = torch.empty_like(x)
    (x_first, x_second), (y_first, y_second) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(x_first, cos, out=y_first).addcmul_(x_second, sin, value=-way)
    torch.mul(x_second, cos, out=y_second).addcmul_(x_first, sin, value=way)
    return y
