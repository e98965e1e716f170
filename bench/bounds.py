"""What the device can do, measured in the same run as what is compared with it."""

import statistics
from collections.abc import Callable

import torch


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median of `repeats` timings by events, after two warm-ups."""
    times = []
    for number in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def matmul_tflops(size: int = 8192) -> float:
    """bf16 matrix product of random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: a @ b, 10) / 1e12
