"""What a model is: its sizes and the few choices in which the supported families differ.

A Spec is read from a Hugging Face `config.json` and says everything the mathematics needs. What the mathematics
could not honour (a sliding window, another activation, quantized weights) is refused here, before anything is read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ithaca.base.errors import ModelError
from ithaca.model.config_json import entries, real, whole
from ithaca.model.rope import Rope, read_rope

PEAK_FLOPS = 989e12  # a second, Hopper's dense bf16: the base of causal MFU


@dataclass(frozen=True)
class _Family:
    """What `transformers` assumes for a model type where its config.json is silent."""

    bias: str  # 'none', 'qkv', or 'option': the key attention_bias decides, for the output projection too
    positions: int  # max_position_embeddings
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    kv_heads: int | None = None  # None: as many as query heads
    head_size: int | None = None  # None: hidden / heads
    slides: str = "never"  # which layers a sliding window is for: 'never', 'all', 'late', 'without rope'
    window: int | None = 4096
    mlp_bias: bool = False  # whether the key mlp_bias is honoured


FAMILIES = {
    "llama": _Family("option", 2048, mlp_bias=True),
    "mistral": _Family("none", 131072, kv_heads=8, slides="all"),
    "qwen2": _Family("qkv", 32768, kv_heads=32, slides="late"),
    "qwen3": _Family("option", 32768, qk_norm=True, kv_heads=32, head_size=128, slides="late"),
    "smollm3": _Family(
        "option",
        32768,
        tied=True,
        theta=2e6,
        kv_heads=4,
        mlp_bias=True,
        slides="without rope",
        window=None,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The sizes and choices of one decoder."""

    family: str  # the model_type of config.json
    vocab: int
    hidden: int
    layers: int
    heads: int  # query heads
    kv_heads: int
    head_size: int
    mlp: int  # width of the feed-forward layer
    norm_eps: float
    tied: bool  # the head is the embedding table
    qk_norm: bool  # queries and keys are normed per head before rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    rope: Rope
    rope_layers: tuple[bool, ...]  # which layers rotate their queries and keys
    post_norm: bool = False  # attention's and the MLP's outputs are normed instead of their inputs, as in OLMo 2

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def with_layers(self, layers: int) -> "Spec":
        """The same model with its first layers alone."""
        return replace(self, layers=layers, rope_layers=self.rope_layers[:layers])

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights of one block, by their Hugging Face name within the layer."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        linear = {
            "self_attn.q_proj": (q, self.hidden, self.qkv_bias),
            "self_attn.k_proj": (kv, self.hidden, self.qkv_bias),
            "self_attn.v_proj": (kv, self.hidden, self.qkv_bias),
            "self_attn.o_proj": (self.hidden, q, self.o_bias),
            "mlp.gate_proj": (self.mlp, self.hidden, self.mlp_bias),
            "mlp.up_proj": (self.mlp, self.hidden, self.mlp_bias),
            "mlp.down_proj": (self.hidden, self.mlp, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {} if self.post_norm else {"input_layernorm.weight": (self.hidden,)}
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_size,)
        shapes["post_attention_layernorm.weight"] = (self.hidden,)
        if self.post_norm:
            shapes["post_feedforward_layernorm.weight"] = (self.hidden,)
        return shapes

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight of the model by its Hugging Face name, in the order of the forward pass."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        block = self.block_shapes()
        for layer in range(self.layers):
            for name, shape in block.items():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def parameters(self) -> int:
        """How many numbers the model holds; a tied table counts once."""
        block = sum(math.prod(shape) for shape in self.block_shapes().values())
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def flops_per_token(self, attended: float) -> float:
        """FLOPs of one training step per token, causal: 6·N + 6·L·Hq·D·S, no credit for recomputation.

        N leaves the embedding table out (a lookup) and counts the head, tied or not. `attended` is S for one
        document, Σ length² / S for several.
        """
        table = self.vocab * self.hidden
        matrices = self.parameters() - (0 if self.tied else table)
        return 6 * matrices + 6 * self.layers * self.heads * self.head_size * attended


