"""The kernels by name, and the choice among them: made once, said aloud, overridable in the Plan."""

import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.cudnn import Cudnn
from ithaca.attention.kernels.flash import Flash
from ithaca.attention.kernels.naive import Naive
from ithaca.attention.kernels.seam import Kernel
from ithaca.attention.kernels.torch_cpu import TorchCpu
from ithaca.base.errors import PlanError, suggestion


class CudnnAndFlash:
    """cuDNN for shapes that come again, flash for what documents cut: each where it is the faster."""

    name = "cudnn+flash"
    bucket: int | None = 8192  # from here on cuDNN is twice as fast as flash

    def __init__(self) -> None:
        self.full, self.ragged = Cudnn(), Flash()

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self.full.refuses(device, dtype, head_size) or self.ragged.refuses(device, dtype, head_size)

    def _choose(self, pieces: Pieces) -> Kernel:
        return self.ragged if pieces.ragged else self.full

    def forward(self, q, k, v, pieces, scale):
        return self._choose(pieces).forward(q, k, v, pieces, scale)

    def backward(self, do, q, k, v, o, lse, pieces, scale):
        return self._choose(pieces).backward(do, q, k, v, o, lse, pieces, scale)


KERNELS: dict[str, type[Kernel]] = {kernel.name: kernel for kernel in (CudnnAndFlash, Cudnn, Flash, TorchCpu, Naive)}


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Kernel:
    """The kernel of that name, or for 'auto' the first of the list above that runs there."""
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
