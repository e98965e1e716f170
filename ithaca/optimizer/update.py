"""One update of AdamW on this rank's tensors, and the norm of gradients over all ranks.

On a GPU, in fp32, the update scales the gradients while it reads them (triton_adamw.py), so clipping takes no pass of
its own. Everywhere else it is torch's fused AdamW, and gradients are scaled before (`clip` in adamw.py). Moments on the
device and in host memory are updated by the same function, so their bits are the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.adamw import adamw
from torch.utils.weak import TensorWeakRef

from ithaca.base.errors import InputError
from ithaca.base.torch_private import count_all, local_tensor

OTHER_KINDS = ("amsgrad", "maximize", "capturable", "differentiable")  # of AdamW, which only torch computes


class Scaling(torch.optim.Optimizer):
    """An optimizer whose next step scales the gradients that `clip` (adamw.py) has measured."""

    scale: Tensor | None = None
    _measured: dict[Tensor, TensorWeakRef]  # by parameter; weak, so that dropped gradients do not keep their memory

    def scale_later(self, scale: Tensor) -> None:
        """Make the next step multiply the current gradients by `scale`."""
        self.scale = scale
        self._measured = {parameter: TensorWeakRef(gradient) for parameter, gradient in _gradients(self)}

    def pending_scale(self) -> Tensor | None:
        """The scale for the next step; None if gradients were replaced since."""
        if self.scale is None:
            return None
        same = (parameter in self._measured and self._measured[parameter]() is g for parameter, g in _gradients(self))
        return self.scale if all(same) else None

    def take_scale(self) -> Tensor | None:
        """Return the scale for the step that begins, and clear it."""
        scale, clipped = self.pending_scale(), self.scale is not None
        self.scale = None
        if clipped and scale is None:
            raise InputError(
                "gradients were replaced between clip and step, and would be scaled by the norm of others: call clip "
                "again before the step, or optimizer.zero_grad() to forget the first call"
            )
        return scale

    def scale_now(self, scale: Tensor | None) -> None:
        """Multiply the gradients themselves, for an update that cannot scale them."""
        if scale is not None:
            for _, gradient in _gradients(self):
                local_tensor(gradient).mul_(scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.scale = None


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters that have a gradient, with it."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            yield parameter, parameter.grad


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The result of a step's closure, usually the loss; None without a closure. It may run backward, and clip."""
    with torch.enable_grad():
        return closure() if closure else None


def scales_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updates of all parameters of an optimizer of `make_optimizer` can scale their gradients."""
    groups = optimizer.param_groups
    parameters = (parameter for group in groups for parameter in group["params"])
    return all(
        parameter.device.type == "cuda" and parameter.dtype == torch.float32 for parameter in parameters
    ) and not any(group.get(kind) or isinstance(group["lr"], Tensor) for group in groups for kind in OTHER_KINDS)


def update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    steps: Sequence[Tensor],
    group: dict[str, Any],
    fused: bool,
    scale: Tensor | None,
) -> None:
    """Update local tensors in place with the options of a group, and count the step.

    `fused`: by our own kernel, which multiplies gradients by `scale`; torch's knows none.
    """
    assert fused or scale is None
    if not fused:
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        first, second = ([*moment] for moment in moments)
        adamw(
            [*weights], [*gradients], first, second, [], [*steps], fused=True, beta1=beta1, beta2=beta2, **options
        )  # fmt: skip
        return
    from ithaca.optimizer import triton_adamw

    count_all([*steps])
    every = zip(weights, gradients, *moments, steps, strict=True)
    tensors = [triton_adamw.Tensors(w, g.contiguous(), *others) for w, g, *others in every]
    options = {"rate": group["lr"], "betas": group["betas"]}
    triton_adamw.update(tensors, scale, eps=group["eps"], weight_decay=group["weight_decay"], **options)


def gradient_norm(
    counted: Mapping[int, Sequence[DTensor]], tensor_group: dist.ProcessGroup | None, fused: bool
) -> Tensor:
    """The norm of all gradients of all ranks; 0-dim.

        `counted` has the parameters by the number of tensor ranks that hold the same part. `fused`: by our own kernel,
        for
    fp32 on a GPU.
    """
    if not counted:
        return torch.zeros(())
    every = [parameter.grad for parameters in counted.values() for parameter in parameters]
    total = sum(_squares(parameters, fused) / holders for holders, parameters in counted.items())
    total = _over_ranks(total, every[0])  # pyrefly: ignore
    if tensor_group is not None:
        dist.all_reduce(total, group=tensor_group)
    return total.sqrt().to(every[0].dtype)  # pyrefly: ignore


def _squares(parameters: Sequence[DTensor], fused: bool) -> Tensor:
    """Σ g² over the local gradients, in float64."""
    local = [local_tensor(parameter.grad).contiguous() for parameter in parameters]  # pyrefly: ignore
    if fused:
        from ithaca.optimizer import triton_adamw

        return triton_adamw.sum_of_squares(local)
    return torch.stack([gradient.double().square().sum() for gradient in local]).sum()


def _over_ranks(total: Tensor, gradient: DTensor) -> Tensor:
    """The sum over the ranks that gradients are sharded over; replicas have the same gradients."""
    mesh = gradient.device_mesh
    if mesh.size() == 1:
        return total
    placements = [Partial() if placement.is_shard() else Replicate() for placement in gradient.placements]
    return DTensor.from_local(total, mesh, placements, run_check=False).full_tensor()
