"""Keep o, rebuild x: which x are rebuilt in the backward pass, from which layer, and onto which tapes. No torch.

Attention is most of a long step, so o is saved. From x and o of a layer, the next x costs only the output projection
and the MLP. x of layer 0 costs a look-up in the embedding, whose table is gathered meanwhile. Backward goes down the
layers. When it reaches a layer whose x was not saved, it starts from the nearest saved x below, or from the embedding,
and recomputes layer by layer. Rebuilt x need no tapes of their own: they go onto tapes of layers above,
whose o and x are no longer needed.

The last layer comes first and finds no free tape. Its x exists for one chunk at a time: the chunk passes through all
layers from the saved x on, with the weights of these layers gathered together. The x just below takes the place of the
chunk's o once that is used up. The same happens to every x if an o is narrower than an x, or is not saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ithaca.model.spec import Spec
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, Placement
from ithaca.plans.plan import Plan

TapeName = tuple[str, int]  # ("o", 31): the tape of layer 31's o
EMBEDDING = -1  # the "layer" below layer 0
LONGEST_PASSING = 4  # layers that a chunk passes through with their weights gathered together


@dataclass(frozen=True)
class Rebuild:
    """How the x of one layer is rebuilt."""

    source: int  # the layer below that has an x to start from, or EMBEDDING
    targets: Mapping[int, TapeName]  # the tapes that take x of the layers above it; an x without one is not stored

    def layers(self, top: int) -> range:
        """The layers whose output projection and MLP run to rebuild the x of `top`."""
        return range(max(self.source, 0), top)


def rebuilds_of(plan: Plan, spec: Spec) -> Mapping[int, Rebuild]:
    """The rebuilds of a backward pass, by layer."""
    return plan_rebuilds(plan.placement(spec.layers), x_fits_o(spec)) if plan.sweeps else {}


def x_fits_o(spec: Spec) -> bool:
    """Whether the tape of an o can hold an x."""
    return spec.heads * spec.head_size >= spec.hidden


@lru_cache(maxsize=4096)  # the planner's search asks for the same values many times
def plan_rebuilds(placement: Placement, roomy: bool) -> Mapping[int, Rebuild]:
    """The rebuilds of a backward pass, by layer; `roomy`: the tape of an o can hold an x."""
    rebuilds: dict[int, Rebuild] = {}
    there: dict[int, TapeName] = {layer: ("x", layer) for layer, word in enumerate(placement.x) if word != REBUILD}
    free: list[TapeName] = []
    last = len(placement.x) - 1
    for layer in reversed(range(last + 1)):
        o_serves = roomy and placement.o[layer] != RECOMPUTE
        if layer not in there:
            source = max((below for below in there if below < layer), default=EMBEDDING)
            free.sort(key=lambda target: (KEPT.index(_place(placement, target)), target))
            targets = dict(zip(range(layer, source, -1), free, strict=False))
            del free[: len(targets)]
            if not targets and o_serves and layer == last and layer - 1 > source:
                targets = {layer - 1: ("o", layer)}
            rebuilds[layer] = Rebuild(source, targets)
            there |= targets
        if layer in there:
            free.append(there.pop(layer))
        if o_serves and ("o", layer) not in there.values():
            free.append(("o", layer))
    return MappingProxyType(rebuilds)


def layers_to_keep(layers: int, count: int) -> set[int]:
    """The best layers to save x of, if only `count` are saved; never layer 0, because its x costs only a look-up.

    Free tapes double on the way down, and so can distances: 2, 4, 8 … layers, and each x is rebuilt only once. The
    first distance stays short, because the weights of all its layers are gathered together.
    """
    assert count < layers
    lengths = [2 ** min(place + 1, 32) for place in range(count + 1)]  # from the top
    if (total := sum(lengths)) < layers:
        lengths = [layers * length // total for length in lengths]
        lengths[0] = min(lengths[0], LONGEST_PASSING)
    top, kept = layers, set()
    for number, length in enumerate(lengths[:-1]):
        top = max(top - length, count - number)  # leave a layer for each that is still to come
        kept.add(top)
    return kept


def fewest_kept(layers: int) -> int:
    """How many x must be saved so that the first distance is short."""
    return 0 if layers <= LONGEST_PASSING else 1


def passing_layers(rebuilds: Mapping[int, Rebuild]) -> int:
    """The most layers whose weights are gathered together to rebuild an x in passing."""
    in_passing = (rebuild.layers(layer) for layer, rebuild in rebuilds.items() if layer not in rebuild.targets)
    return max(map(len, in_passing), default=0)


def looks_up_in_passing(rebuilds: Mapping[int, Rebuild]) -> bool:
    """Whether the embedding's table is gathered while a block runs, to rebuild an x in passing."""
    return any(rebuild.source == EMBEDDING and layer not in rebuild.targets for layer, rebuild in rebuilds.items())


def rebuild_passes(placement: Placement, spec: Spec, rounds: int = 1) -> int:
    """How often the output projection and MLP of a layer run over all tokens to rebuild x; `rounds`: of heads."""
    last, passes = len(placement.x) - 1, 0
    for layer, rebuild in plan_rebuilds(placement, x_fits_o(spec)).items():
        # In passing, each round rebuilds x for the chunk itself and, except in the first round of the last layer,
        # before that for its K and V
        times = 1 if layer in rebuild.targets else 2 * rounds - (layer == last)
        passes += times * len(rebuild.layers(layer))
    return passes


def _place(placement: Placement, target: TapeName) -> str:
    kind, layer = target
    return placement.x[layer] if kind == "x" else placement.o[layer]
