"""Placement from budgets: what is kept goes to the device, then to the host; what has room in neither is made again.

Given up first is what costs the least work a second time: x of some layers (mix and feed, linear in the tokens), and
only then o, from the first layer on (attention, at long contexts nearly all of a step). An o that is given up saves
little: the x of the next layer, which could have been rebuilt from it, must then be kept.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ithaca.errors import PlanError, suggestion
from ithaca.model.heads import Heads
from ithaca.model.spec import Spec
from ithaca.parallel.heads import split_heads
from ithaca.plans.needs import Need, device_bytes, has_room_for_x, layout_of, needs, passing_bytes, tiles_of
from ithaca.plans.places import REBUILD, RECOMPUTE, Placement, spell
from ithaca.plans.plan import Plan
from ithaca.plans.rebuild import fewest_kept, layers_to_keep, rebuild_passes
from ithaca.sizes import format_bytes, parse_bytes, parse_tokens
from ithaca.tape.tiles import Tiles

ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}  # bytes of a number


def place(
    plan: Plan,
    spec: Spec,
    tokens: int | str,
    *,
    device: int | str,
    host: int | str,
    ulysses: int = 1,
    ring: int = 1,
    dtype: str = "bfloat16",
) -> Plan:
    """The Plan with x and o of every layer placed, for passes over `tokens` tokens that `ring` × `ulysses` ranks
    share.

    `device` and `host` are the bytes that a rank's tapes may take there, as 20GB; 0 for none. The device's are also for
    slots, and for weights that are gathered beyond a layer's own to make an x in passing.
    """
    if not plan.sweeps:
        raise PlanError(f"recipe '{plan.recipe}' keeps no o that could be placed: recipe 'sweep' does")
    if dtype not in ITEMSIZES:
        raise PlanError(f"dtype '{dtype}' is not supported: {suggestion(str(dtype), ITEMSIZES)}")
    tokens = parse_tokens(tokens)
    layout_of(plan, tokens, ulysses, ring)  # whose chunk fits
    share = split_heads(spec.heads, spec.kv_heads, ulysses)
    fullest = max(range(ulysses), key=lambda rank: (len(share.kv[rank]), len(share.q[rank])))
    where = _Where(ITEMSIZES[dtype], Heads(share.q[fullest], share.kv[fullest]), ulysses, ring)
    free = _Budget(*(parse_bytes(given) if given else 0 for given in (device, host)))
    choices = sorted(_choices(spec.layers), key=lambda kept: _work_again(spec, tokens, *kept))
    placed = _first_that_fits(plan, spec, where, tokens, free, choices)
    if placed is None:
        least = [*_choices(spec.layers)][-spec.layers - 1 :: spec.layers]  # fewest x with every o; every x with no o

        def too_many(count: int) -> bool:
            return _first_that_fits(plan, spec, where, count, free, least) is None

        most = bisect_left(range(1, tokens), True, key=too_many)
        other = f"{most} tokens have" if most else "give more of either"
        raise PlanError(
            f"tapes for {tokens} tokens have no room in device={format_bytes(free.device)} and "
            f"host={format_bytes(free.host)}, even with x of few layers: {other}"
        )
    return placed


def _first_that_fits(
    plan: Plan, spec: Spec, where: "_Where", tokens: int, free: "_Budget", choices: list["_Kept"]
) -> Plan | None:
    tiles = tiles_of(plan, layout_of(plan, tokens, where.ulysses, where.ring, shorten=True))
    rows = {need.name: need.row for need in _needs(plan, spec, where)}
    room = (free.device + free.host) // tiles.length
    possible = [kept for kept in choices if len(kept[0]) * rows["x"] + len(kept[1]) * rows.get("o", 0) <= room]
    filled = (_fill(plan, spec, where, tiles, free, *kept) for kept in possible)
    return next((placed for placed, used in filled if used.device <= free.device and used.host <= free.host), None)


_Kept = tuple[set[int], set[int]]  # layers that keep x, and layers that keep o


def _work_again(spec: Spec, tokens: int, kept_x: set[int], kept_o: set[int]) -> int:
    """Multiplications for each token that backward does a second time."""
    passes = rebuild_passes(_placement(spec, kept_x, kept_o), has_room_for_x(spec))
    width = spec.heads * spec.head_size
    return passes * spec.hidden * (width + 3 * spec.mlp) + (spec.layers - len(kept_o)) * tokens * width


def _placement(spec: Spec, kept_x: set[int], kept_o: set[int], place: str = "host") -> Placement:
    return Placement(
        tuple(place if layer in kept_x else REBUILD for layer in range(spec.layers)),
        tuple(place if layer in kept_o else RECOMPUTE for layer in range(spec.layers)),
    )


@dataclass(frozen=True)
class _Where:
    """One of the ranks that share a sequence."""

    itemsize: int
    mine: Heads
    ulysses: int
    ring: int


@dataclass(frozen=True)
class _Budget:
    """Bytes, given or used."""

    device: int
    host: int


def _choices(layers: int) -> Iterator[_Kept]:
    """What can be kept: every o with x of ever fewer layers, then o of ever fewer."""
    every, fewest = set(range(layers)), fewest_kept(layers)
    for count in range(layers, fewest - 1, -1):
        yield layers_to_keep(layers, count), every
    for given_up in range(1, layers + 1):
        yield layers_to_keep(layers, fewest) | set(range(min(given_up + 1, layers))), every - set(range(given_up))


def _fill(
    plan: Plan, spec: Spec, where: _Where, tiles: Tiles, free: _Budget, kept_x: set[int], kept_o: set[int]
) -> tuple[Plan, _Budget]:
    """Keep these, on the device while it has room: the gradient, which every layer reads and writes, where the Plan
    leaves that open; then from the last layer down, since what is read soonest gains most."""
    placement = _placement(spec, kept_x, kept_o, "device")
    placed = replace(plan, x=spell(placement.x), o=spell(placement.o), gradient=plan.gradient or "device")
    if (used := _used(placed, spec, where, tiles)).device <= free.device:
        return placed, used  # first, since with nothing on the host there are no slots to hold room for
    placement = _placement(spec, kept_x, kept_o)
    placed = replace(plan, x=spell(placement.x), o=spell(placement.o))
    if plan.gradient is None:
        beside = replace(placed, gradient="device")
        placed = beside if _used(beside, spec, where, tiles).device <= free.device else placed
    x, o = list(placement.x), list(placement.o)
    sizes = {need.name: need.row * tiles.length for need in _needs(placed, spec, where)}
    left = free.device - _used(placed, spec, where, tiles).device
    for layer in reversed(range(spec.layers)):
        for words, size in ((o, sizes.get("o", 0)), (x, sizes["x"])):
            if words[layer] == "host" and size <= left:
                words[layer] = "device"
                left -= size
    placed = replace(placed, x=spell(x), o=spell(o))
    return placed, _used(placed, spec, where, tiles)


def _needs(plan: Plan, spec: Spec, where: _Where) -> list[Need]:
    return needs(plan.settled(), spec, where.itemsize, where.mine, where.ulysses, where.ring)


def _used(plan: Plan, spec: Spec, where: _Where, tiles: Tiles) -> _Budget:
    asked = _needs(plan, spec, where)
    hosted = sum(need.bytes_of(tiles.length) for need in asked if need.place == "host")
    return _Budget(device_bytes(asked, tiles) + passing_bytes(plan, spec, asked), hosted)
