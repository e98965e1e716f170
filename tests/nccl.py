"""Whether several NCCL ranks can share this machine's GPU."""

import os

import torch

NO_GPU = "no CUDA device"
NEEDED = (2, 30)


def no_shared_gpu() -> str | None:
    """The reason why NCCL ranks cannot share a GPU here; None if they can."""
    if not torch.cuda.is_available():
        return NO_GPU
    version = torch.cuda.nccl.version()[:2]
    if version < NEEDED:
        return f"NCCL is {'.'.join(map(str, version))}, and ranks share a GPU from 2.30 on"
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return "NCCL_MULTI_RANK_GPU_ENABLE=1 is not set, so NCCL ranks share no GPU"
    return None
