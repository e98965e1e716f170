"""The slow twin of the whole model: one sequence, all logits, full masks, plain autograd, any dtype.

It takes weights by their Hugging Face names and shares nothing with the fast paths but the rotary table and the Spec.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ithaca.model.rotary import Rotary
from ithaca.model.spec import Spec


def logits(spec: Spec, w: Mapping[str, Tensor], tokens_S: Tensor, documents_S: Tensor) -> Tensor:
    """[S, vocabulary]: tokens see earlier tokens of the same document."""
    documents_S = runs(documents_S)
    places = torch.arange(len(tokens_S))
    same = documents_S[:, None] == documents_S[None, :]
    visible = same & (places[None, :] <= places[:, None])
    starts = torch.stack([places[documents_S == document].min() for document in documents_S])
    rope = Rotary(spec.rope, spec.head_size).at(places - starts, w["model.embed_tokens.weight"].dtype)
    x = w["model.embed_tokens.weight"][tokens_S]
    for layer in range(spec.layers):
        block = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in w.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = _block(spec, block, x, visible, (rope.cos, rope.sin) if spec.rope_layers[layer] else None)
    head = w["model.embed_tokens.weight"] if spec.tied else w["lm_head.weight"]
    return _norm(x, w["model.norm.weight"], spec.norm_eps) @ head.T


def loss(spec: Spec, w: Mapping[str, Tensor], tokens_S: Tensor, labels_S: Tensor, documents_S: Tensor) -> Tensor:
    """Σ of −log p(label of the next token), over tokens whose successor is a labelled one of the same document."""
    documents_S = runs(documents_S)
    log_p = logits(spec, w, tokens_S, documents_S).log_softmax(-1)
    terms = [
        -log_p[place, labels_S[place + 1]]
        for place in range(len(tokens_S) - 1)
        if labels_S[place + 1] != -100 and documents_S[place] == documents_S[place + 1]
    ]
    return torch.stack(terms).sum() if terms else log_p.sum() * 0


def runs(documents_S: Tensor) -> Tensor:
    """Documents numbered in order: an id that comes back later is another document."""
    new = documents_S[1:] != documents_S[:-1]
    return torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))


def _block(
    spec: Spec, w: Mapping[str, Tensor], x: Tensor, visible: Tensor, rope: tuple[Tensor, Tensor] | None
) -> Tensor:
    def linear(name: str, y: Tensor) -> Tensor:
        return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    h = _norm(x, w["input_layernorm.weight"], spec.norm_eps)
    outputs = []
    q_all, k_all, v_all = (linear(f"self_attn.{part}_proj", h).split(spec.head_size, -1) for part in "qkv")
    for head in range(spec.heads):
        q, k, v = q_all[head], k_all[head // spec.group], v_all[head // spec.group]
        if spec.qk_norm:
            q = _norm(q, w["self_attn.q_norm.weight"], spec.norm_eps)
            k = _norm(k, w["self_attn.k_norm.weight"], spec.norm_eps)
        if rope:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        scores = (q @ k.T * spec.head_size**-0.5).masked_fill(~visible, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    x = x + linear("self_attn.o_proj", torch.cat(outputs, -1))
    h = _norm(x, w["post_attention_layernorm.weight"], spec.norm_eps)
    gate = linear("mlp.gate_proj", h)
    return x + linear("mlp.down_proj", gate * gate.sigmoid() * linear("mlp.up_proj", h))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[:, half:], x[:, :half]), -1)
    return x * torch.cat((cos[:, 0], cos[:, 0]), -1) + rotated * torch.cat((sin[:, 0], sin[:, 0]), -1)
