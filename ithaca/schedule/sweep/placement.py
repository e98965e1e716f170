"""Placement from budgets: what is kept goes to the device, then to the host, then to the disk; what is not kept is made
again.

Given up first is what costs the least work a second time: x of some layers (mix and feed, linear in the tokens), and
only then o, from the first layer on (attention, at long contexts nearly all of a step). An o that is given up saves
little: the x of the next layer, which could have been rebuilt from it, must then be kept.

A disk is slow, so going there counts as work: at long contexts o goes to the disk before it is given up, x hardly ever.
To the disk go first the o, which are written and read once in a step (an x is read three times: by the next layer, for
K and V, and for its chunk), and of those the first layers', which backward needs last.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ithaca.base.errors import PlanError, suggestion
from ithaca.base.sizes import format_bytes, parse_bytes, parse_tokens
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.head_split import split_heads
from ithaca.plans.places import REBUILD, RECOMPUTE, Placement, spell
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import (
    TapeSpec,
    device_bytes,
    disk_bytes,
    has_room_for_x,
    host_bytes,
    layout_of,
    passing_bytes,
    tape_specs,
    tiles_of,
)
from ithaca.schedule.sweep.rebuild import fewest_kept, layers_to_keep, rebuild_passes
from ithaca.tape.spec import STAGED, staged_bytes

CROSSING = 75_000  # multiplications that a rank does while a byte goes to a disk or comes back: 300 T/s against 4 GB/s
FEW = 16  # choices
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
    disk: int | str = 0,
    folder: str | None = None,
) -> Plan:
    """The Plan with x and o of every layer placed, for passes over `tokens` tokens that `ring` × `ulysses` ranks
    share.

    `device`, `host` and `disk` are the bytes that a rank's tapes may take there, as 20GB; 0 for none. The device's are
    also for slots, and for weights that are gathered beyond a layer's own to make an x in passing; the host's also for
    what passes through on its way to the disk. `folder` is where the disk's tapes go; not given: where the Plan says.
    """
    tokens, where, free = _read(plan, spec, tokens, device, host, disk, ulysses, ring, dtype, folder)
    placed = _cheapest_that_fits(plan, spec, where, tokens, free, [*_choices(spec.layers)])
    if placed is None:
        least = least_choices(spec.layers, recomputing=True)

        def too_many(count: int) -> bool:
            return _cheapest_that_fits(plan, spec, where, count, free, least) is None

        most = bisect_left(range(1, tokens), True, key=too_many)
        other = f"{most} tokens have" if most else "give more of either"
        places = [f"device={format_bytes(free.device)}", f"host={format_bytes(free.host)}"]
        places += [f"disk={format_bytes(free.disk)}"] if free.disk else []
        raise PlanError(
            f"tapes for {tokens} tokens have no room in {' and '.join(places)}, even with x of few layers: {other}"
        )
    return placed


def try_place(
    plan: Plan,
    spec: Spec,
    tokens: int,
    device: int,
    host: int,
    disk: int,
    ulysses: int,
    ring: int,
    folder: str,
    choices: list["Kept"],
) -> Plan | None:
    """The same with some choices of what is kept, for those who try many; None where there is no room."""
    tokens, where, free = _read(plan, spec, tokens, device, host, disk, ulysses, ring, "bfloat16", folder)
    return _cheapest_that_fits(plan, spec, where, tokens, free, choices)


def every_choice(layers: int) -> list["Kept"]:
    return [*_choices(layers)]


def some_choices(layers: int) -> list["Kept"]:
    """A few of all, evenly: good enough to compare Plans by."""
    every = [*_choices(layers)]
    return [*every[:: max(len(every) // FEW, 1)], *least_choices(layers, recomputing=True)]


def least_choices(layers: int, recomputing: bool) -> list["Kept"]:
    """What takes the fewest bytes: every o with the fewest x; of the device, with every x, so that none is made in
    passing; or, where attention may run again, every x alone."""
    every = [*_choices(layers)]
    return [every[0], every[-layers - 1], *(every[-1:] if recomputing else [])]


def _read(
    plan: Plan,
    spec: Spec,
    tokens: int | str,
    device: int | str,
    host: int | str,
    disk: int | str,
    ulysses: int,
    ring: int,
    dtype: str,
    folder: str | None,
) -> tuple[int, "_Where", "_Budget"]:
    """What is asked for, if it makes sense."""
    if not plan.sweeps:
        raise PlanError(f"recipe '{plan.recipe}' keeps no o that could be placed: recipe 'sweep' does")
    if dtype not in ITEMSIZES:
        raise PlanError(f"dtype '{dtype}' is not supported: {suggestion(str(dtype), ITEMSIZES)}")
    tokens = parse_tokens(tokens)
    layout_of(plan, tokens, ulysses, ring)  # whose chunk fits
    split = split_heads(spec.heads, spec.kv_heads, ulysses)
    fullest = max(range(ulysses), key=lambda rank: (len(split.kv[rank]), len(split.q[rank])))
    free = _Budget(*(parse_bytes(given) if given else 0 for given in (device, host, disk)))
    folder = folder or plan.disk
    if free.disk and folder is None:
        raise PlanError(f"disk={format_bytes(free.disk)} is of no use without a folder: name one, as folder='/scratch'")
    mine = Heads(split.q[fullest], split.kv[fullest])
    return tokens, _Where(ITEMSIZES[dtype], mine, ulysses, ring, folder if free.disk else None), free


def _cheapest_that_fits(
    plan: Plan, spec: Spec, where: "_Where", tokens: int, free: "_Budget", choices: list["Kept"]
) -> Plan | None:
    tiles = tiles_of(plan, layout_of(plan, tokens, where.ulysses, where.ring, shorten=True))
    best, least = None, float("inf")
    choices = [*_possible(plan, spec, where, tiles, free, choices)]
    works = [_work_again(spec, tokens, *kept) for kept in choices]
    for work, kept in sorted(zip(works, choices, strict=True), key=lambda pair: pair[0]):
        if work >= least:
            break  # even without a byte on the disk
        placed, used = _fill(plan, spec, where, tiles, free, *kept)
        cost = work + _crossing(placed, spec, where)
        if used.within(free) and cost < least:
            best, least = placed, cost
    return best


def _possible(
    plan: Plan, spec: Spec, where: "_Where", tiles: Tiles, free: "_Budget", choices: list["Kept"]
) -> Iterator["Kept"]:
    """Those that are not too much for all places together, whatever goes where: most need no closer look."""
    asked = _needs(replace(plan, x="host", o="host"), spec, where)
    x, o = (next(need.row for need in asked if need.name == name) * tiles.length for name in ("x", "o"))
    room = free.device + free.host + free.disk
    room -= sum(need.bytes_of(tiles.length) for need in asked if need.name not in ("x", "o", "lse"))
    return (kept for kept in choices if len(kept[0]) * x + len(kept[1]) * o <= room)


Kept = tuple[set[int], set[int]]  # layers that keep x, and layers that keep o


def _work_again(spec: Spec, tokens: int, kept_x: set[int], kept_o: set[int]) -> int:
    """Multiplications for each token that backward does a second time."""
    passes = rebuild_passes(_placement(spec, kept_x, kept_o), has_room_for_x(spec))
    width = spec.heads * spec.head_size
    return passes * spec.hidden * (width + 3 * spec.mlp) + (spec.layers - len(kept_o)) * tokens * width


def _crossing(plan: Plan, spec: Spec, where: "_Where") -> int:
    """What a token's x and o that go to the disk and come back count as, in multiplications."""
    placement = plan.placement(spec.layers)
    numbers = 4 * placement.x.count("disk") * spec.hidden + 2 * placement.o.count("disk") * spec.heads * spec.head_size
    return numbers * where.itemsize * CROSSING


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
    folder: str | None  # on its disk; None: there is none


