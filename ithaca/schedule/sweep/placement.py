"""Placement from budgets: tapes go to the device, then to the host, then to the disk; the rest is recomputed.

Of the tapes that all layers share, K and V live where the Plan says. A residual or log-sum-exps that the Plan leaves
open are placed here with x and o.

The tensors that are cheapest to compute again are given up first: x of layer 0 (a look-up in the embedding), then x of
other layers (output projection and MLP, linear in the tokens), and only then o, from the first layer on (attention, at
long contexts nearly all of a step). Not saving an o frees little, because the next layer's x can then no longer be
rebuilt and must be saved.

A disk is slow, so going there counts as work: at long contexts o goes to the disk before it is given up, x hardly ever.
To the disk go first the tapes that move least for each byte they keep: o and log-sum-exps are written and read once in
a step, an x is read three times (by the next layer, for K and V, and for its chunk), the residual is read and written
by every layer. Of the o, those of the first layers go first, which backward needs last.

Choices are compared by a cost: for the planner the predicted seconds of a step, otherwise multiplications.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ithaca.base.errors import PlanError, suggestion
from ithaca.base.sizes import format_bytes, parse_bytes, parse_tokens
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.plans.places import IN_MEMORY, REBUILD, RECOMPUTE, Placement, spell
from ithaca.plans.plan import PLACED, Plan
from ithaca.schedule.job import BF16, Job
from ithaca.schedule.sweep.cost import passing_bytes
from ithaca.schedule.sweep.rebuild import fewest_kept, layers_to_keep, rebuild_passes
from ithaca.tape.spec import DISK_RATE, STAGED, Budget, device_bytes, disk_bytes, host_bytes, staged_bytes

DISK_COST = int(300e12 / DISK_RATE)  # multiplications a rank does while a byte goes to a disk or comes back
FEW = 16  # choices that are enough to compare Plans by
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}  # bytes of a number

Saved = tuple[set[int], set[int]]  # layers that save x, and layers that save o
Words = dict[str, list[str]]  # by option of the Plan; a word for each layer, or one for all
Cost = Callable[[Plan], tuple[float, float]]  # what a Plan costs, and what it would cost if copies took no time


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
    """The Plan with x and o of every layer placed, for passes over `tokens` tokens that ring × ulysses ranks share.

    `device`, `host` and `disk` are the bytes that a rank's tapes may take there, as 20GB; 0 for none. The device's are
    also for slots, and for weights that are gathered to rebuild an x in passing; the host's also for staging on the way
    to the disk. `folder` is where the disk's tapes go; not given: where the Plan says.
    """
    if dtype not in ITEMSIZES:
        raise PlanError(f"dtype '{dtype}' is not supported: {suggestion(str(dtype), ITEMSIZES)}")
    tokens, axes = parse_tokens(tokens), Axes(ring=ring, ulysses=ulysses)
    free = Budget(*(parse_bytes(given) if given else 0 for given in (device, host, disk)))
    folder = folder or plan.disk
    plan = replace(plan, lse=plan.lse or plan.settled().lse) if plan.sweeps else plan
    if free.disk and folder is None:
        raise PlanError(f"disk={format_bytes(free.disk)} needs a folder: name one, as folder='/scratch'")
    _check_sweep(plan)
    Job(spec=spec, plan=plan, tokens=tokens, axes=axes).costs.layout(plan, axes, tokens, shorten=False)
    placed = fill(plan, spec, axes, tokens, free, every_choice(spec.layers), folder, ITEMSIZES[dtype])
    if placed is None:
        least = least_choices(spec.layers, recomputing=True)

        def too_many(count: int) -> bool:
            return fill(plan, spec, axes, count, free, least, folder, ITEMSIZES[dtype]) is None

        most = bisect_left(range(1, tokens), True, key=too_many)
        cut = f" with chunk={most}" if most < (plan.chunk or 0) else ""
        other = f"{most} tokens{cut} have" if most else "give more of either"
        places = [f"device={format_bytes(free.device)}", f"host={format_bytes(free.host)}"]
        places += [f"disk={format_bytes(free.disk)}"] if free.disk else []
        raise PlanError(
            f"tapes for {tokens} tokens have no room in {' and '.join(places)}, even with x of few layers: {other}"
        )
    return placed


def fill(
    plan: Plan,
    spec: Spec,
    axes: Axes,
    tokens: int,
    free: Budget,
    choices: list[Saved],
    folder: str | None,
    itemsize: int = BF16,
    cost: Cost | None = None,
) -> Plan | None:
    """The Plan with the cheapest of these choices that fits the budgets; None if none does.

    `cost`: what a Plan costs; not given, the multiplications that it does again or could do while it waits for a disk.
    """
    _check_sweep(plan)
    folder = folder if free.disk else plan.disk
    hosted = _placed(plan, folder, {"x": ["host"], "o": ["host"]})
    job = Job(spec=spec, plan=hosted, tokens=tokens, axes=axes, itemsize=itemsize)
    shared = [
        words
        for words in _shared_places(plan)
        if _used(replace(job, plan=_placed(hosted, folder, words))).device <= free.device
    ]
    best, least, worse = None, float("inf"), 0
    if plan.heads is not None:  # head rounds need every o
        choices = [saved for saved in choices if len(saved[1]) == spec.layers]
    choices = [*_possible(job, free, choices)]
    works = [_work_again(spec, tokens, *saved) for saved in choices]
    for work, saved in sorted(zip(works, choices, strict=True), key=lambda pair: pair[0]):
        if cost is None and work >= least:
            break  # no later choice is cheaper, even without a byte on the disk
        placed = _all_on_device(plan, job, free, folder, *saved)
        placed = placed or _fill(plan, job, free, folder, shared, *saved)
        if placed is None:
            continue
        found, at_best = cost(placed) if cost else (work + _disk_work(placed, spec, itemsize), work)
        worse += 1
        if found < least:
            best, least, worse = placed, found, 0
        if at_best >= least or worse > len(choices) // 4:
            break  # the choices that follow compute more, and copies have long ceased to gain
    return best


def _check_sweep(plan: Plan) -> None:
    if not plan.sweeps:
        raise PlanError(f"recipe '{plan.recipe}' saves no o that could be placed: recipe 'sweep' does")


def every_choice(layers: int) -> list[Saved]:
    """All choices of what to save: every o with x of ever fewer layers, then o of ever fewer layers."""
    every, fewest = set(range(layers)), fewest_kept(layers)
    fewer_x = [(layers_to_keep(layers, count), every) for count in range(layers - 1, fewest - 1, -1)]
    fewer_o = [
        (layers_to_keep(layers, fewest) | set(range(1, min(given_up + 1, layers))), every - set(range(given_up)))
        for given_up in range(1, layers + 1)
    ]
    return [(every, every), *fewer_x, *fewer_o]


def some_choices(layers: int) -> list[Saved]:
    """A few of all choices, evenly spread: good enough to compare Plans by."""
    every = every_choice(layers)
    return [*every[:: max(len(every) // FEW, 1)], *least_choices(layers, recomputing=True)]


def least_choices(layers: int, recomputing: bool) -> list[Saved]:
    """The choices with the fewest bytes: every o with the fewest x; on the device, with every x, so that none is
    rebuilt in passing; or, where attention may be recomputed, every x alone."""
    every = every_choice(layers)
    return [every[0], every[-layers - 1], *(every[-1:] if recomputing else [])]


def _possible(job: Job, free: Budget, choices: list[Saved]) -> Iterator[Saved]:
    """The choices that fit into all places together. This cheap check drops most choices."""
    length = job.tiles.length
    x, o = (next(tape.row for tape in job.tapes if tape.name == name) * length for name in ("x", "o"))
    room = free.device + free.host + free.disk
    room -= sum(tape.bytes_of(length) for tape in job.tapes if tape.name not in ("x", "o", "lse"))
    return (saved for saved in choices if len(saved[0]) * x + len(saved[1]) * o <= room)


def _work_again(spec: Spec, tokens: int, saved_x: set[int], saved_o: set[int]) -> int:
    """Multiplications per token that backward does a second time."""
    passes = rebuild_passes(_placement(spec, saved_x, saved_o), spec)
    width = spec.heads * spec.head_size
    return passes * spec.hidden * (width + 3 * spec.mlp) + (spec.layers - len(saved_o)) * tokens * width


def _disk_work(plan: Plan, spec: Spec, itemsize: int) -> int:
    """Multiplications that a token's x and o on disk count as: x is written once and read three times, o once each."""
    placement = plan.placement(spec.layers)
    numbers = 4 * placement.x.count("disk") * spec.hidden + 2 * placement.o.count("disk") * spec.heads * spec.head_size
    return numbers * itemsize * DISK_COST


