"""Placement from budgets: what is kept goes to the device, then to the host; what has room in neither is made again.

The order of what is given up, dearest last: x of some layers (mix and feed run again, linear work), then o, from the
first layer on (attention runs again, which at long contexts is nearly all of a step). Giving up an o saves little: the
x of the next layer, which could have been rebuilt from it, must then be kept.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ithaca.errors import PlanError
from ithaca.model.source import DTYPES
from ithaca.model.spec import Spec
from ithaca.schedule.needs import Need, device_bytes, needs, tiles_of
from ithaca.schedule.places import REBUILD, RECOMPUTE, spell
from ithaca.schedule.plan import Plan
from ithaca.sizes import format_bytes, parse_bytes
from ithaca.tape.tiles import Tiles


def place(plan: Plan, spec: Spec, tokens: int, *, device: int | str, host: int | str, dtype: str = "bfloat16") -> Plan:
    """The Plan with x and o of every layer placed, for passes over `tokens` tokens of a rank.

    `device` and `host` are the bytes that a rank's tapes may take there, slots included, as 20GB; 0 for none.
    """
    if not plan.sweeps:
        raise PlanError(f"recipe '{plan.recipe}' keeps no o that could be placed: recipe 'sweep' does")
    free = _Budget(*(parse_bytes(given) if given else 0 for given in (device, host)))
    choices = list(_choices(spec.layers))
    placed = _first_that_fits(plan, spec, dtype, tokens, free, choices)
    if placed is None:
        least = [choices[spec.layers - 1], choices[-1]]  # x of the first layer and every o; every x and no o

        def too_many(count: int) -> bool:
            return _first_that_fits(plan, spec, dtype, count, free, least) is None

        most = bisect_left(range(1, tokens), True, key=too_many)
        raise PlanError(
            f"tapes for {tokens} tokens have no room in device={format_bytes(free.device)} and "
            f"host={format_bytes(free.host)}, even with x of one layer alone: {most} tokens have"
        )
    return placed


def _first_that_fits(
    plan: Plan, spec: Spec, dtype: str, tokens: int, free: "_Budget", choices: list["_Kept"]
) -> Plan | None:
    tiles = tiles_of(plan, tokens, shorten=True)
    filled = (_fill(plan, spec, dtype, tiles, free, *kept) for kept in choices)
    return next((placed for placed, used in filled if used.device <= free.device and used.host <= free.host), None)


_Kept = tuple[set[int], set[int]]  # layers that keep x, and layers that keep o


@dataclass(frozen=True)
class _Budget:
    """Bytes, given or used."""

    device: int
    host: int


def _choices(layers: int) -> Iterator[_Kept]:
    """What can be kept, the fastest choice first."""
    every = set(range(layers))
    for count in range(layers, 0, -1):
        yield layers_to_keep(layers, count), every
    for given_up in range(1, layers + 1):
        yield set(range(min(given_up + 1, layers))), every - set(range(given_up))


def layers_to_keep(layers: int, count: int) -> set[int]:
    """The layers whose x are worth the most when so many are kept; the first is always one.

    Rebuilt x lie on the tapes of layers above that are done. Those double on the way down, and so may the distances:
    from 2, 4, 8 … layers on, each x is rebuilt only once.
    """
    lengths = [2 ** min(place + 1, 32) for place in range(count)]  # from the top
    if (total := sum(lengths)) < layers:
        lengths = [layers * length // total for length in lengths]
    top, kept = layers, {0}
    for number, length in enumerate(lengths[:-1]):
        top = max(top - length, count - 1 - number)  # one layer at least for each that is still to come
        kept.add(top)
    return kept


def _fill(
    plan: Plan, spec: Spec, dtype: str, tiles: Tiles, free: _Budget, kept_x: set[int], kept_o: set[int]
) -> tuple[Plan, _Budget]:
    """Keep these, on the device while it has room: the gradient, which every layer reads and writes, where the Plan
    leaves that open; then from the last layer down, since what is read soonest gains most."""
    x = ["host" if layer in kept_x else REBUILD for layer in range(spec.layers)]
    o = ["host" if layer in kept_o else RECOMPUTE for layer in range(spec.layers)]

    def asked(gradient: str | None) -> tuple[Plan, list[Need]]:
        placed = replace(plan, x=spell(x), o=spell(o), gradient=gradient)
        return placed, needs(placed.settled(), spec, DTYPES[dtype])

    gradient = plan.gradient
    if gradient is None and device_bytes(asked("device")[1], tiles) <= free.device:
        gradient = "device"
    needed = asked(gradient)[1]
    sizes, left = {need.name: need.row * tiles.length for need in needed}, free.device - device_bytes(needed, tiles)
    for layer in reversed(range(spec.layers)):
        for words, size in ((o, sizes.get("o", 0)), (x, sizes["x"])):
            if words[layer] == "host" and size <= left:
                words[layer] = "device"
                left -= size
    placed, needed = asked(gradient)
    hosted = sum(need.bytes_of(tiles.length) for need in needed if need.place == "host")
    return placed, _Budget(device_bytes(needed, tiles), hosted)