def read_spec(config: Mapping[str, Any]) -> Spec:
    """The Spec of a parsed `config.json`; refuses what Ithaca would compute wrongly."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(f"model type {kind!r} is not supported: supported are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    hidden, heads, layers = (
        whole(config, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    # A null means one per query head; only a missing key means the family's number
    kv_heads = whole(
        config, "num_key_value_heads", heads if "num_key_value_heads" in config else family.kv_heads or heads
    )
    head_size = whole(config, "head_dim", family.head_size or hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads do not divide into {kv_heads} key/value heads in config.json")
    if head_size % 2:
        raise ModelError(f"head size {head_size} is odd: rope turns features in pairs, so it must be even")
    rope_layers = _rope_layers(config, kind, layers)
    _refuse_unsupported(config, family, rope_layers)
    bias = family.bias == "qkv" or (family.bias == "option" and bool(config.get("attention_bias")))
    return Spec(
        family=kind,
        vocab=whole(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp=whole(config, "intermediate_size"),
        norm_eps=real(config, "rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qk_norm=family.qk_norm,
        qkv_bias=bias,
        o_bias=bias and family.bias == "option",
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        rope=read_rope(config, family.theta, family.positions),
        rope_layers=rope_layers,
    )


def _refuse_unsupported(config: Mapping[str, Any], family: _Family, rope_layers: tuple[bool, ...]) -> None:
    if config.get("quantization_config"):
        raise ModelError("the weights are quantized (quantization_config), which cannot be trained: use the plain ones")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act '{activation}' is not supported: only silu is")
    if config.get("attention_dropout"):
        raise ModelError(f"attention_dropout {config['attention_dropout']} is not supported: set it to 0")
    slides = _slides(config, family, rope_layers)
    if slides:
        raise ModelError(f"{slides} makes a sliding window, which is not supported: only full attention is")


def _slides(config: Mapping[str, Any], family: _Family, rope_layers: tuple[bool, ...]) -> str | None:
    """The keys that give some layer a sliding window, by the rules of `transformers`; None if no layer has one."""
    types, window = entries(config, "layer_types"), config.get("sliding_window", family.window)
    if types is not None and "sliding_attention" in types:
        return "'sliding_attention' in layer_types"
    if window is None or family.slides == "never":
        return None
    if family.slides == "all":
        return f"sliding_window {window} (null means none)"
    late = whole(config, "max_window_layers", 28) < len(rope_layers)
    some = late if family.slides == "late" else not all(rope_layers)
    if types is None and config.get("use_sliding_window") and some:
        return f"use_sliding_window with sliding_window {window}"
    return None


def _rope_layers(config: Mapping[str, Any], kind: str, layers: int) -> tuple[bool, ...]:
    if kind != "smollm3":
        return (True,) * layers
    flags = entries(config, "no_rope_layers")
    if flags is None:
        interval = whole(config, "no_rope_layer_interval", 4)
        flags = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) < layers:
        raise ModelError(f"no_rope_layers has {len(flags)} entries for {layers} layers in config.json")
    return tuple(bool(flag) for flag in flags[:layers])


@dataclass(frozen=True)
class Heads:
    """Some of the heads, by index: query heads, and the key/value heads that they read."""

    q: Sequence[int]
    kv: Sequence[int]

    @staticmethod
    def all(spec: Spec) -> "Heads":
        return Heads(range(spec.heads), range(spec.kv_heads))

    @staticmethod
    def keys_only(spec: Spec) -> "Heads":
        """No query: what K and V cost alone."""
        return Heads(range(0), range(spec.kv_heads))


def runs(heads: Sequence[int]) -> list[range]:
    """Heads in ascending order as runs of consecutive ones; no heads are one empty run."""
    if isinstance(heads, range):
        return [heads]
    edges = [0, *(at for at in range(1, len(heads)) if heads[at] != heads[at - 1] + 1), len(heads)]
    return [range(heads[start], heads[stop - 1] + 1) for start, stop in pairwise(edges)] if heads else [range(0)]