def _placement(spec: Spec, saved_x: set[int], saved_o: set[int], place: str = "host") -> Placement:
    return Placement(
        tuple(place if layer in saved_x else REBUILD for layer in range(spec.layers)),
        tuple(place if layer in saved_o else RECOMPUTE for layer in range(spec.layers)),
    )


def _all_on_device(
    plan: Plan, job: Job, free: Budget, folder: str | None, saved_x: set[int], saved_o: set[int]
) -> Plan | None:
    """The Plan that saves these on the device, where tapes need no slots; None if they do not fit."""
    sizes = _sizes(job)
    if len(saved_x) * sizes["x"] + len(saved_o) * sizes["o"] > free.device:
        return None
    placement = _placement(job.spec, saved_x, saved_o, "device")
    first = next(_shared_places(plan))
    placed = _placed(plan, folder, {**first, "x": [*placement.x], "o": [*placement.o]})
    return placed if _used(replace(job, plan=placed)).within(free) else None


def _fill(
    plan: Plan,
    job: Job,
    free: Budget,
    folder: str | None,
    shared: list[Words],
    saved_x: set[int],
    saved_o: set[int],
) -> Plan | None:
    """The Plan that saves these, on the device while it has room; None if they do not fit.

    `shared`: places of log-sum-exps and residual that leave room on the device, the fastest first.
    """
    placement = _placement(job.spec, saved_x, saved_o)
    for places in shared:
        words = {name: [*found] for name, found in places.items()} | {"x": [*placement.x], "o": [*placement.o]}
        placed, used = _fill_layers(plan, job, free, folder, words)
        if used.within(free):
            return placed
    return None


