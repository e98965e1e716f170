"""Who holds the memory: every tensor that is made while the meter runs is counted for whoever made it.

The owner is read off the call stack, so that nothing needs to say who it is, FSDP2 included: the innermost frame whose
file (and function, where it matters) stands in the table below. What a kernel takes and gives back within one
operation is not seen; on a GPU the allocator knows it, and `rehearse.py` shows the difference.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ithaca.base.owners import (
    ATTENTION,
    BATCH,
    BLOCKS,
    EXCHANGE,
    GATHERED,
    GRADIENTS,
    HOST,
    KEYS,
    LOSS,
    OTHER,
    STATES,
    TAPES,
)
from ithaca.base.torch_private import TorchDispatchMode, local_tensor, storage_key, tree_leaves

# The end of a file's path, or a part of it for a folder, and a function in it where that matters -> the owner
_FILES: dict[tuple[str, str], str] = {
    ("ithaca/attention/", ""): ATTENTION,
    ("ithaca/parallel/exchange.py", ""): EXCHANGE,
    ("ithaca/parallel/ring.py", ""): EXCHANGE,
    ("ithaca/parallel/batch.py", ""): BATCH,
    ("ithaca/schedule/loss.py", ""): LOSS,
    ("ithaca/schedule/tapes.py", ""): TAPES,
    ("ithaca/tape/", ""): TAPES,
    ("ithaca/schedule/", ""): BLOCKS,
    ("ithaca/optimizer/adamw.py", ""): STATES,
    ("ithaca/optimizer/host_adamw.py", ""): STATES,
    ("ithaca/parallel/sharding.py", "load"): STATES,
    ("_fsdp_collectives.py", ""): GATHERED,
    ("_fsdp_param.py", ""): GATHERED,
}


class Meter(TorchDispatchMode):
    """Bytes on one kind of device, by owner: now, and at the moment when they were most in all."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._device, self._total, self._most = device.type, 0, 0
        self._live: dict[int, tuple[str, int]] = {}  # storage -> owner and bytes

    def restart(self) -> None:
        """Look for a new peak from here on."""
        self._most, self.peak = self._total, Counter(self.now)

    @contextmanager
    def running(self) -> Iterator["Meter"]:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP2 frees gathered weights by giving their storage no size."""
            result = resize(storage, size)
            if storage_key(storage) in self._live:
                owner, before = self._live[storage_key(storage)]
                self._live[storage_key(storage)] = owner, size
                self._add(owner, size - before)
            return result

        torch.UntypedStorage.resize_ = resized  # pyrefly: ignore
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, DTensor):
                tensor = local_tensor(tensor)
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        if key in self._live:
            return
        owner, size = _owner(sys._getframe(2)), storage.nbytes()
        self._live[key] = owner, size
        self._add(owner, size)
        weakref.finalize(storage, self._forget, key).atexit = False  # pyrefly: ignore

    def _forget(self, key: int) -> None:
        owner, size = self._live.pop(key)
        self._add(owner, -size)

    def _add(self, owner: str, size: int) -> None:
        self.now[owner] += size
        self._total += size
        if self._total > self._most:
            self._most, self.peak = self._total, Counter(self.now)


def _owner(frame: FrameType | None) -> str:
    names: set[str] = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        file = frame.f_code.co_filename
        if file.endswith("ithaca/rehearsal/ballast.py"):
            return frame.f_locals["owner"]
        for (part, function), owner in _FILES.items():
            if part in file and (not function or function in names):
                return _EXACTLY[owner](frame) if owner in _EXACTLY else owner
        frame = frame.f_back
    return OTHER


def _of_fsdp(frame: FrameType) -> str:
    """Buffers of FSDP2 are of gathered weights, but for those of gradients that are reduced."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_name != "foreach_reduce":
        outer = outer.f_back
    return GRADIENTS if outer else GATHERED


def _of_tapes(frame: FrameType) -> str:
    """Whose tapes are being made (schedule/tapes.py); host memory is seen there when it is given its shape."""
    making: FrameType | None = frame
    while making is not None and "need" not in making.f_locals:
        making = making.f_back
    need = making.f_locals["need"] if making else None
    if making is frame and need is not None and need.place != "device":
        return HOST
    return KEYS if getattr(need, "option", None) == "kv" else TAPES


_EXACTLY = {TAPES: _of_tapes, GATHERED: _of_fsdp}
