"""A process group of many ranks in one process: whatever this rank sends comes back to it.

FSDP2 and the exchanges run as in a real job and move the same bytes, on a stream of their own as between GPUs. Values
are finite but wrong, because every other rank seems to have the data of this one. For rehearsals and benchmarks of one
rank on one device; no other process is started or waited for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from ithaca.base.torch_private import Work, group_name

NAME = "loopback"
MARK = "ithaca: loopback"  # the range of a message in a trace of torch's profiler


def start_loopback(ranks: int) -> None:
    """Make this process rank 0 of a job of `ranks` ranks. No other job may have begun."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=ranks)


def _make(store: dist.Store, rank: int, ranks: int, timeout: Any) -> "Loopback":  # noqa: ARG001
    return Loopback(rank, ranks)


class Loopback(dist.ProcessGroup):
    """The methods of a process group that torch.distributed calls; torch 2.13 has renamed some of them."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(rank, ranks)  # pyrefly: ignore
        self._ranks = ranks
        self._stream: torch.cuda.Stream | None = None

    @property
    def group_name(self) -> str:
        return group_name(self)

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # noqa: ARG002
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # noqa: ARG002
        return _Done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return _Done(None)

    def allgather(self, targets: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> dist.Work:  # noqa: ARG002
        def fill() -> None:
            for parts, source in zip(targets, sources, strict=True):
                for part in parts:
                    part.copy_(source)

        return self._beside(fill, targets, sources[0])

    def all_gather_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        flat = source.view(1, -1)
        return self._beside(lambda: target.view(self._ranks, -1).copy_(flat.expand(self._ranks, -1)), target, source)

    def reduce_scatter_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return self._beside(
            lambda: torch.sum(source.view(self._ranks, -1), 0, out=target.view(-1)).div_(self._ranks), target, source
        )

    def all_to_all_single(
        self,
        target: Tensor,
        source: Tensor,
        target_sizes: list[int],  # noqa: ARG002
        source_sizes: list[int],  # noqa: ARG002
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        return self._beside(lambda: fill_from(target.view(-1), source.view(-1)), target, source)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _beside(self, fill: Callable[[], object], result: Any, source: Tensor) -> dist.Work:
        if source.device.type != "cuda":
            with record_function(MARK):
                fill()
            return _Done(result)
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), record_function(MARK):
            fill()
        return _Done(result, self._stream.record_event())


class _Done(Work):
    """A collective that is done, or will be at an event."""

    def __init__(self, result: Any, event: torch.Event | torch.cuda.Event | None = None):
        super().__init__()
        self._result, self._event = result, event

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)  # pyrefly: ignore
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def get_future(self) -> Future:
        future: Future = Future()
        future.set_result(self._result)
        return future


def fill_from(target: Tensor, source: Tensor) -> None:
    """Fill the target with the source, repeated if it is shorter; with zeros if a rank without heads sends nothing."""
    if not source.numel():
        target.zero_()
        return
    for part in target.split(source.numel()):
        part.copy_(source[: part.numel()])
