"""Whether several NCCL ranks can share this machine's GPU."""

import os

import torch

from ithaca.parallel.nccl import SHARES, SHARING_NCCL, nccl_version

NO_GPU = "no CUDA device"


def no_shared_gpu() -> str | None:
    """The reason why NCCL ranks cannot share a GPU here; None if they can."""
    if not torch.cuda.is_available():
        return NO_GPU
    version = nccl_version()[:2]
    if version < SHARING_NCCL:
        return (
            f"NCCL is {'.'.join(map(str, version))}, and ranks share a GPU from {'.'.join(map(str, SHARING_NCCL))} on"
        )
    if os.environ.get(SHARES) != "1":
        return f"{SHARES}=1 is not set, so NCCL ranks share no GPU"
    return None
