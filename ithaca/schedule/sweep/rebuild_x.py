"""x of a layer for its backward pass: read from its tape, or made again by rising from a layer below (rebuild.py).

From x and o of a layer, mix and feed give the next x, over the same tiles as in the forward pass and so the same bits.

    onto tapes    layer after layer over all chunks, with the weights of one layer at a time
    in passing    a chunk at a time through all layers, whose weights are then there together

In passing a chunk takes two hidden states more at most: its x, and that of the layer before.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ithaca.schedule.sweep.rebuild import Rebuild
from ithaca.schedule.tapes import Pass
from ithaca.tape.tape import Tape

Step = Callable[[Tensor, Tensor, Tensor], None]  # (x, o, y): y, which may be x, becomes mix and feed of x and o
Open = Callable[[int], AbstractContextManager[Step]]  # the step from a layer to the next, while its weights are there


class Xs(Protocol):
    """What a backward pass sees of x, a tape or not."""

    def read(self, index: int, toward: int = 0) -> Tensor: ...

    def prefetch(self, index: int) -> None: ...

    def release(self, tile: Tensor) -> None: ...


@contextmanager
def open_xs(tapes: Pass, layer: int, step_from: Open) -> Iterator[Xs]:
    """x of a layer, for as long as its backward pass takes."""
    rebuild = tapes.rebuild(layer)
    if rebuild is not None and layer not in rebuild.homes:
        with ExitStack() as stack:
            steps = {below: stack.enter_context(step_from(below)) for below in range(rebuild.source, layer)}
            tapes.house(rebuild)
            yield _Passing(tapes, layer, rebuild, steps)
        return
    if rebuild is not None:
        tapes.house(rebuild)
        _rise(tapes, layer, rebuild, step_from)
    yield tapes.x(layer)


def _rise(tapes: Pass, top: int, rebuild: Rebuild, step_from: Open) -> None:
    """Rise onto the tapes of the rebuilt x; an x that only comes by is for that long on the last one's."""
    for layer in range(rebuild.source, top):
        xs = tapes.x(layer if layer == rebuild.source or layer in rebuild.homes else top)
        ys = tapes.x(layer + 1 if layer + 1 in rebuild.homes else top)
        os = _kept_o(tapes, layer)
        with step_from(layer) as step:
            for chunk in range(xs.tiles.count):
                x, o, y = xs.read(chunk, toward=1), os.read(chunk, toward=1), ys.blank(chunk)
                step(x, o, y)
                xs.release(x)
                os.release(o)
                ys.write(chunk, y)


class _Passing:
    """x of a layer, one chunk at a time. What came by for the layer before is kept where the chunk's o was."""

    def __init__(self, tapes: Pass, layer: int, rebuild: Rebuild, steps: dict[int, Step]):
        self._tapes, self._layer, self._steps = tapes, layer, steps
        self._xs = tapes.x(rebuild.source)
        self._home = tapes.x(layer - 1) if layer - 1 in rebuild.homes else None
        self._below: dict[int, tuple[int, Tensor]] = {}  # by the address of the x that was made of it

    def read(self, index: int, toward: int = 0) -> Tensor:
        source = self._xs.read(index, toward)
        x, y = source, torch.empty_like(source)
        for layer, step in self._steps.items():
            os = _kept_o(self._tapes, layer)
            o = os.read(index)
            if layer + 1 in self._steps:
                _kept_o(self._tapes, layer + 1).prefetch(index)
            elif self._home is not None:
                self._below[y.data_ptr()] = index, x.clone()
            step(x, o, y)
            os.release(o)
            x = y
        self._xs.release(source)
        return y

    def prefetch(self, index: int) -> None:
        self._xs.prefetch(index)

    def release(self, tile: Tensor) -> None:
        """The chunk is done, its o among it."""
        if self._home is not None:
            index, below = self._below.pop(tile.data_ptr())
            self._home.write(index, self._home.blank(index).copy_(below))


def _kept_o(tapes: Pass, layer: int) -> Tape:
    o, _ = tapes.attended(layer)
    return o
