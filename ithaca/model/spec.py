"""What a model is: its sizes, and the few choices in which the supported families differ.

A Spec says everything that the mathematics, the planner and the weight files need to know. families.py makes one from
a Hugging Face `config.json`. No torch here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ithaca.model.rope import Rope


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
    max_position_embeddings: int  # the context length that config.json names
    rope_layers: tuple[bool, ...]  # which layers rotate their queries and keys
    post_norm: bool = False  # attention's and the MLP's outputs are normed instead of their inputs, as in OLMo 2

    @property
    def group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def with_layers(self, layers: int) -> "Spec":
        """The same model with only its first layers."""
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
        """The number of parameters; a tied table counts once."""
        block = sum(math.prod(shape) for shape in self.block_shapes().values())
        return self.layers * block + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    def flops_per_token(self, attended: float) -> float:
        """FLOPs of one training step per token, causal: 6·N + 6·L·Hq·D·S, no credit for recomputation.

        N counts the head, tied or not, and not the embedding table, which is only looked up. `attended` is S for one
        document, Σ length² / S for several.
        """
        table = self.vocab * self.hidden
        matrices = self.parameters() - (0 if self.tied else table)
        return 6 * matrices + 6 * self.layers * self.heads * self.head_size * attended


@dataclass(frozen=True)
class Heads:
    """Some of the heads, by number: query heads, and the key/value heads that they read."""

    q: Sequence[int]
    kv: Sequence[int]

    @staticmethod
    def all(spec: Spec) -> "Heads":
        return Heads(range(spec.heads), range(spec.kv_heads))


def runs(heads: Sequence[int]) -> list[range]:
    """Heads in ascending order as runs of consecutive ones; no heads are one empty run."""
    if isinstance(heads, range):
        return [heads]
    edges = [0, *(at for at in range(1, len(heads)) if heads[at] != heads[at - 1] + 1), len(heads)]
    return [range(heads[start], heads[stop - 1] + 1) for start, stop in pairwise(edges)] if heads else [range(0)]
