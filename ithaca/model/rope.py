"""The rotary embedding as `config.json` describes it. rotary.py computes its numbers. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ithaca.base.errors import ModelError
from ithaca.model.config_json import real, table, whole

_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_TYPES = tuple(_NEEDED)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """How positions become angles. Only the numbers that the kind uses are set."""

    kind: str  # one of ROPE_TYPES
    theta: float
    factor: float = 1.0
    trained_positions: int = 0  # the context length before it was extended (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # cosines and sines are multiplied by it (yarn)


def read_rope(config: Mapping[str, Any], default_theta: float, default_positions: int) -> Rope:
    """The rope of a `config.json`, with the old keys (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    given = table(config, "rope_scaling") or table(config, "rope_parameters")
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
    theta = real(given, "rope_theta", real(config, "rope_theta", default_theta))
    if kind == "default":
        return Rope(kind=kind, theta=theta)
    rope = Rope(kind=kind, theta=theta, factor=real(given, "factor"))
    if kind == "linear":
        return rope
    # The key beside rope_parameters wins over the one inside it, as in transformers
    inside = whole(
        given, "original_max_position_embeddings", whole(config, "max_position_embeddings", default_positions)
    )
    rope = replace(rope, trained_positions=whole(config, "original_max_position_embeddings", inside))
    if kind == "llama3":
        low, high = real(given, "low_freq_factor"), real(given, "high_freq_factor")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    return replace(
        rope,
        beta_fast=real(given, "beta_fast", 32.0),
        beta_slow=real(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_yarn_attention_factor(given, rope.factor),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return real(given, "attention_factor")

    def grow(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return grow(real(given, "mscale")) / grow(real(given, "mscale_all_dim"))
    return grow(1)
