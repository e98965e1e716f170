"""Rotary positions: one inverse frequency per pair of features, scaled as the model was trained.

The inverse frequencies are the fp32 numbers that `transformers` has, bit for bit. The angle is their product with
the position in float64: at position 5M an fp32 angle is off by a quarter radian. Cosines and sines are made for the
tokens at hand (two tables of tokens × head_size / 2), never for the whole context.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.errors import ModelError

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_TYPES = tuple(_NEEDED)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How positions turn into angles. Only the numbers that its kind uses are set."""

    kind: str  # one of ROPE_TYPES
    theta: float
    factor: float = 1.0
    trained_positions: int = 0  # the context before it was stretched (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # what cosines and sines are multiplied by (yarn)


def read_rope(config: dict[str, Any], default_theta: float) -> Rope:
    """The rope of a `config.json`, in the old spelling (rope_theta, rope_scaling) or the new (rope_parameters)."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise ModelError("rope_parameters differ by layer type, which is not supported: one set for all layers is")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type '{kind}' is not supported: supported are {', '.join(ROPE_TYPES)}")
    missing = [name for name in _NEEDED[kind] if given.get(name) is None]
    if missing:
        raise ModelError(f"rope type '{kind}' needs {' and '.join(missing)} in config.json")
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {share} is not supported: only 1.0, rope on the whole head, is")
    theta = float(given.get("rope_theta") or config.get("rope_theta") or default_theta)
    if kind == "default":
        return Rope(kind=kind, theta=theta)
    if kind == "linear":
        return Rope(kind=kind, theta=theta, factor=float(given["factor"]))
    # The key beside rope_parameters wins over the one inside it, as in transformers
    trained = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    trained = int(trained or config["max_position_embeddings"])
    if kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        return Rope(
            kind=kind,
            theta=theta,
            factor=float(given["factor"]),
            trained_positions=trained,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return Rope(
        kind=kind,
        theta=theta,
        factor=float(given["factor"]),
        trained_positions=trained,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given),
    )


def _yarn_attention_factor(given: dict[str, Any]) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def grow(weight: float) -> float:
        return 1.0 if given["factor"] <= 1 else 0.1 * weight * math.log(given["factor"]) + 1.0

    weight, weight_all = given.get("mscale"), given.get("mscale_all_dim")
    return grow(weight) / grow(weight_all) if weight and weight_all else grow(1)


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
class Turn:
    """Cosines and sines of some tokens, [tokens, 1, head_size / 2] each, ready to rotate [tokens, heads, head_size]."""

    cos: Tensor
    sin: Tensor

    def tile(self, start: int, stop: int) -> "Turn":
        return Turn(self.cos[start:stop], self.sin[start:stop])


def turn(rope: Rope, head_size: int, positions: Tensor, dtype: torch.dtype) -> Turn:
    inverse = inverse_frequencies(rope, head_size).to(positions.device, torch.float64)
    angles = positions.to(torch.float64)[:, None, None] * inverse
    return Turn((angles.cos() * rope.attention_factor).to(dtype), (angles.sin() * rope.attention_factor).to(dtype))


def rotate(x_THD: Tensor, turn: Turn) -> Tensor:
    """Turn the pairs (feature i, feature i + head_size / 2), the order of Hugging Face weights."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin), dim=-1)
