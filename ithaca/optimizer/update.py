"""One update of AdamW on this rank's tensors, and the norm of gradients over all ranks.

On a GPU, in fp32, the update scales the gradients while it reads them (triton_adamw.py), so clipping takes no pass of
its own. Everywhere else it is torch's fused AdamW, and gradients are scaled before (`clip` in adamw.py). Moments on the
device and in host memory are updated by the same function, so their bits are the same.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.adamw import adamw

from ithaca.base.torch_private import count_all, local_tensor

OTHER_KINDS = ("amsgrad", "maximize", "capturable", "differentiable")  # of AdamW, which torch alone can compute


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


def gradient_norm(parameters: Iterable[DTensor]) -> Tensor:
    """The norm of fp32 gradients on a GPU, over all of them and all ranks; 0-dim."""
    from ithaca.optimizer import triton_adamw

    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    local = [local_tensor(gradient).contiguous() for gradient in gradients]
    return _over_ranks(triton_adamw.sum_of_squares(local), gradients[0]).sqrt().float()  # pyrefly: ignore


def _over_ranks(total: Tensor, gradient: DTensor) -> Tensor:
    """The sum over the ranks among which gradients are sharded; replicas have the same ones."""
    mesh = gradient.device_mesh
    if mesh.size() == 1:
        return total
    placements = [Partial() if placement.is_shard() else Replicate() for placement in gradient.placements]
    return DTensor.from_local(total, mesh, placements, run_check=False).full_tensor()
