"""At least fp32: norms, merges, losses and reductions use it; float64 stays float64."""

import torch


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
