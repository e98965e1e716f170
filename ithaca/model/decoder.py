"""The weights of a model as modules: what is gathered, freed and reduced together is one module.

The modules hold weights and compute nothing. Calling one opens it to a function: `block(run, x)` is
`run(weights of the block, x)`, and whatever wraps the call (FSDP2 gathers the weights before it and frees them after)
needs to know nothing of schedules. An untied head stands with the final norm; a tied one is the embedding table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ithaca.base.precision import at_least_fp32
from ithaca.model.rotary import Rotary
from ithaca.model.spec import Spec


class Unit(nn.Module):
    """Weights by dotted names, opened together."""

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

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        return run({name: _summing(weight) for name, weight in self.named_parameters()}, *args)


class Decoder(nn.Module):
    """Embedding, blocks and head, without values: memory on the meta device until they are loaded."""

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
        """Give the embedding table to a function. A tied one is not a unit of its own, but open with the decoder."""
        if self.spec.tied:
            return run(self.table())
        return self.embedding(lambda w: run(w["weight"]))

    def table(self) -> Tensor:
        """A tied table, which is the head as well."""
        return _summing(self.embedding.get_parameter("weight"))


def _summing(weight: Tensor) -> Tensor:
    """The weight, told that its gradient comes in at least fp32 and is not to be rounded to its own dtype."""
    weight.grad_dtype = at_least_fp32(weight.dtype)
    return weight


def stored_name(name: str) -> str:
    """The Hugging Face name of one of the Decoder's parameters."""
    if name.startswith("blocks."):
        return "model.layers." + name.removeprefix("blocks.")
    return {
        "embedding.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }[name]
