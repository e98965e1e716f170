"""Attention kernels for rehearsals: one with a clock, and one that takes memory and computes nothing."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.seam import Kernel
from ithaca.base.precision import at_least_fp32
from ithaca.rehearsal.kernel_bound import Call


class TimedKernel:
    """A kernel that records how long its calls take, by events on a GPU, and counts them by shape."""

    def __init__(self, kernel: Kernel, device: torch.device):
        self.name = kernel.name
        self.kernel, self._cuda = kernel, device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []
        self.seen: Counter[Call] = Counter()
        self._stopped = False

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self.kernel.refuses(device, dtype, head_size)

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        self.kernel.prepare(device, dtype, heads, kv_heads, head_size, rectangles)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        call = False, tuple(q.shape), tuple(k.shape), pieces
        return self._lap(call, lambda: self.kernel.forward(q, k, v, pieces, scale))

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, pieces: Pieces, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = True, tuple(q.shape), tuple(k.shape), pieces
        return self._lap(call, lambda: self.kernel.backward(do, q, k, v, o, lse, pieces, scale))

    def restart(self) -> None:
        """Forget all calls, unless it has stopped."""
        if not self._stopped:
            self._laps.clear()
            self.seen.clear()

    def stop(self) -> None:
        """Record no more calls."""
        self._stopped = True

    def seconds(self) -> float:
        """Seconds of all calls since the last restart."""
        if not self._cuda:
            return sum(after - before for before, after in self._laps)
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in self._laps) / 1e3

    def _lap(self, call: Call, work: Callable[[], Any]) -> Any:
        if self._stopped:
            return work()
        self.seen[call] += 1
        before = self._now()
        result = work()
        self._laps.append((before, self._now()))
        return result

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class FakeKernel:
    """A kernel that allocates the outputs and workspace of another one, filled with zeros."""

    def __init__(self, kernel: Kernel):
        self.name = kernel.name
        self._kernel = kernel

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return self._kernel.refuses(device, dtype, head_size)

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        """Nothing: it computes nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return torch.zeros_like(q), q.new_zeros(q.shape[1], len(q), dtype=at_least_fp32(q.dtype))

    def backward(
        self,
        do: Tensor,  # noqa: ARG002
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,  # noqa: ARG002
        lse: Tensor,  # noqa: ARG002
        pieces: Pieces,
        scale: float,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor, Tensor]:
        facts, group = KERNEL_FACTS[self.name], q.shape[1] // k.shape[1]
        workspace = q.new_empty(int(facts.workspace(q.numel(), k.numel(), group, len(q), pieces.causal)))
        gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        del workspace
        return gradients
