"""How long ranks wait for one another: longer than any step takes, and not much longer.

A collective waits for the slowest rank. NCCL counts from when the host asked for it, and the host may run ahead by a
whole step; so a time-out below the time of a step ends runs that are well, and one far above it lets a rank that hangs
waste the time of all others.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from ithaca.sizes import MOST_SECONDS

# FLOP/s that a step reaches even where it is slow, by the plain count that gives recomputation no credit
GPU_RATE = 200e12  # 20 % of Hopper's peak in bfloat16; with STEPS, any rank at 7 % of it is still waited for
CPU_CORE_RATE = 5e9  # a tenth of what a core's vector units do in float32

FLOOR = 600.0  # seconds that have nothing to do with a step's length: kernels are compiled, memory is taken, disks wait
STEPS = 3


def step_seconds(flops: float, device: torch.device, cores: int) -> float:
    """An upper estimate of the time of a step that has a rank compute `flops`, on a GPU or on `cores`."""
    return flops / (GPU_RATE if device.type == "cuda" else CPU_CORE_RATE * cores)


def patience(step: float) -> float:
    """Seconds to wait for another rank where a step is expected to take `step` seconds."""
    return min(FLOOR + STEPS * step, MOST_SECONDS)


def set_patience(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """From now on, let collectives over these groups fail after so many seconds. Nothing collective."""
    for group in groups:
        # torch has no public way to change it once a group is there, and a step's length is known only later
        _set_pg_timeout(timedelta(seconds=seconds), group)
