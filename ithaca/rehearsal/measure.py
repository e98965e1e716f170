"""What the GPU that is here reaches, as a table of the form that hardware.toml has.

Each figure is the median of repeated runs on random data, after as long a run as lets the clock settle under load; the
matrix products are those of a block's MLP, forward and with sums of gradients in fp32, so that they stand for a step.
Links between GPUs cannot be measured by one of them: they stay as the table has them, or are assumed.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.base.errors import PlanError
from ithaca.model.linear import add_product
from ithaca.planner.hardware import HERE, nearest, read_gpus

SECONDS = 2.0  # of each figure
TOKENS, HIDDEN, MLP = 8192, 4096, 14336  # a tile of Llama3-8B
ATTENDED, HEADS = 65536, 4  # one tile of a sweep on 8 ranks, with one key/value head


def measure_here(file: Path) -> str:
    """Write what was measured; the name of the GPU."""
    if not torch.cuda.is_available():
        raise PlanError("--measure measures a GPU, and there is none here: leave it out, or run it where one is")
    known = read_gpus()
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    gpu = nearest(torch.cuda.get_device_name(device), total, known)
    numbers = {"host": _host(device), "bandwidth": _bandwidth(device), "matmul": _matmul(device)}
    numbers |= _attention(device)
    lines = [f'["{gpu.name}"]', *(f'{name} = [{value:.4g}, "{HERE}"]' for name, value in numbers.items())]
    try:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as problem:
        raise PlanError(f"--measure {file} cannot be written ({problem.strerror})") from None
    return gpu.name


def _median(work: Callable[[], object], seconds: float = SECONDS) -> float:
    """Seconds of one call."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()  # pyrefly: ignore
        work()
        ended.record()  # pyrefly: ignore
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(times[len(times) // 2 :])


def _matmul(device: torch.device) -> float:
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    gate, down = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((MLP, HIDDEN), (HIDDEN, MLP)))
    sums = torch.zeros(MLP, HIDDEN, device=device)

    def work() -> None:
        wide = x @ gate.T
        _ = wide @ down.T
        add_product(sums, wide.T, x)

    return 3 * 2 * TOKENS * HIDDEN * MLP / _median(work)


def _attention(device: torch.device) -> dict[str, float]:
    """Of a full square and a triangle in the proportion that a walk over 16 tiles has."""
    q = torch.randn(ATTENDED, HEADS, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(ATTENDED, 1, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    kernel = choose_kernel("auto", device, torch.bfloat16, 128)
    bounds = (0, ATTENDED)
    forward = backward = flops = 0.0
    for causal, weight in ((True, 2), (False, 15)):
        pieces = Pieces(bounds, bounds, causal, ragged=False)
        o, lse = kernel.forward(q, k, v, pieces, 0.08)
        forward += weight * _median(lambda pieces=pieces: kernel.forward(q, k, v, pieces, 0.08))
        backward += weight * _median(
            lambda pieces=pieces, o=o, lse=lse: kernel.backward(o, q, k, v, o, lse, pieces, 0.08)
        )
        flops += weight * (2 if causal else 4) * ATTENDED**2 * HEADS * 128
    return {"attention_forward": flops / forward, "attention_backward": 2.5 * flops / backward}


def _bandwidth(device: torch.device) -> float:
    x, y = (torch.randn(2**28, device=device) for _ in range(2))
    return 2 * x.nbytes / _median(lambda: y.copy_(x), 0.5)


def _host(device: torch.device) -> float:
    there = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=device)
    return min(
        there.nbytes / _median(lambda: here.copy_(there, non_blocking=True), 0.5),
        there.nbytes / _median(lambda: there.copy_(here, non_blocking=True), 0.5),
    )
