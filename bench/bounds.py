"""The matrix rate of this GPU, measured in the same run as the figures that are compared with it."""

import torch

from ithaca.rehearsal.kernel_bound import median_seconds

SIZE = 8192


def matmul_tflops(device: torch.device) -> float | None:
    """TFLOP/s of a square bf16 matrix product of random data; None on a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIZE**3 / median_seconds(lambda: a @ b, 0.1, device) / 1e12
