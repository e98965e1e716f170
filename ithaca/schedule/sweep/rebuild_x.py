"""x of a layer for its backward pass: read from its tape, or rebuilt from a layer below (rebuild.py has the plan).

From x and o of a layer, output projection and MLP give the next x, over the same tiles as forward, so the same bits.
Below layer 0 there is the embedding.

    onto tapes    layer by layer over all chunks, with the weights of one layer gathered at a time
    in passing    chunk by chunk through all layers, with the weights of all of them gathered together; the table too

In passing, a chunk takes at most two more hidden states: its x, and that of the layer below. x is rebuilt at every
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
OpenReader = Callable[[bool], XReader]  # given True, the o of a chunk is not needed after its x is released


@contextmanager
def open_xs(tapes: Pass, layer: int, advance_from: AdvanceFrom, look_up: LookUp) -> Iterator[OpenReader]:
    """Yield an OpenReader of a layer's x for its backward pass. An x that is rebuilt onto tapes is rebuilt first."""
    rebuild = tapes.rebuild(layer)
    if rebuild is not None and layer not in rebuild.targets:
        with ExitStack() as stack:
            source = stack.enter_context(look_up()) if rebuild.source == EMBEDDING else tapes.x(rebuild.source)
            steps = {below: stack.enter_context(advance_from(below)) for below in rebuild.layers(layer)}
            tapes.use_rebuilt(rebuild)
            target = tapes.x(layer - 1) if layer - 1 in rebuild.targets else None
            yield lambda used_up: _PassingX(tapes, source, steps, target if used_up else None)
        return
    if rebuild is not None:
        tapes.use_rebuilt(rebuild)
        _rebuild_onto_tapes(tapes, layer, rebuild, advance_from, look_up)
    xs = tapes.x(layer)
    yield lambda _: xs


def _rebuild_onto_tapes(tapes: Pass, top: int, rebuild: Rebuild, advance_from: AdvanceFrom, look_up: LookUp) -> None:
    """Rebuild x layer by layer from the nearest saved x, or from the embedding. An intermediate x that nothing else
    needs borrows the top layer's tape."""

    def target(layer: int) -> Tape:
        return tapes.x(layer if layer in rebuild.targets else top)

    if rebuild.source == EMBEDDING:
        ys = target(0)
        with look_up() as rows:
            for chunk in range(ys.tiles.count):
                ys.write(chunk, ys.blank(chunk).copy_(rows.read(chunk)))
    for layer in rebuild.layers(top):
        xs = tapes.x(layer) if layer == rebuild.source else target(layer)
        ys, os = target(layer + 1), _saved_o(tapes, layer)
        with advance_from(layer) as advance:
            for chunk in range(xs.tiles.count):
                x, o, y = xs.read(chunk, toward=1), os.read(chunk, toward=1), ys.blank(chunk)
                advance(x, o, y)
                xs.release(x)
                os.release(o)
                ys.write(chunk, y)


class _PassingX:
    """x of a layer, rebuilt one chunk at a time. x of the layer below goes to `target`, where the chunk's o was."""

    def __init__(self, tapes: Pass, source: XReader, steps: dict[int, Advance], target: Tape | None):
        self._tapes, self._xs, self._steps, self._target = tapes, source, steps, target
        self._below: dict[int, tuple[int, Tensor]] = {}  # by the address of the x that was rebuilt from it

    def read(self, index: int, toward: int = 0, changed: bool = True) -> Tensor:  # noqa: ARG002
        x = source = self._xs.read(index, toward)
        y = torch.empty_like(source) if self._steps else source  # without a step, x is what was looked up
        for layer, advance in self._steps.items():
            os = _saved_o(self._tapes, layer)
            o = os.read(index)
            if layer + 1 in self._steps:
                _saved_o(self._tapes, layer + 1).prefetch(index)
            elif self._target is not None:
                self._below[y.data_ptr()] = index, x.clone()
            advance(x, o, y)
            os.release(o)
            x = y
        self._xs.release(source)
        return y

    def prefetch(self, index: int) -> None:
        self._xs.prefetch(index)

    def release(self, tile: Tensor) -> None:
        """Save x of the layer below in place of the chunk's o, which is not needed any more."""
        if self._target is not None:
            index, below = self._below.pop(tile.data_ptr())
            self._target.write(index, self._target.blank(index).copy_(below))


def _saved_o(tapes: Pass, layer: int) -> Tape:
    o, _ = tapes.o_and_lse(layer)
    return o
