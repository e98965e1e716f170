"""The precision of norms, merges, losses and reductions: at least fp32, and float64 where the model is float64."""

import torch
from torch import Tensor


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def fusable(x: Tensor) -> bool:
    """Whether a Triton kernel, which computes in fp32 on a GPU, may replace plain torch."""
    return x.is_cuda and x.dtype != torch.float64
