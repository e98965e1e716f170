"""Parameters sharded over ranks by FSDP2.

FSDP2 gathers and frees each block as one unit. An untied head with the final norm is a unit too, and so is an untied
embedding table, which is gathered only while tokens are embedded. A tied table stays gathered during a whole pass.

    ZeRO-3  parameters, gradients and optimizer states are sharded; weights are gathered for each pass over a block
    ZeRO-2  weights stay gathered from the first forward pass of a step to its last backward pass
    ZeRO-1  gradients stay whole as well, and are reduced once, in the last backward pass of a step

Shards are at least fp32, gathered copies have the dtype of the computation, and gradients are reduced in at least fp32.
FSDP2 averages gradients over ranks. Ithaca's loss is a sum over all ranks, so `total` multiplies by their number.
Tensor ranks have different parameters (tensor_parts.py), and FSDP2 cuts those of each over the other ranks. One rank
alone needs no FSDP2 under ZeRO-1 and 2 (one_rank.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ithaca.base.errors import InputError, RunError
from ithaca.base.owners import GATHERED, STATES, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.torch_private import discard_fsdp_gradients, drop_reduced, fsdp_backward_unfinished
from ithaca.model.decoder import Decoder, Unit, stored_name
from ithaca.model.source import Weights
from ithaca.parallel.axes import runs_alone
from ithaca.parallel.layout import row_range
from ithaca.parallel.mesh import Mesh
from ithaca.parallel.one_rank import drop_copies, prepare_one_rank
from ithaca.parallel.tensor_parts import TensorPart


def shard_parameters(decoder: Decoder, mesh: Mesh, zero: int, dtype: torch.dtype) -> None:
    """Shard the parameters over the mesh. They have no values yet."""
    if runs_alone(mesh.axes, zero):
        prepare_one_rank(decoder, mesh, dtype)
        return
    # Units are called with a function and with tensors that already have the right dtype
    policy = MixedPrecisionPolicy(dtype, at_least_fp32(dtype), cast_forward_inputs=False)
    units = [*decoder.blocks] if decoder.spec.tied else [*decoder.blocks, decoder.embedding, decoder.head]
    for unit in (*units, decoder):
        fully_shard(unit, mesh=mesh.parameters, mp_policy=policy, reshard_after_forward=zero == 3)
    if isinstance(decoder.embedding, FSDPModule):
        decoder.embedding.set_unshard_in_backward(False)  # its gradient depends on the tokens alone


@owned_by(STATES)
def load(decoder: Decoder, mesh: Mesh, part: TensorPart, weights: Weights) -> None:
    """Allocate this rank's shards on its device and read only these from the source."""
    decoder.to_empty(device=mesh.device)
    for name, parameter in shards(decoder):
        rows, *columns = shard_place(name, parameter, part, mesh)
        shard = parameter.to_local().detach()
        assert shard.shape[0] == len(rows), "FSDP2 cuts rows as row_range does"
        if rows:
            weights.read(name, rows, shard, *columns)


def shard_place(name: str, parameter: DTensor, part: TensorPart, mesh: Mesh) -> tuple[range, ...]:
    """Where this rank's shard lies in the whole weight: a range for each dimension. FSDP2 cuts its rows."""
    rows, *columns = part.place(name)
    return rows[slice_of(row_range(parameter.shape[0], mesh.parameter_rank, mesh.parameter_ranks))], *columns


def shards(decoder: Decoder) -> Iterator[tuple[str, DTensor]]:
    """This rank's shard of every parameter, by its Hugging Face name. Frees gathered copies first."""
    free_gathered(decoder)
    for name, parameter in decoder.named_parameters():
        assert isinstance(parameter, DTensor)
        yield stored_name(name), parameter


def slice_of(places: range) -> slice:
    return slice(places.start, places.stop)


