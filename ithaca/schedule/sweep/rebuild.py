"""Keep o, rebuild x: which x are made again in the backward pass, from where, and onto which tapes. Arithmetic only.

Attention is most of a long step, so o is kept; from x and o of a layer the next x costs only mix and feed. The backward
pass goes down the layers. When it comes to one whose x is not there, the x of the nearest layer below that has one is
taken up again, layer by layer. It needs no tapes of its own: what is made lies on those that are no longer needed, the
o and x of layers above that are done. The first layer to come, the last of the model, finds none. Its x then exists for
one chunk at a time, in passing, and the x below it, which comes by, takes the place of the chunk's o when that is used
up. So do all x where an o is narrower than an x, or is not kept. The weights of all layers that are passed through are
then needed together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, Placement

Home = tuple[str, int]  # ("o", 31): the tape of layer 31's o
LONGEST_PASSING = 4  # layers


@dataclass(frozen=True)
class Rebuild:
    """How a layer's x is made again when its turn comes."""

    source: int  # the layer below whose x is there
    homes: Mapping[int, Home]  # what takes the x of the layers after it; some only come by


@lru_cache(maxsize=4096)  # a search asks for the same ones again and again
def plan_rebuilds(placement: Placement, roomy: bool) -> Mapping[int, Rebuild]:
    """By layer; `roomy` when a tape of an o can hold an x."""
    rebuilds: dict[int, Rebuild] = {}
    there: dict[int, Home] = {layer: ("x", layer) for layer, word in enumerate(placement.x) if word != REBUILD}
    free: list[Home] = []
    last = len(placement.x) - 1
    for layer in reversed(range(last + 1)):
        o_serves = roomy and placement.o[layer] != RECOMPUTE
        if layer not in there:
            source = max(below for below in there if below < layer)
            free.sort(key=lambda home: (KEPT.index(_place(placement, home)), home))
            homes = dict(zip(range(layer, source, -1), free, strict=False))
            del free[: len(homes)]
            if not homes and o_serves and layer == last and layer - 1 > source:
                homes = {layer - 1: ("o", layer)}
            rebuilds[layer] = Rebuild(source, homes)
            there |= homes
        if layer in there:
            free.append(there.pop(layer))
        if o_serves and ("o", layer) not in there.values():
            free.append(("o", layer))
    return MappingProxyType(rebuilds)


def layers_to_keep(layers: int, count: int) -> set[int]:
    """The layers whose x are worth the most when so many are kept; the first is always one.

    Free tapes double on the way down, and so may the distances: from 2, 4, 8 … layers on, each x is rebuilt only once.
    The first distance, which is risen in passing with the weights of all its layers, is never long.
    """
    lengths = [2 ** min(place + 1, 32) for place in range(count)]  # from the top
    if (total := sum(lengths)) < layers:
        lengths = [layers * length // total for length in lengths]
        lengths[0] = min(lengths[0], LONGEST_PASSING)
    top, kept = layers, {0}
    for number, length in enumerate(lengths[:-1]):
        top = max(top - length, count - 1 - number)  # one layer at least for each that is still to come
        kept.add(top)
    return kept


def fewest_kept(layers: int) -> int:
    """How many x must be kept for the first distance to be short."""
    return 1 if layers <= LONGEST_PASSING else 2


def passing_layers(rebuilds: Mapping[int, Rebuild]) -> int:
    """The most layers whose weights are needed at once for an x that is made in passing."""
    return max((layer - rebuild.source for layer, rebuild in rebuilds.items() if layer not in rebuild.homes), default=0)


def rebuild_passes(placement: Placement, roomy: bool) -> int:
    """How often mix and feed of a layer run over all tokens in a backward pass because x was not kept."""
    last, passes = len(placement.x) - 1, 0
    for layer, rebuild in plan_rebuilds(placement, roomy).items():
        # What only comes by is made for the chunk itself, and before that for its K and V, which the last layer has
        times = 1 if layer in rebuild.homes or layer == last else 2
        passes += times * (layer - rebuild.source)
    return passes


def _place(placement: Placement, home: Home) -> str:
    kind, layer = home
    return placement.x[layer] if kind == "x" else placement.o[layer]
