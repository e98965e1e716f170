"""What a model is: its sizes and the few choices in which the supported families differ.

A Spec is read from a Hugging Face `config.json` and says everything the mathematics needs. What the mathematics
could not honour (a sliding window, another activation, quantized weights) is refused here, before anything is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ithaca.errors import ModelError
from ithaca.model.rope import Rope, read_rope


@dataclass(frozen=True)
class _Family:
    """What `transformers` assumes for a model type where its config.json is silent."""

    bias: str  # 'none', 'qkv', or 'option': the key attention_bias decides, for the output projection too
    qk_norm: bool = False
    tied: bool = False
    theta: float = 10000.0
    kv_heads: int | None = None  # None: as many as query heads
    head_size: int | None = None  # None: hidden / heads
    window: str = "never"  # 'always' applies sliding_window, 'option' only when use_sliding_window is set
    mlp_bias: bool = False  # whether the key mlp_bias is honoured


FAMILIES = {
    "llama": _Family(bias="option", mlp_bias=True),
    "mistral": _Family(bias="none", kv_heads=8, window="always"),
    "qwen2": _Family(bias="qkv", kv_heads=32, window="option"),
    "qwen3": _Family(bias="option", qk_norm=True, kv_heads=32, head_size=128, window="option"),
    "smollm3": _Family(bias="option", tied=True, theta=2000000.0, kv_heads=4, window="option", mlp_bias=True),
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


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
    rope_layers: tuple[bool, ...]  # which layers turn their queries and keys

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

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
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (self.hidden,)}
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_size,)
        shapes["post_attention_layernorm.weight"] = (self.hidden,)
        return shapes

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight of the model by its Hugging Face name, in the order of the forward pass."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in self.block_shapes().items():
                yield f"model.layers.{layer}.{name}", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def parameters(self) -> int:
        """How many numbers the model holds; a tied table counts once."""
        return sum(_product(shape) for _, shape in self.shapes())

    def flops_per_token(self, attended: float) -> float:
        """FLOPs of one training step per token, causal: 6·N + 6·L·Hq·D·S, no credit for recomputation.

        N leaves the embedding table out (a lookup) and counts the head, tied or not. `attended` is S for one
        document, Σ length² / S for several.
        """
        table = self.vocab * self.hidden
        matrices = self.parameters() - (0 if self.tied else table)
        return 6 * matrices + 6 * self.layers * self.heads * self.head_size * attended


def read_spec(config: dict[str, Any]) -> Spec:
    """The Spec of a parsed `config.json`; refuses what Ithaca would compute wrongly."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"model type '{kind}' is not supported: supported are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for name in _SIZES:
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ModelError(f"config.json gives {name} as {config.get(name)!r}: a positive number is needed")
    _refuse_unsupported(config, family)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", family.kv_heads) or heads
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads do not divide into {kv_heads} key/value heads in config.json")
    head_size = config.get("head_dim", family.head_size) or config["hidden_size"] // heads
    if head_size % 2:
        raise ModelError(f"head size {head_size} is odd: rope turns features in pairs, so it must be even")
    bias = family.bias == "qkv" or (family.bias == "option" and bool(config.get("attention_bias")))
    return Spec(
        family=kind,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp=config["intermediate_size"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        qk_norm=family.qk_norm,
        qkv_bias=bias,
        o_bias=bias and family.bias == "option",
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias")),
        rope=read_rope(config, family.theta),
        rope_layers=_rope_layers(config, kind, layers),
    )


def _refuse_unsupported(config: dict[str, Any], family: _Family) -> None:
    if config.get("quantization_config"):
        raise ModelError("the weights are quantized (quantization_config), which cannot be trained: use the plain ones")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act '{activation}' is not supported: only silu is")
    if config.get("attention_dropout"):
        raise ModelError(f"attention_dropout {config['attention_dropout']} is not supported: set it to 0")
    window = config.get("sliding_window", 4096 if family.window == "always" else None)
    slides = family.window == "always" or (family.window == "option" and config.get("use_sliding_window"))
    if (slides and window is not None) or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError(
            f"a sliding window of {window} tokens is not supported: set sliding_window to null in config.json "
            "if full attention is meant"
        )


def _rope_layers(config: dict[str, Any], kind: str, layers: int) -> tuple[bool, ...]:
    if kind != "smollm3":
        return (True,) * layers
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = config.get("no_rope_layer_interval", 4)
        flags = [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) < layers:
        raise ModelError(f"no_rope_layers has {len(flags)} entries for {layers} layers in config.json")
    return tuple(bool(flag) for flag in flags[:layers])


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
