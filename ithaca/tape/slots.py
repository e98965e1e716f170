"""Device memory that tiles of host tapes pass through: a few slots of one size, allocated once.

A slot that is given back carries a mark, and is free at that mark: whoever takes it next queues its work behind the
mark. So no slot is ever overwritten while something still reads it, and the allocator is not asked for anything.
"""

from collections import deque

import torch
from torch import Tensor

from ithaca.tape.engine import Engine, Mark


class Slots:
    def __init__(self, engine: Engine, rows: int, features: tuple[int, ...], dtype: torch.dtype, count: int):
        self.engine = engine
        self._free: deque[tuple[Tensor, Mark | None]] = deque()
        self._held: dict[int, Tensor] = {}  # by address
        for _ in range(count):
            slot = torch.empty(rows, *features, dtype=dtype, device=engine.device)
            if engine.poison:
                slot.fill_(torch.nan)
            self._free.append((slot, engine.computed()))

    def take(self, rows: int) -> tuple[Tensor, Mark | None]:
        """The first rows of a slot, and the mark at which it is free: the one that was given back first."""
        assert self._free, "every slot is held: a schedule takes more tiles at a time than it asked for"
        slot, mark = self._free.popleft()
        self._held[slot.data_ptr()] = slot
        return slot[:rows], mark

    def give(self, tile: Tensor, mark: Mark | None) -> None:
        """The slot of a tile that was taken is free again at the mark."""
        self._free.append((self._held.pop(tile.data_ptr()), mark))

    def reclaim(self) -> None:
        """All slots are free: whoever held one is gone, and nothing is under way."""
        self._free.extend((slot, None) for slot in self._held.values())
        self._held.clear()

    @property
    def held(self) -> int:
        return len(self._held)
