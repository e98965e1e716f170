"""The bare work of a step: its attention kernels and matrix products alone, on random data of the same shapes.

What a step asks for is written down while it runs, by shape; then each shape is run by itself, often enough to be
measured under load, and counted as often as the step had it. No schedule can be faster.
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

SAMPLED = 0.3  # seconds of each product
ATTENDED = 1.0  # seconds of each attention call; it comes after a step, so the clock has settled
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.addmm.dtype_out)

Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, stride


class Products(TorchDispatchMode):
    """Counts matrix products by the shapes and strides of what they read, and whether they add in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Shape, Shape, torch.dtype | None]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            total, a, b = (None, *args[:2]) if func is aten.mm.default else args[:3]
            self.seen[_shape(a), _shape(b), None if total is None else total.dtype] += 1
        return func(*args, **(kwargs or {}))


def _shape(tensor: Tensor) -> Shape:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def product_seconds(seen: Counter[tuple[Shape, Shape, torch.dtype | None]], device: torch.device) -> float:
    """Of all that were counted."""
    return sum(count * _product(*shapes, device) for shapes, count in seen.items())


def _product(a: Shape, b: Shape, summed: torch.dtype | None, device: torch.device) -> float:
    left, right = (_random(*shape, device) for shape in (a, b))
    if summed is None or summed == left.dtype:
        return _seconds(lambda: left @ right, SAMPLED, device)
    total = torch.zeros(a[0][0], b[0][1], dtype=summed, device=device)
    if device.type != "cuda":
        return _seconds(lambda: total.addmm_(left.to(summed), right.to(summed)), SAMPLED, device)
    return _seconds(lambda: aten.addmm.dtype_out(total, left, right, summed, out=total), SAMPLED, device)


def _random(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows or columns that lie as they did, without what lay between them."""
    if len(size) == 2 and stride[0] < stride[1]:
        return torch.randn(size[1], size[0], device=device, dtype=dtype).T
    return torch.randn(size, device=device, dtype=dtype)


Call = tuple[bool, tuple[int, ...], tuple[int, ...], Hashable]  # backward?, shapes of q and k, pieces


def attention_seconds(
    seen: Counter[Call], kernel: Kernel, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Of all calls that were counted, forward and backward."""
    found = {"forward": 0.0, "backward": 0.0}
    for (backward, q_shape, k_shape, pieces), count in seen.items():
        assert isinstance(pieces, Pieces)
        q, do = (torch.randn(q_shape, device=device, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(k_shape, device=device, dtype=dtype) for _ in range(2))
        forward = partial(kernel.forward, q, k, v, pieces, q_shape[-1] ** -0.5)
        work = partial(kernel.backward, do, q, k, v, *forward(), pieces, q_shape[-1] ** -0.5) if backward else forward
        found["backward" if backward else "forward"] += count * _seconds(work, ATTENDED, device)
    return found


def _seconds(work: Callable[[], object], enough: float, device: torch.device) -> float:
    """The median of one call once it has run for a while."""
    work()
    times: list[float] = []
    until = time.perf_counter() + enough
    while time.perf_counter() < until or len(times) < 3:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[len(times) // 2 :])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
