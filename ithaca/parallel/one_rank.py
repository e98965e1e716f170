"""Weights of a job of one rank under ZeRO-1 and 2, without FSDP2.

One rank has nothing to gather and nothing to reduce. FSDP2 would still copy every weight into a flat buffer, from there
into another one and out of it, every gradient likewise, and its hooks take most of the host's time in small models.
Here, before the first forward pass of a step, all weights are cast to the dtype of the computation together. That costs
6 bytes of traffic a parameter and step, and the memory of the copies, which ZeRO-1 and 2 need anyway. If the weights
have that dtype already, no copy is made.

The parameters stay DTensors over the one rank, so optimizer, clipping and checkpoints see what they always see. Blocks
compute with leaves of the autograd graph: the copies, or the weights' own memory. As soon as backward has the gradient
of a leaf, in at least fp32, it becomes the parameter's `grad`, or is added to it. It is not copied.

Copies are made anew in every step and never written to again. A pass whose backward is still to come keeps its own.
After its backward it keeps none, even if the caller keeps its loss (`_OwnGraph`).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from ithaca.base.owners import GATHERED, GRADIENTS, owned_by
from ithaca.base.torch_private import copy_all, local_tensor, run_gradient_hooks, sharded_like
from ithaca.model.decoder import Decoder, Unit, with_grad_dtype
from ithaca.parallel.mesh import Mesh


def prepare_one_rank(decoder: Decoder, mesh: Mesh, dtype: torch.dtype) -> None:
    """Make the parameters DTensors, and make copies of this dtype for each call of the decoder. No values yet."""
    assert mesh.parameters.size() == 1
    for module in decoder.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = DTensor.from_local(parameter.detach(), mesh.parameters, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(shard))
    decoder.register_forward_pre_hook(lambda *_: _make_copies(decoder, dtype))
    decoder.register_forward_hook(lambda *call: _with_own_graph(call[-1]))


def drop_copies(decoder: Decoder) -> None:
    """Drop the copies, so that the next call of the decoder makes new ones: the weights may have changed."""
    for unit in _units(decoder):
        unit.copies = None


def _units(decoder: Decoder) -> list[Unit]:
    return [decoder.embedding, *decoder.blocks, decoder.head]  # pyrefly: ignore


def _make_copies(decoder: Decoder, dtype: torch.dtype) -> None:
    """Give every unit leaves for its weights, unless they have some from an earlier pass of the step."""
    if decoder.embedding.copies is None:
        for parameter, leaf in make_leaves(decoder, dtype):
            if parameter.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))


@owned_by(GATHERED)
def make_leaves(decoder: Decoder, dtype: torch.dtype) -> list[tuple[nn.Parameter, Tensor]]:
    """Give every unit new leaves for its weights. Return each parameter with its leaf, which gets its gradient."""
    named = [(unit, name, parameter) for unit in _units(decoder) for name, parameter in unit.named_parameters()]
    copies = [local_tensor(parameter).detach() for _, _, parameter in named]
    if any(copy.dtype != dtype for copy in copies):
        weights, copies = copies, [torch.empty_like(weight, dtype=dtype) for weight in copies]
        copy_all(copies, weights)
    for unit in _units(decoder):
        unit.copies = {}
    leaves = []
    for (unit, name, parameter), copy in zip(named, copies, strict=True):
        assert unit.copies is not None
        leaf = unit.copies[name] = with_grad_dtype(copy).requires_grad_(parameter.requires_grad)
        leaves.append((parameter, leaf))
    return leaves


def _move_gradient(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Move the gradient of a leaf to its parameter, which may have a gradient already."""
    assert leaf.grad is not None
    with owned_by(GRADIENTS):
        gradient, leaf.grad = leaf.grad.detach(), None
    give_gradient(parameter, gradient)


def give_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Set the gradient of a parameter from a local gradient, or add to it."""
    if parameter.grad is None:
        parameter.grad = sharded_like(parameter, gradient)
    else:
        local_tensor(parameter.grad).add_(gradient)
    run_gradient_hooks(parameter)  # as FSDP2 does


def _with_own_graph(output: Any) -> Tensor:
    """The same number, at the end of an autograd graph of its own (`_OwnGraph`)."""
    if not output.requires_grad:
        return output
    return _OwnGraph.apply(torch.zeros((), device=output.device, requires_grad=True), [output])


class _OwnGraph(torch.autograd.Function):
    """Runs backward through the output's graph once, and frees that graph.

    Autograd's nodes hold the leaves for as long as a loss lives that was computed from them: until the next pass has
    gone forward in most training loops, or longer. Each would hold copies of all weights.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: list[Tensor]) -> Tensor:  # noqa: ARG004
        ctx.output = output  # in a list, which autograd does not look into
        return output[0].detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None]:
        assert ctx.output, "backward was called twice on one loss"
        torch.autograd.backward(ctx.output.pop(), scale)
        return None, None
