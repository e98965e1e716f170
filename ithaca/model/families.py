"""The supported model families, and how a `config.json` of one becomes a Spec.

A family is an entry of FAMILIES: the defaults of `transformers` for the keys that a config.json leaves out. Whatever
the mathematics cannot compute (a sliding window, another activation, quantized weights) is refused here, before any
weight is read. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ithaca.base.errors import ModelError, shown
from ithaca.model.config_json import entries, flag, real, whole
from ithaca.model.rope import read_rope
from ithaca.model.spec import Spec

LAYERS, PARAMETERS = 10_000, 10**15  # far beyond any model; more would overflow, or take all memory, later


@dataclass(frozen=True)
class Family:
    """The defaults of `transformers` for keys that the config.json of a model type leaves out."""

    bias: str  # 'none', 'qkv', or 'option': the key attention_bias decides, for the output projection too
    positions: int  # max_position_embeddings
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    kv_heads: int | None = None  # None: as many as query heads
    head_size: int | None = None  # None: hidden / heads
    slides: str = "never"  # which layers have a sliding window: 'never', 'all', 'late', 'without rope'
    window: int | None = 4096
    skips_rope: bool = False  # some layers have no rotary embedding (no_rope_layers, no_rope_layer_interval)
    mlp_bias: bool = False  # whether the family knows the key mlp_bias


FAMILIES = {
    "llama": Family("option", 2048, mlp_bias=True),
    "mistral": Family("none", 131072, kv_heads=8, slides="all"),
    "qwen2": Family("qkv", 32768, kv_heads=32, slides="late"),
    "qwen3": Family("option", 32768, qk_norm=True, kv_heads=32, head_size=128, slides="late"),
    "smollm3": Family(
        "option",
        32768,
        tied=True,
        theta=2e6,
        kv_heads=4,
        mlp_bias=True,
        slides="without rope",
        skips_rope=True,
        window=None,
    ),
}


def read_spec(config: Mapping[str, Any]) -> Spec:
    """The Spec of a parsed `config.json`. Raises ModelError for anything that Ithaca would compute wrongly."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"model type {shown(kind)} is not supported: supported are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    hidden, heads = (whole(config, name) for name in ("hidden_size", "num_attention_heads"))
    layers = whole(config, "num_hidden_layers", most=LAYERS)
    # null means one per query head; only without the key is it the family's number
    kv_heads = whole(
        config, "num_key_value_heads", heads if "num_key_value_heads" in config else family.kv_heads or heads
    )
    head_size = whole(config, "head_dim", family.head_size or hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads do not divide into {kv_heads} key/value heads in config.json")
    if head_size % 2:
        raise ModelError(f"head size {head_size} is odd: it must be even, because rotary embedding rotates pairs")
    rope_layers = _rope_layers(config, family, layers)
    _refuse_unsupported(config, family, rope_layers)
    bias = family.bias == "qkv" or (family.bias == "option" and flag(config, "attention_bias"))
    spec = Spec(
        family=kind,
        vocab=whole(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp=whole(config, "intermediate_size"),
        norm_eps=real(config, "rms_norm_eps", 1e-6, most=1),
        tied=flag(config, "tie_word_embeddings", family.tied),
        qk_norm=family.qk_norm,
        qkv_bias=bias,
        o_bias=bias and family.bias == "option",
        mlp_bias=family.mlp_bias and flag(config, "mlp_bias"),
        rope=read_rope(config, family.theta, family.positions),
        max_position_embeddings=whole(config, "max_position_embeddings", family.positions),
        rope_layers=rope_layers,
    )
    if spec.parameters() > PARAMETERS:
        raise ModelError(
            f"config.json makes a model of {spec.parameters()} parameters: at most {PARAMETERS} are possible"
        )
    return spec


def _refuse_unsupported(config: Mapping[str, Any], family: Family, rope_layers: tuple[bool, ...]) -> None:
    if config.get("quantization_config"):
        raise ModelError("the weights are quantized (quantization_config), which cannot be trained: use the plain ones")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {shown(activation)} is not supported: only silu is")
    if config.get("attention_dropout"):
        raise ModelError(f"attention_dropout {shown(config['attention_dropout'])} is not supported: set it to 0")
    slides = _slides(config, family, rope_layers)
    if slides:
        raise ModelError(f"{slides} makes a sliding window, which is not supported: only full attention is")
    others = [kind for kind in entries(config, "layer_types") or [] if kind != "full_attention"]
    if others:
        raise ModelError(f"{shown(others[0])} in layer_types is not supported: only 'full_attention' is")


def _slides(config: Mapping[str, Any], family: Family, rope_layers: tuple[bool, ...]) -> str | None:
    """The keys that give some layer a sliding window, by the rules of `transformers`; None if no layer has one."""
    types, window = entries(config, "layer_types"), config.get("sliding_window", family.window)
    if types is not None and "sliding_attention" in types:
        return "'sliding_attention' in layer_types"
    if window is None or family.slides == "never":
        return None
    if family.slides == "all":
        return f"sliding_window {shown(window)} (null means none)"
    late = whole(config, "max_window_layers", 28) < len(rope_layers)
    some = late if family.slides == "late" else not all(rope_layers)
    if types is None and flag(config, "use_sliding_window") and some:
        return f"use_sliding_window with sliding_window {shown(window)}"
    return None


def _rope_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Which layers have a rotary embedding."""
    if not family.skips_rope:
        return (True,) * layers
    flags = entries(config, "no_rope_layers")
    if flags is None:
        interval = whole(config, "no_rope_layer_interval", 4)
        flags = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) < layers:
        raise ModelError(f"no_rope_layers has {len(flags)} entries for {layers} layers in config.json")
    odd = [item for item in flags[:layers] if type(item) not in (bool, int) or item not in (0, 1)]
    if odd:
        raise ModelError(f"config.json has {shown(odd[0])} in no_rope_layers: 1 or 0 is needed for each layer")
    return tuple(bool(item) for item in flags[:layers])
