"""The weights of a model as modules: weights that are gathered, freed and reduced together are one module.

The modules hold weights and compute nothing. Calling one passes its weights to a function: `block(run, x)` is
`run(weights of the block, x)`. So FSDP2, which wraps the call to gather the weights before it and free them after it,
needs to know nothing of schedules. An untied head is one module with the final norm. A tied head is the embedding
table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.base.precision import at_least_fp32
from ithaca.model.rotary import Rotary
from ithaca.model.spec import Spec


class Unit(nn.Module):
    """Weights by dotted names, which are gathered and freed together."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.copies: dict[str, Tensor] | None = None  # used in place of the parameters; None: none are made

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        return run(self.weights(), *args)

    def weights(self) -> dict[str, Tensor]:
        """The tensors to compute with, by name: the copies, or else the parameters."""
        if self.copies is not None:
            return self.copies
        return {name: with_grad_dtype(weight) for name, weight in self.named_parameters()}


class Decoder(nn.Module):
    """Embedding, blocks and head of a model. On the meta device, the default, they have no memory yet."""

    def __init__(self, spec: Spec, dtype: torch.dtype, device: torch.device | str = "meta"):
        super().__init__()
        self.spec, self.rotary = spec, Rotary(spec.rope, spec.head_size)
        self.embedding = Unit({"weight": (spec.vocab, spec.hidden)}, dtype, device)
        self.blocks = nn.ModuleList(Unit(spec.block_shapes(), dtype, device) for _ in range(spec.layers))
        head: dict[str, tuple[int, ...]] = {"norm.weight": (spec.hidden,)}
        if not spec.tied:
            head["weight"] = (spec.vocab, spec.hidden)
        self.head = Unit(head, dtype, device)

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        return run(self, *args)

    def embed(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Call a function with the embedding table. A tied table belongs to the decoder's own unit."""
        if self.spec.tied:
            return run(self.table())
        return self.embedding(lambda w: run(w["weight"]))

    def table(self) -> Tensor:
        """The tied table, which is embedding and head."""
        return self.embedding.weights()["weight"]


def with_grad_dtype(weight: Tensor) -> Tensor:
    """The weight, with its gradient's dtype set to at least fp32, so that autograd does not round it."""
    weight.grad_dtype = at_least_fp32(weight.dtype)
    return weight


def stored_name(name: str) -> str:
    """The Hugging Face name of a parameter of the Decoder."""
    if name.startswith("blocks."):
        return "model.layers." + name.removeprefix("blocks.")
    return {
        "embedding.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }[name]