def _fill_layers(plan: Plan, job: Job, free: Budget, folder: str | None, words: Words) -> tuple[Plan, Budget]:
    """Move x and o from the host to the device, the last layer first, because backward reads it soonest. What the host
    has no room for goes to the disk."""
    placed = replace(job, plan=_placed(plan, folder, words))
    if (used := _used(placed)).device > free.device:
        return placed.plan, used
    sizes = _sizes(placed)
    left = free.device - used.device
    for layer in reversed(range(job.spec.layers)):
        for name in ("o", "x"):
            if words[name][layer] == "host" and sizes[name] <= left:
                words[name][layer] = "device"
                left -= sizes[name]
    placed = replace(job, plan=_placed(plan, folder, words))
    used = _used(placed)
    if folder is not None and used.host > free.host:
        _spill(placed, _movable(plan, words), free.host - used.host)
        placed = replace(job, plan=_placed(plan, folder, words))
        used = _used(placed)
    return placed.plan, used


def _shared_places(plan: Plan) -> Iterator[Words]:
    """Where log-sum-exps and residual can live, from the device to the host; where the Plan says, if it does."""
    for lse in (plan.lse,) if plan.lse else IN_MEMORY:
        for residual in (plan.residual,) if plan.residual else IN_MEMORY:
            yield {"lse": [lse], "residual": [residual]}


def _movable(plan: Plan, words: Words) -> Words:
    """The tapes that may go to the disk, in this order: x and o, and the others if the Plan leaves them open."""
    names = [name for name in ("o", "lse", "x", "residual") if name in ("x", "o") or not getattr(plan, name)]
    return {name: words[name] for name in names}


def _spill(job: Job, words: Words, left: int) -> None:
    """Move tapes from the host to the disk until the host has room. `left`: its room, below zero."""
    tapes = [tape for tape in job.tapes if tape.name in words]
    if not tapes:
        return
    left -= STAGED * max(staged_bytes(tape.tiles(job.tiles), tape.row) for tape in tapes)
    sizes = _sizes(job)
    for name, places in words.items():
        for index, place in enumerate(places):
            if place == "host" and left < 0:
                places[index] = "disk"
                left += sizes[name]


def _sizes(job: Job) -> dict[str, int]:
    """Bytes of a tape by name: of one layer's x or o, or of all that one word of the Plan places."""
    sizes = dict.fromkeys(("x", "o", "lse"), 0)
    for tape in job.tapes:
        size = tape.row * tape.ranks * job.tiles.length
        sizes[tape.name] = size if tape.name in ("x", "o") else size * len(tape.layers)
    return sizes


def _placed(plan: Plan, folder: str | None, words: Words) -> Plan:
    """The Plan with these words; a folder is named only if something is on the disk."""
    places: dict[str, Any] = {name: spell(found) for name, found in words.items()}
    everywhere = ({name: getattr(plan, name) for name in PLACED} | places).values()
    on_disk = any("disk" in word for word in everywhere if word)
    return replace(plan, **places, disk=folder if on_disk else None)


def _used(job: Job) -> Budget:
    device = device_bytes(job.tapes, job.tiles) + passing_bytes(job)
    return Budget(device, host_bytes(job.tapes, job.tiles, gpu=True), disk_bytes(job.tapes, job.tiles))
