"""Counts every tensor that is allocated while the meter runs, for the owner whose mark is open (base/owners.py).

FSDP2 opens no mark, so the remainder is its own: tensors in the computation's dtype are gathered weights, others have
no owner. Gradients that it reduces are allocated through `MarkedReduceScatter`, its own communication hook. Without
FSDP2 a sum becomes a gradient without a copy (parallel/one_rank.py): memory that is seen again under the mark of
gradients changes its owner. Memory that a kernel takes and gives back within one operation is not seen; on a GPU the
allocator knows it (rehearse.py)."""

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ithaca.base.owners import GATHERED, GRADIENTS, OTHER, current_owner, owned_by
from ithaca.base.torch_private import TorchDispatchMode, local_tensor, storage_key, tree_leaves
from ithaca.parallel.collectives import reduce_scatter_single


class Meter(TorchDispatchMode):
    """Bytes on one kind of device, by owner: now, and at the moment with most in all."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._device, self._dtype, self._total, self._most = device.type, dtype, 0, 0
        self._live: dict[int, tuple[str, int]] = {}  # storage -> owner and bytes
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart(self) -> None:
        """Look for a new peak from here on."""
        self._most, self.peak = self._total, Counter(self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, DTensor):
                tensor = local_tensor(tensor)
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                self._note(tensor)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._live:
            if current_owner() == GRADIENTS:
                self._change_owner(key, GRADIENTS)
            return
        self._follow_gathered()
        owner = current_owner() or (GATHERED if tensor.dtype == self._dtype else OTHER)
        self._live[key] = owner, storage.nbytes()
        if owner == GATHERED:
            self._gathered[key] = weakref.ref(storage)
        self._appeared(key, tensor)
        self._add(key, owner, storage.nbytes())
        weakref.finalize(storage, self._forget, key).atexit = False  # pyrefly: ignore

    def _follow_gathered(self) -> None:
        """Note gathered weights that FSDP2 freed or gathered again: it resizes their storage to 0 and back."""
        for key, reference in self._gathered.items():
            storage, (owner, before) = reference(), self._live[key]
            if storage is not None and storage.nbytes() != before:
                self._live[key] = owner, storage.nbytes()
                self._add(key, owner, storage.nbytes() - before)

    def _change_owner(self, key: int, owner: str) -> None:
        before, size = self._live[key]
        self._live[key] = owner, size
        self._gathered.pop(key, None)
        self.now[before] -= size
        self.now[owner] += size
        self._changed(key, before, -size)
        self._changed(key, owner, size)

    def _forget(self, key: int) -> None:
        owner, size = self._live.pop(key)
        self._gathered.pop(key, None)
        self._add(key, owner, -size)

    def _add(self, key: int, owner: str, size: int) -> None:
        self.now[owner] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, Counter(self.now)
        self._changed(key, owner, size)

    def _appeared(self, key: int, tensor: Tensor) -> None:
        """Called for the first tensor of a new storage, for a meter that keeps a log (profile/memory_log.py)."""

    def _changed(self, key: int, owner: str, size: int) -> None:
        """Called after an owner's bytes of a storage grew by `size`, likewise."""


class MarkedReduceScatter:
    """FSDP2's reduce-scatter, with its buffers marked as gradients."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with owned_by(GRADIENTS):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def mark_gradients(decoder: torch.nn.Module) -> None:
    """Let the meter see which of FSDP2's buffers are gradients."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(MarkedReduceScatter())  # pyrefly: ignore
