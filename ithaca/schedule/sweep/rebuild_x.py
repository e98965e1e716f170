"""x of a layer for its backward pass: read from its tape, or rebuilt from a layer below (rebuild.py has the plan).

From x and o of a layer, output projection and MLP give the next x, over the same tiles as forward, so the same bits.
Below layer 0 there is the embedding.

    onto tapes    layer by layer over all chunks, with the weights of one layer gathered at a time
    in passing    chunk by chunk through all layers, with the weights of all of them gathered together; the table too

In passing, a chunk takes at most two more hidden states: its x, and that of the layer before. It is rebuilt at every
read: for the chunk itself and for K and V of later chunks, in every head round.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ithaca.schedule.sweep.rebuild import EMBEDDING, Rebuild
from ithaca.schedule.tapes import Pass
from ithaca.tape.tape import Tape

Advance = Callable[[Tensor, Tensor, Tensor], None]  # (x, o, y): writes the next layer's x to y, which may be x
AdvanceFrom = Callable[[int], AbstractContextManager[Advance]]  # of a layer, while its weights are gathered


class XReader(Protocol):
    """How a backward pass reads x: a tape, or chunks that are rebuilt in passing."""

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor: ...

    def prefetch(self, index: int) -> None: ...

    def release(self, tile: Tensor) -> None: ...


LookUp = Callable[[], AbstractContextManager[XReader]]  # x of layer 0, while the embedding's table is gathered
OpenReader = Callable[[bool], XReader]  # whether the o of a chunk is used up when its x is released


@contextmanager
def open_xs(tapes: Pass, layer: int, advance_from: AdvanceFrom, look_up: LookUp) -> Iterator[OpenReader]:
    """x of a layer, while its backward pass runs."""
    rebuild = tapes.rebuild(layer)
    if rebuild is not None and layer not in rebuild.homes:
        with ExitStack() as stack:
            source = stack.enter_context(look_up()) if rebuild.source == EMBEDDING else tapes.x(rebuild.source)
            steps = {below: stack.enter_context(advance_from(below)) for below in rebuild.layers(layer)}
            tapes.house(rebuild)
            home = tapes.x(layer - 1) if layer - 1 in rebuild.homes else None
            yield lambda used_up: _PassingX(tapes, source, steps, home if used_up else None)
        return
    if rebuild is not None:
        tapes.house(rebuild)
        _rebuild_onto_tapes(tapes, layer, rebuild, advance_from, look_up)
    xs = tapes.x(layer)
    yield lambda _: xs


def _rebuild_onto_tapes(tapes: Pass, top: int, rebuild: Rebuild, advance_from: AdvanceFrom, look_up: LookUp) -> None:
    """Rebuild x layer by layer from the nearest saved x, or from the embedding. An intermediate x that nothing else
    needs borrows the top layer's tape."""

    def home(layer: int) -> Tape:
        return tapes.x(layer if layer in rebuild.homes else top)

    if rebuild.source == EMBEDDING:
        ys = home(0)
        with look_up() as rows:
            for chunk in range(ys.tiles.count):
                ys.write(chunk, ys.blank(chunk).copy_(rows.read(chunk)))
    for layer in rebuild.layers(top):
        xs = tapes.x(layer) if layer == rebuild.source else home(layer)
        ys, os = home(layer + 1), _saved_o(tapes, layer)
        with advance_from(layer) as advance:
            for chunk in range(xs.tiles.count):
                x, o, y = xs.read(chunk, toward=1), os.read(chunk, toward=1), ys.blank(chunk)
                advance(x, o, y)
                xs.release(x)
                os.release(o)
                ys.write(chunk, y)


class _PassingX:
    """x of a layer, rebuilt one chunk at a time. The x of the layer before goes to `home`, where the chunk's o was."""

    def __init__(self, tapes: Pass, source: XReader, steps: dict[int, Advance], home: Tape | None):
        self._tapes, self._xs, self._steps, self._home = tapes, source, steps, home
        self._below: dict[int, tuple[int, Tensor]] = {}  # by the address of the x that was rebuilt from it

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:  # noqa: ARG002
        x = source = self._xs.read(index, toward)
        y = torch.empty_like(source) if self._steps else source  # without a step, x is what was looked up
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
