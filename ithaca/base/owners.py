"""Owners of GPU memory: the names that predictions and measurements share, and marks that give tensors an owner.

Code that allocates marks itself:

    with owned_by(ATTENTION):
        o, lse = kernel.forward(...)

The innermost mark counts. Rehearsals and profiles read marks (rehearsal/memory_meter.py, profile/memory_log.py). A mark
must not stay open over a `yield`: another chunk would run under it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

STATES, GATHERED, GRADIENTS, KEYS, TAPES = "states", "gathered weights", "gradients", "K and V", "tapes"
ATTENTION, EXCHANGE, LOSS, BLOCKS, BATCH, OTHER = "attention", "exchange", "loss", "blocks", "batch", "other"
KERNELS, ALLOCATOR = "within kernels", "allocator"
HOST = "host"  # host memory, seen where the device is a CPU

_marks = threading.local()  # autograd runs backward in a thread of its own


@contextmanager
def owned_by(owner: str) -> Iterator[None]:
    """Mark tensors that this thread allocates in the body; also usable as a decorator of a function."""
    before = current_owner()
    _marks.owner = owner
    try:
        yield
    finally:
        _marks.owner = before


def current_owner() -> str | None:
    """The innermost mark of this thread; None outside of all marks."""
    return getattr(_marks, "owner", None)
