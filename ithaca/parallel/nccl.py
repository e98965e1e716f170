"""The NCCL that this process has loaded, and the settings with which several ranks can share a GPU over it."""

import ctypes
import os

import torch

from ithaca.base.errors import PlanError

SHARING_NCCL = (2, 30)
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING = {
    SHARES: "1",
    "NCCL_NVLS_ENABLE": "0",  # its switch knows one rank for each GPU
    "NCCL_MAX_CTAS": "2",  # kernels that wait for other ranks leave the chip to these
}


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL library that is loaded, which may be a preloaded one.

    `torch.cuda.nccl.version()` is the version of the headers that torch was built with. It is right if NCCL is part of
    torch's own library.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")  # the one in memory, if there is one of this name
    except OSError:
        return tuple(torch.cuda.nccl.version())  # pyrefly: ignore
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return major, rest // 100, rest % 100


def prepare_sharing(gpus: int) -> None:
    """Let NCCL have several ranks on one GPU; what users have set themselves stays."""
    version = nccl_version()
    if version < SHARING_NCCL:
        needed, found = (".".join(map(str, numbers)) for numbers in (SHARING_NCCL, version))
        raise PlanError(
            f"ranks that share a GPU need NCCL {needed} or newer, and this is {found}: preload one, as "
            f"LD_PRELOAD=/path/to/libnccl.so.2, or start {gpus} ranks"
        )
    for variable, value in SHARING.items():
        os.environ.setdefault(variable, value)
