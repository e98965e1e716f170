"""What carries an exchange from rank to rank: an all-to-all over a process group, or back to this rank alone."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.parallel.loopback import fill_from

Wait = Callable[[], object]  # after it the target can be used; until then the source must stay as it is


class Transport(Protocol):
    ranks: int
    rank: int

    def all_to_all(self, target: Tensor, source: Tensor, target_sizes: list[int], source_sizes: list[int]) -> Wait:
        """Begin to send the parts of a flat source to the ranks, in order, and to fill a flat target with theirs."""
        ...

    def all_gather(self, target: Tensor, source: Tensor) -> Wait:
        """Begin to fill a flat target with the flat sources of all ranks, in order."""
        ...

    def reduce_scatter(self, target: Tensor, source: Tensor) -> Wait:
        """Begin to fill a flat target with the sum of this rank's parts of all flat sources."""
        ...


# torch 2.13 has given two of its collectives other names
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """The ranks of a process group. NCCL has a stream of its own for it, gloo threads."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def all_to_all(self, target: Tensor, source: Tensor, target_sizes: list[int], source_sizes: list[int]) -> Wait:
        work = dist.all_to_all_single(target, source, target_sizes, source_sizes, self._group, async_op=True)
        assert work is not None
        return work.wait

    def all_gather(self, target: Tensor, source: Tensor) -> Wait:
        work = _gather(target, source, group=self._group, async_op=True)
        assert work is not None
        return work.wait

    def reduce_scatter(self, target: Tensor, source: Tensor) -> Wait:
        work = _reduce_scatter(target, source, group=self._group, async_op=True)
        assert work is not None
        return work.wait


class LoopedBack:
    """One rank that stands for all: what would be sent comes back to it, so that the same bytes move.

    For measurements on one device. Values are finite and wrong.
    """

    def __init__(self, ranks: int, device: torch.device):
        self.ranks, self.rank = ranks, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def all_to_all(self, target: Tensor, source: Tensor, target_sizes: list[int], source_sizes: list[int]) -> Wait:  # noqa: ARG002
        return self.all_gather(target, source)

    def reduce_scatter(self, target: Tensor, source: Tensor) -> Wait:
        return self.all_gather(target, source)

    def all_gather(self, target: Tensor, source: Tensor) -> Wait:
        if self._stream is None:
            fill_from(target, source)
            return lambda: None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fill_from(target, source)
        done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)