@dataclass(frozen=True)
class _Budget:
    """Bytes, given or used."""

    device: int
    host: int
    disk: int

    def within(self, other: "_Budget") -> bool:
        return self.device <= other.device and self.host <= other.host and self.disk <= other.disk


def _choices(layers: int) -> Iterator[Kept]:
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
    leaves that open; then from the last layer down, since what is read soonest gains most. What the host has no room
    for is on the disk."""
    placement = _placement(spec, kept_x, kept_o, "device")
    placed = _placed(replace(plan, residual=plan.residual or "device"), where, placement.x, placement.o)
    if (used := _used(placed, spec, where, tiles)).device <= free.device:
        return placed, used  # first, since with nothing on the host there are no slots to hold room for
    placement = _placement(spec, kept_x, kept_o)
    placed = _placed(plan, where, placement.x, placement.o)
    if plan.residual is None:
        beside = replace(placed, residual="device")
        placed = beside if _used(beside, spec, where, tiles).device <= free.device else placed
    x, o = list(placement.x), list(placement.o)
    rows = {need.name: need.row for need in _needs(placed, spec, where)}
    sizes = {name: row * tiles.length for name, row in rows.items()}
    left = free.device - _used(placed, spec, where, tiles).device
    for layer in reversed(range(spec.layers)):
        for words, size in ((o, sizes.get("o", 0)), (x, sizes["x"])):
            if words[layer] == "host" and size <= left:
                words[layer] = "device"
                left -= size
    placed = _placed(placed, where, x, o)
    used = _used(placed, spec, where, tiles)
    if where.folder is None or used.host <= free.host:
        return placed, used
    left = free.host - used.host - STAGED * max(staged_bytes(tiles, rows.get(name, 0)) for name in ("x", "o"))
    for words, row in ((o, rows.get("o", 0)), (x, rows["x"])):
        for layer, word in enumerate(words):
            if word == "host" and left < 0:
                words[layer] = "disk"
                left += row * tiles.length
    placed = _placed(placed, where, x, o)
    return placed, _used(placed, spec, where, tiles)


def _placed(plan: Plan, where: _Where, x: Sequence[str], o: Sequence[str]) -> Plan:
    """The Plan with these words; a folder is named only where one of them is the disk."""
    return replace(plan, x=spell(x), o=spell(o), disk=where.folder if "disk" in (*x, *o) else None)


def _needs(plan: Plan, spec: Spec, where: _Where) -> list[TapeSpec]:
    return tape_specs(plan.settled(), spec, where.itemsize, where.mine, where.ulysses, where.ring)


def _used(plan: Plan, spec: Spec, where: _Where, tiles: Tiles) -> _Budget:
    asked = _needs(plan, spec, where)
    device = device_bytes(asked, tiles) + passing_bytes(plan, spec, asked)
    return _Budget(device, host_bytes(asked, tiles, gpu=True), disk_bytes(asked, tiles))
