"""Collectives over a process group, each begun by a call and finished by the `wait()` of the handle that it returns.

NCCL runs them on a stream of its own and gloo in threads, so they overlap with the computation until the wait.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from ithaca.base.owners import EXCHANGE, owned_by

T = TypeVar("T")
Other = TypeVar("Other")

# torch 2.13 renames two collectives
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Generic[T]):
    """A result that is on its way. `wait()` returns it, as often as it is asked.

    A tensor that is being sent is kept until then. Its memory belongs to the stream of the computation, which would
    otherwise use it for something else.
    """

    def __init__(self, finish: Callable[[], T], sent: Tensor | None = None):
        self._finish: Callable[[], T] | None = finish
        self._sent = sent
        self._result: T | None = None

    def wait(self) -> T:
        if self._finish is not None:
            with owned_by(EXCHANGE):
                self._result = self._finish()
            self._finish = self._sent = None
        return self._result  # pyrefly: ignore

    def then(self, function: Callable[[T], Other]) -> "Pending[Other]":
        """A handle for `function` of this result, called at its wait."""
        return Pending(lambda: function(self.wait()))


class Group:
    """The ranks of a process group. All tensors are flat; the target must not be read before the wait."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.ranks, self.rank = group, group.size(), group.rank()

    def all_to_all(
        self, target: Tensor, source: Tensor, target_sizes: list[int], source_sizes: list[int]
    ) -> Pending[Tensor]:
        """Send the parts of `source` to the ranks in order, and fill `target` with the parts that they send."""
        work = dist.all_to_all_single(target, source, target_sizes, source_sizes, self._group, async_op=True)
        return _pending(work, target, source)

    def all_gather(self, target: Tensor, source: Tensor) -> Pending[Tensor]:
        """Fill `target` with the sources of all ranks, in order."""
        return _pending(_all_gather_single(target, source, group=self._group, async_op=True), target, source)

    def reduce_scatter(self, target: Tensor, source: Tensor) -> Pending[Tensor]:
        """Fill `target` with the sum of all sources' parts for this rank."""
        return _pending(reduce_scatter_single(target, source, group=self._group, async_op=True), target, source)


def _pending(work: dist.Work | None, target: Tensor, source: Tensor) -> Pending[Tensor]:
    assert work is not None

    def finish() -> Tensor:
        work.wait()
        return target

    return Pending(finish, source)
