"""The attention kernels by name, and the choice of one of them for a device. `plan.kernel` overrides the choice."""

import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.cudnn import Cudnn
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.flash import Flash
from ithaca.attention.kernels.naive import Naive
from ithaca.attention.kernels.seam import FactsKernel, Kernel
from ithaca.attention.kernels.torch_cpu import TorchCpu
from ithaca.base.errors import PlanError, suggestion


class CudnnAndFlash(FactsKernel):
    """cuDNN for shapes that repeat, flash for shapes that documents make: each where it is faster."""

    facts = KERNEL_FACTS["cudnn+flash"]

    def __init__(self) -> None:
        super().__init__()
        self.full, self.ragged = Cudnn(), Flash()

    def _choose(self, pieces: Pieces) -> Kernel:
        return self.ragged if pieces.ragged else self.full

    def forward(self, q, k, v, pieces, scale):
        return self._choose(pieces).forward(q, k, v, pieces, scale)

    def backward(self, do, q, k, v, o, lse, pieces, scale):
        return self._choose(pieces).backward(do, q, k, v, o, lse, pieces, scale)


_CLASSES: dict[str, type[Kernel]] = {
    "cudnn+flash": CudnnAndFlash,
    "cudnn": Cudnn,
    "flash": Flash,
    "torch-cpu": TorchCpu,
    "naive": Naive,
}
KERNELS: dict[str, type[Kernel]] = {name: _CLASSES[name] for name in KERNEL_FACTS}


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel:
    """The kernel of that name. 'auto' gives the first one in facts.py that runs on this device."""
    if name == "auto":
        kernels = (kernel() for kernel in KERNELS.values())
        return next(kernel for kernel in kernels if kernel.refuses(device, dtype, head_size) is None)
    if name not in KERNELS:
        raise PlanError(f"kernel '{name}' does not exist: {suggestion(name, ['auto', *KERNELS])}")
    kernel = KERNELS[name]()
    reason = kernel.refuses(device, dtype, head_size)
    if reason is not None:
        usable = [other for other in KERNELS if KERNELS[other]().refuses(device, dtype, head_size) is None]
        raise PlanError(f"kernel '{name}' cannot be used here: {reason}; usable are auto, {', '.join(usable)}")
    return kernel
