"""At least fp32: norms, merges, losses and reductions use it; float64 stays float64."""

import torch
from torch import Tensor


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def fusable(x: Tensor) -> bool:
    """Whether a kernel that computes in fp32 on a GPU may stand in for plain torch."""
    return x.is_cuda and x.dtype != torch.float64
