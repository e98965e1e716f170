"""Everything that Ithaca uses of torch beyond its public interface, and why.

A test (tests/base/test_torch_private.py) calls each function here, and another one fails if a different file uses a
private name of torch. When a new torch breaks something, this is the file to mend.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "tree_leaves"]
# TorchDispatchMode sees every operation that torch runs, and tree_leaves finds the tensors in its arguments. Both are
# documented in torch's own notes and used by many packages, but have no public address.

# The attention kernels call these operators themselves, because torch's public attention returns no log-sum-exp and
# takes none for its backward pass.
ATTENTION_OPERATORS = (
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)

Work: Any = dist._Work
"""The base class of handles that a process group written in Python returns. `dist.Work` cannot be subclassed."""


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which torch knows a group. A group written in Python must give it itself."""
    return dist.distributed_c10d._world.pg_names[group]


def job_store() -> dist.Store:
    """The key-value store of the job. torch has no public function that returns it."""
    return dist.distributed_c10d._get_default_store()


def set_group_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Change the timeout of a group that exists. torch takes it only at the start, when no step is known yet."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def abort_groups() -> None:
    """Leave all groups at once. `destroy_process_group` waits for other ranks where a message is under way in NCCL."""
    dist.distributed_c10d._abort_process_group()


def use_expandable_segments() -> None:
    """Set an option of the CUDA allocator from within the process. torch reads the environment only at its start."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # pyrefly: ignore


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that tells storages apart while they exist; Python objects for one storage come and go."""
    return storage._cdata


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor. `to_local` would run operations, which a dispatch mode would see."""
    return tensor._local_tensor  # pyrefly: ignore


def sharded_like(parameter: Tensor, local: Tensor) -> DTensor:
    """A DTensor like another one, of this local part. `DTensor.from_local` takes ten times as long, for each weight."""
    return DTensor(local, parameter._spec, requires_grad=False)  # pyrefly: ignore


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors, which may change their dtype, in a few kernels. `torch.cat` would take one for each."""
    torch._foreach_copy_(targets, sources)


def count_all(tensors: list[Tensor]) -> None:
    """Add 1 to many tensors in a few kernels."""
    torch._foreach_add_(tensors, 1)


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """`step` of an optimizer class for a subclass whose own `step` calls it. torch wraps the hooks around both."""
    return inspect.unwrap(kind.step, stop=lambda step: not hasattr(step, "hooked"))


def run_gradient_hooks(parameter: Tensor) -> None:
    """Call the hooks that `register_post_accumulate_grad_hook` gave a parameter whose `grad` autograd did not set."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)


def fsdp_backward_unfinished(root: Any) -> bool:
    """Whether FSDP2 still waits for the end of a backward pass, as after an error in it. It gives no sign of that."""
    return root._get_fsdp_state()._state_ctx.post_backward_final_callback_queued


def drop_reduced(root: Any, stream: torch.cuda.Stream | None) -> None:
    """Free the gradients that FSDP2 keeps until its next reduction; the stream waits until they are reduced."""
    context = root._get_fsdp_state()._comm_ctx
    if hasattr(context, "reduce_scatter_states"):
        states, context.reduce_scatter_states = context.reduce_scatter_states, []
    else:  # before torch 2.12
        states, context.reduce_scatter_state = [context.reduce_scatter_state], None
    for state in states:
        if stream is not None and state is not None and state.event is not None:
            stream.wait_event(state.event)


def discard_fsdp_gradients(module: Any) -> None:
    """Drop the gradients that FSDP2 keeps unreduced. `zero_grad` does not reach them."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