def host_twin(tensor: DTensor, memory: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor sharded like `tensor` whose local part is this flat host memory; `mesh` is `host_mesh` of its mesh."""
    local = memory.view(tensor.dtype).view(tensor.to_local().shape)
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def whole_tensors(
    decoder: Decoder, mesh: Mesh, part: TensorPart, gradients: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, or its gradient, by its Hugging Face name, whole and on the CPU.

    Collective: all ranks must iterate.
    """
    parameters = dict(shards(decoder))
    for name, shape in part.spec.shapes():
        shard = parameters[name].grad if gradients else parameters[name]
        assert isinstance(shard, DTensor)
        mine = shard.full_tensor().detach()
        yield name, mine.cpu() if mine.shape == shape else _from_parts(name, shape, mine, mesh, part)


def _from_parts(name: str, shape: tuple[int, ...], mine: Tensor, mesh: Mesh, part: TensorPart) -> Tensor:
    """A weight that tensor ranks have parts of, on the CPU. Collective."""
    whole = torch.empty(shape, dtype=mine.dtype)
    for rank in range(part.ranks):
        place = replace(part, rank=rank).place(name)
        theirs = mine.contiguous() if rank == part.rank else mine.new_empty([len(side) for side in place])
        dist.broadcast(theirs, group=mesh.tensor_group, group_src=rank)
        whole[tuple(slice_of(side) for side in place)] = theirs.cpu()
    return whole


def prepare_pass(decoder: Decoder, zero: int, first: bool, last: bool) -> None:
    """Tell FSDP2 what to keep after a forward pass. `first` and `last`: whether it is a step's first or last pass."""
    # FSDP2 would give no gradient any more, and no error
    if isinstance(decoder, FSDPModule) and fsdp_backward_unfinished(decoder):
        raise RunError(
            "the last backward pass ended in an error, and gradients would be wrong from now on: "
            "apply the model anew, or start the run again from its last checkpoint"
        )
    if first:
        free_gathered(decoder)  # an optimizer step may have made gathered copies stale
    if isinstance(decoder, FSDPModule):
        decoder.set_reshard_after_backward(zero == 3 or last)
        decoder.set_requires_gradient_sync(zero > 1 or last)


Readable = Callable[[], AbstractContextManager[dict[str, Tensor]]]  # gathers the weights of a unit, to be read


def readable(unit: nn.Module) -> Readable:
    """A function that gathers the weights of a unit. It can be called until this pass has gone backward."""
    if isinstance(unit, FSDPModule):
        return lambda: opened(unit)
    # On one rank: the copies of this pass, even if others are made before its backward. A tied table belongs to the
    # decoder, and is gathered whenever a block runs
    assert isinstance(unit, Unit)
    kept = unit.weights()
    return lambda: nullcontext({name: weight.detach() for name, weight in kept.items()})


@contextmanager
def opened(unit: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Read the weights of a unit outside of its own call: gather them meanwhile, unless they are gathered already."""
    assert isinstance(unit, FSDPModule)
    gathered = not any(isinstance(weight, DTensor) for weight in unit.parameters())
    with owned_by(GATHERED):
        unit.unshard()
    try:
        yield {name: weight.detach() for name, weight in unit.named_parameters()}
    finally:
        if not gathered:
            unit.reshard()


def free_gathered(decoder: Decoder) -> None:
    """Free gathered weights, so that the shards are the parameters again."""
    if not isinstance(decoder, FSDPModule):
        drop_copies(decoder)
        return
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def discard_unreduced(decoder: Decoder) -> None:
    """Drop the gradients that ZeRO-1 keeps unreduced until the last pass of a step."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            discard_fsdp_gradients(module)


def settle(decoder: Decoder) -> None:
    """Wait until all gradients so far are reduced, and free the GPU memory that they and gathered weights took.

    FSDP2 keeps a reduced gradient until the next unit's comes, and the allocator keeps memory that FSDP2's streams
    freed.
    """
    on_gpu = next(decoder.parameters()).is_cuda
    if isinstance(decoder, FSDPModule):
        drop_reduced(decoder, torch.cuda.current_stream() if on_gpu else None)
        if on_gpu:
            torch.cuda.empty_cache()


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: Mesh) -> Tensor:
        ctx.ranks, ctx.spent = mesh.size // mesh.tensor, False  # FSDP2 averages over the others
        value = value.clone()
        dist.all_reduce(value, group=mesh.group)
        return value.clone()  # gloo's thread may keep the reduced tensor alive, and with it the graph of the pass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Checked here, before FSDP2 starts its backward pass, which an error would leave half done
        if ctx.spent:
            raise InputError(
                "backward was called twice on one loss, whose gradients are kept once: call the model again"
            )
        ctx.spent = True
        return grad * ctx.ranks, None


def total(value: Tensor, mesh: Mesh) -> Tensor:
    """The sum of a local scalar over all ranks. Its gradient is multiplied, because FSDP2 averages gradients."""
    return _Total.apply(value, mesh)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Run as under `no_grad` in inference mode: FSDP2 cannot gather into inference tensors, and tapes outlive them."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
