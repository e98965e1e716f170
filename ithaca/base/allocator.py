"""How torch's allocator of GPU memory is set up, for training and for rehearsals alike."""

import os

import torch

from ithaca.base import torch_private

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Let torch's allocator grow and shrink its segments, so that free pieces of GPU memory can be joined.

    A step allocates tensors of many sizes, from chunks to fp32 sums of weights. In segments of fixed size, memory that
    one kind frees is of no use to another. A user's own allocator settings are left alone.
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch_private.use_expandable_segments()
