"""x of a layer for its backward pass: read from its tape, or rebuilt from a layer below (rebuild.py has the plan).

From x and o of a layer, output projection and MLP give the next x, over the same tiles as forward, so the same bits.

    onto tapes    layer by layer over all chunks, with the weights of one layer gathered at a time
    in passing    chunk by chunk through all layers, with the weights of all of them gathered together

In passing, a chunk takes at most two more hidden states: its x, and that of the layer before. It is rebuilt at every
read: for the chunk itself and for K and V of later chunks, in every head round.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ithaca.schedule.sweep.rebuild import Rebuild
from ithaca.schedule.tapes import Pass
from ithaca.tape.tape import Tape

Advance = Callable[[Tensor, Tensor, Tensor], None]  # (x, o, y): writes the next layer's x to y, which may be x
AdvanceFrom = Callable[[int], AbstractContextManager[Advance]]  # of a layer, while its weights are gathered


class XReader(Protocol):
    """How a backward pass reads x: a tape, or chunks that are rebuilt in passing."""

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor: ...

    def prefetch(self, index: int) -> None: ...

    def release(self, tile: Tensor) -> None: ...


OpenReader = Callable[[bool], XReader]  # whether the o of a chunk is used up when its x is released


@contextmanager
def open_xs(tapes: Pass, layer: int, advance_from: AdvanceFrom) -> Iterator[OpenReader]:
    """x of a layer, while its backward pass runs."""
    rebuild = tapes.rebuild(layer)
    if rebuild is not None and layer not in rebuild.homes:
        with ExitStack() as stack:
            steps = {below: stack.enter_context(advance_from(below)) for below in range(rebuild.source, layer)}
            tapes.house(rebuild)
            home = tapes.x(layer - 1) if layer - 1 in rebuild.homes else None
            yield lambda used_up: _PassingX(tapes, rebuild, steps, home if used_up else None)
        return
    if rebuild is not None:
        tapes.house(rebuild)
        _rebuild_onto_tapes(tapes, layer, rebuild, advance_from)
    xs = tapes.x(layer)
    yield lambda _: xs


def _rebuild_onto_tapes(tapes: Pass, top: int, rebuild: Rebuild, advance_from: AdvanceFrom) -> None:
    """Rebuild x layer by layer from the nearest saved x. An intermediate x that nothing else needs borrows the top
    layer's tape."""
    for layer in range(rebuild.source, top):
        xs = tapes.x(layer if layer == rebuild.source or layer in rebuild.homes else top)
        ys = tapes.x(layer + 1 if layer + 1 in rebuild.homes else top)
        os = _saved_o(tapes, layer)
        with advance_from(layer) as advance:
            for chunk in range(xs.tiles.count):
                x, o, y = xs.read(chunk, toward=1), os.read(chunk, toward=1), ys.blank(chunk)
                advance(x, o, y)
                xs.release(x)
                os.release(o)
                ys.write(chunk, y)


class _PassingX:
    """x of a layer, rebuilt one chunk at a time. The x of the layer before goes to `home`, where the chunk's o was."""

    def __init__(self, tapes: Pass, rebuild: Rebuild, steps: dict[int, Advance], home: Tape | None):
        self._tapes, self._steps, self._home = tapes, steps, home
        self._xs = tapes.x(rebuild.source)
        self._below: dict[int, tuple[int, Tensor]] = {}  # by the address of the x that was rebuilt from it

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:  # noqa: ARG002
        source = self._xs.read(index, toward)
        x, y = source, torch.empty_like(source)
        for layer, advance in self._steps.items():
            os = _saved_o(self._tapes, layer)
            o = os.read(index)
            if layer + 1 in self._steps:
                _saved_o(self._tapes, layer + 1).prefetch(index)
            elif self._home is not None:
                self._below[y.data_ptr()] = index, x.clone()
            advance(x, o, y)
            os.release(o)
            x = y
        self._xs.release(source)
        return y

    def prefetch(self, index: int) -> None:
        self._xs.prefetch(index)

    def release(self, tile: Tensor) -> None:
        """The chunk is done, and so is its o: save the x of the layer before in its place."""
        if self._home is not None:
            index, below = self._below.pop(tile.data_ptr())
            self._home.write(index, self._home.blank(index).copy_(below))


def _saved_o(tapes: Pass, layer: int) -> Tape:
    o, _ = tapes.o_and_lse(layer)
    return o
