"""The attention kernels by name, and the choice of one of them for a device. `plan.kernel` overrides the choice."""

from functools import partial
from importlib import import_module

import torch

from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import Kernel, refusal
from ithaca.base.errors import PlanError, suggestion


def make_kernel(name: str) -> Kernel:
    """The kernel of that name. Its code is loaded now."""
    module, kind = KERNEL_FACTS[name].code.split(".")
    return getattr(import_module(f"ithaca.attention.kernels.{module}"), kind)()


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_size: int, computes: bool = True) -> Kernel:
    """The kernel of that name. 'auto' gives the first one in facts.py that runs on this device.

    If the kernel will not compute (`computes`), only its facts are checked: loading its package can take seconds.
    """
    if name == "auto":
        return next(kernel for kernel, reason in _candidates(device, dtype, head_size) if reason is None)
    if name not in KERNEL_FACTS:
        raise PlanError(f"kernel '{name}' does not exist: {suggestion(name, ['auto', *KERNEL_FACTS])}")
    kernel = make_kernel(name)
    facts = KERNEL_FACTS[name]
    reason = (kernel.refuses if computes else partial(refusal, facts))(device, dtype, head_size)
    if reason is not None:
        usable = usable_kernels(device, dtype, head_size)
        raise PlanError(f"kernel '{name}' cannot be used here: {reason}; usable are auto, {', '.join(usable)}")
    return kernel


def usable_kernels(device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[str, ...]:
    """The names of the kernels that run on this device, in the order in which 'auto' prefers them."""
    return tuple(kernel.name for kernel, reason in _candidates(device, dtype, head_size) if reason is None)


def explain_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """The name of the kernel that runs, and why each kernel that `auto` prefers to it does not."""
    names = list(KERNEL_FACTS)
    faster = names[: names.index(kernel.name)]
    reasons = {name: make_kernel(name).refuses(device, dtype, head_size) for name in faster}
    why = [
        f"{name} is not used: {reason or 'plan.kernel names another'}"
        for name, reason in reasons.items()
        if KERNEL_FACTS[name].device == device.type
    ]
    return "; ".join([kernel.name, *why])


def _candidates(device: torch.device, dtype: torch.dtype, head_size: int):
    """Every kernel in the order of preference, with the reason why it cannot run, or None."""
    for name in KERNEL_FACTS:
        kernel = make_kernel(name)
        yield kernel, kernel.refuses(device, dtype, head_size)
