"""The rotary embedding as `config.json` describes it. rotary.py computes its numbers. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ithaca.base.errors import ModelError, shown
from ithaca.model.config_json import flag, real, table, whole

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
        raise ModelError(f"rope type {shown(kind)} is not supported: supported are {', '.join(ROPE_TYPES)}")
    missing = [name for name in _NEEDED[kind] if given.get(name) is None]
    if missing:
        raise ModelError(f"rope type '{kind}' needs {' and '.join(missing)} in config.json")
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor {shown(share)} is not supported: only 1.0, rope on the whole head, is")
    # Below 1 the frequencies would grow from pair to pair, in fp32 to infinity
    theta = real(given, "rope_theta", real(config, "rope_theta", default_theta, least=1), least=1)
    if kind == "default":
        return Rope(kind=kind, theta=theta)
    rope = Rope(kind=kind, theta=theta, factor=real(given, "factor", least=1, most=1e9))
    if kind == "linear":
        return rope
    # The key beside rope_parameters wins over the one inside it, as in transformers
    inside = whole(
        given, "original_max_position_embeddings", whole(config, "max_position_embeddings", default_positions)
    )
    rope = replace(rope, trained_positions=whole(config, "original_max_position_embeddings", inside))
    if kind == "llama3":
        low, high = (real(given, name, least=1e-3, most=1e6) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise ModelError(
                f"config.json gives low_freq_factor as {low} and high_freq_factor as {high}: the second must be larger"
            )
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    return _yarn(given, rope)


def _yarn(given: Mapping[str, Any], rope: Rope) -> Rope:
    fast, slow = (real(given, name, default, 1e-3, 1e6) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast < slow:
        raise ModelError(f"config.json gives beta_fast as {fast} and beta_slow as {slow}: the first must be larger")
    if rope.theta == 1:
        raise ModelError("config.json gives rope_theta as 1.0: rope type 'yarn' needs a number above 1")
    return replace(
        rope,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(given, "truncate", True),
        attention_factor=yarn_attention_factor(given, rope.factor),
    )


def yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """The number that yarn multiplies cosines and sines by: the given one, or what follows from the factor."""
    # Zero is taken for missing, as in transformers
    named = ("mscale", "mscale_all_dim")
    scales = [None if given.get(name) in (None, 0) else real(given, name, most=1e3) for name in named]
    if given.get("attention_factor") is not None:
        return real(given, "attention_factor", most=1e3)

    def grow(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = scales
    return grow(numerator) / grow(denominator) if numerator and denominator else grow(1)
