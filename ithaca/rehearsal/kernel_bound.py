"""A lower bound for a step: its attention kernels and matrix products alone, on random data of the same shapes.

A watched step counts its attention calls (`TimedKernel`) and matrix products (`Products`) by shape. Each shape then
runs alone, long enough for the GPU's clock to settle, and its time is multiplied by its count. No schedule with the
same kernels is faster. Reports call this bound `bare`.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.seam import Kernel
from ithaca.base.torch_private import TorchDispatchMode

PRODUCT_SECONDS = 0.3  # how long each product runs
ATTENTION_SECONDS = 1.0  # how long each attention call runs
aten = torch.ops.aten
ALONE = (aten.mm.default, aten.mm.dtype)  # products that are not added to a sum
PRODUCTS = (*ALONE, aten.addmm.default, aten.addmm_.default, aten.addmm.dtype_out)

Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride, dtype
Product = tuple[Operand, Operand, torch.dtype | None]  # both operands; the dtype of a sum that the product is added to
Call = tuple[bool, tuple[int, ...], tuple[int, ...], Hashable]  # whether backward, shapes of q and k, pieces


class Products(TorchDispatchMode):
    """Counts the matrix products that run while it is active, by their operands and the dtype of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            total, a, b = (None, *args[:2]) if func in ALONE else args[:3]
            self.seen[_operand(a), _operand(b), None if total is None else total.dtype] += 1
        return func(*args, **(kwargs or {}))


def _operand(tensor: Tensor) -> Operand:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def product_seconds(seen: Counter[Product], device: torch.device) -> float:
    """Seconds of all counted products, each shape timed alone."""
    return sum(count * _time_product(*product, device) for product, count in seen.items())


def _time_product(a: Operand, b: Operand, sum_dtype: torch.dtype | None, device: torch.device) -> float:
    left, right = (_random(*operand, device) for operand in (a, b))
    if sum_dtype is None or sum_dtype == left.dtype:
        return median_seconds(lambda: left @ right, PRODUCT_SECONDS, device)
    total = torch.zeros(a[0][0], b[0][1], dtype=sum_dtype, device=device)
    if device.type != "cuda":
        return median_seconds(lambda: total.addmm_(left.to(sum_dtype), right.to(sum_dtype)), PRODUCT_SECONDS, device)
    return median_seconds(
        lambda: aten.addmm.dtype_out(total, left, right, sum_dtype, out=total), PRODUCT_SECONDS, device
    )


def _random(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers in rows or columns, whichever is contiguous in the operand. Gaps between them are left out."""
    if len(size) == 2 and stride[0] < stride[1]:
        return torch.randn(size[1], size[0], device=device, dtype=dtype).T
    return torch.randn(size, device=device, dtype=dtype)


def attention_seconds(
    seen: Counter[Call], kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Seconds of all counted attention calls, `forward` and `backward`, each shape timed alone."""
    found = {"forward": 0.0, "backward": 0.0}
    for (backward, q_shape, k_shape, pieces), count in seen.items():
        assert isinstance(pieces, Pieces)
        q, do = (torch.randn(q_shape, device=device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(k_shape, device=device, dtype=dtype) for _ in range(2))
        scale = q_shape[-1] ** -0.5
        call = partial(kernel.forward, q, k, v, pieces, scale)
        if backward:
            o, lse = call()
            call = partial(kernel.backward, do, q, k, v, o, lse, pieces, scale)
        found["backward" if backward else "forward"] += count * median_seconds(call, ATTENTION_SECONDS, device)
    return found


def median_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Median time of one call. Calls repeat for `seconds`; a first call and the earlier half do not count."""
    times = _repeated_seconds(work, seconds, 3, device)
    return statistics.median(times[len(times) // 2 :])


def fastest_seconds(work: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Least time of one call, for work that waits for the host: other programs slow a host down, none speeds it up."""
    return min(_repeated_seconds(work, seconds, 20, device))


def _repeated_seconds(work: Callable[[], object], seconds: float, least: int, device: torch.device) -> list[float]:
    """Times of calls that repeat for `seconds`, and at least so often, after a first one that does not count."""
    work()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < least:
        times.append(seconds_of(work, device))
    return times


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call: by events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    start.record()  # pyrefly: ignore
    work()
    stop.record()  # pyrefly: ignore
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU. On a CPU work is done when its call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
