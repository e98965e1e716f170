"""Placement from budgets: saved tensors go to the device, then to the host, then to the disk; the rest is recomputed.

What is cheapest to compute again is given up first: x of some layers (output projection and MLP, linear in the tokens),
and only then o, from the first layer on (attention, at long contexts nearly all of a step). Not saving an o frees
little, because the next layer's x can then no longer be rebuilt and must be saved.

A disk is slow, so going there counts as work: at long contexts o goes to the disk before it is given up, x hardly ever.
To the disk go first the o, which are written and read once in a step (an x is read three times: by the next layer, for
K and V, and for its chunk), and of those the first layers', which backward needs last.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ithaca.base.errors import PlanError, suggestion
from ithaca.base.sizes import format_bytes, parse_bytes, parse_tokens
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.plans.places import REBUILD, RECOMPUTE, Placement, spell
from ithaca.plans.plan import Plan
from ithaca.schedule.job import BF16, Job
from ithaca.schedule.sweep.cost import passing_bytes
from ithaca.schedule.sweep.rebuild import fewest_kept, layers_to_keep, rebuild_passes
from ithaca.tape.spec import STAGED, Budget, device_bytes, disk_bytes, host_bytes, staged_bytes

DISK_COST = 75_000  # multiplications a rank does while a byte goes to a disk or comes back: 300 T/s against 4 GB/s
FEW = 16  # choices that are enough to compare Plans by
ITEMSIZES = {"bfloat16": 2, "float32": 4, "float64": 8}  # bytes of a number

Saved = tuple[set[int], set[int]]  # layers that save x, and layers that save o


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
    if free.disk and folder is None:
        raise PlanError(f"disk={format_bytes(free.disk)} is of no use without a folder: name one, as folder='/scratch'")
    _check_sweep(plan)
    Job(spec=spec, plan=plan, tokens=tokens, axes=axes).costs.layout(plan, axes, tokens, shorten=False)
    placed = fill(plan, spec, axes, tokens, free, every_choice(spec.layers), folder, ITEMSIZES[dtype])
    if placed is None:
        least = least_choices(spec.layers, recomputing=True)

        def too_many(count: int) -> bool:
            return fill(plan, spec, axes, count, free, least, folder, ITEMSIZES[dtype]) is None

        most = bisect_left(range(1, tokens), True, key=too_many)
        other = f"{most} tokens have" if most else "give more of either"
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
) -> Plan | None:
    """The Plan with the cheapest of these choices that fits the budgets; None if none does."""
    _check_sweep(plan)
    folder = folder if free.disk else None
    job = Job(spec=spec, plan=replace(plan, x="host", o="host", disk=None), tokens=tokens, axes=axes, itemsize=itemsize)
    best, least = None, float("inf")
    if plan.heads is not None:  # head rounds need every o
        choices = [saved for saved in choices if len(saved[1]) == spec.layers]
    choices = [*_possible(job, free, choices)]
    works = [_work_again(spec, tokens, *saved) for saved in choices]
    for work, saved in sorted(zip(works, choices, strict=True), key=lambda pair: pair[0]):
        if work >= least:
            break  # even without a byte on the disk
        placed, used = _fill(plan, job, free, folder, *saved)
        cost = work + _disk_work(placed, spec, itemsize)
        if used.within(free) and cost < least:
            best, least = placed, cost
    return best


def _check_sweep(plan: Plan) -> None:
    if not plan.sweeps:
        raise PlanError(f"recipe '{plan.recipe}' saves no o that could be placed: recipe 'sweep' does")


def every_choice(layers: int) -> list[Saved]:
    """What can be saved: every o with x of ever fewer layers, then o of ever fewer."""
    every, fewest = set(range(layers)), fewest_kept(layers)
    fewer_x = [(layers_to_keep(layers, count), every) for count in range(layers, fewest - 1, -1)]
    fewer_o = [
        (layers_to_keep(layers, fewest) | set(range(min(given_up + 1, layers))), every - set(range(given_up)))
        for given_up in range(1, layers + 1)
    ]
    return fewer_x + fewer_o


def some_choices(layers: int) -> list[Saved]:
    """A few of all, evenly spread: good enough to compare Plans by."""
    every = every_choice(layers)
    return [*every[:: max(len(every) // FEW, 1)], *least_choices(layers, recomputing=True)]


def least_choices(layers: int, recomputing: bool) -> list[Saved]:
    """The choices with the fewest bytes: every o with the fewest x; on the device, with every x, so that none is
    rebuilt in passing; or, where attention may be recomputed, every x alone."""
    every = every_choice(layers)
    return [every[0], every[-layers - 1], *(every[-1:] if recomputing else [])]


def _possible(job: Job, free: Budget, choices: list[Saved]) -> Iterator[Saved]:
    """Choices that are not too much for all places together: most need no closer look."""
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
    """What a token's x and o on the disk count as, in multiplications: x is written and read three times, o once."""
    placement = plan.placement(spec.layers)
    numbers = 4 * placement.x.count("disk") * spec.hidden + 2 * placement.o.count("disk") * spec.heads * spec.head_size
    return numbers * itemsize * DISK_COST


def _placement(spec: Spec, saved_x: set[int], saved_o: set[int], place: str = "host") -> Placement:
    return Placement(
        tuple(place if layer in saved_x else REBUILD for layer in range(spec.layers)),
        tuple(place if layer in saved_o else RECOMPUTE for layer in range(spec.layers)),
    )


def _fill(
    plan: Plan, job: Job, free: Budget, folder: str | None, saved_x: set[int], saved_o: set[int]
) -> tuple[Plan, Budget]:
    """Save these on the device while it has room: first the residual tape, which every layer reads and writes, unless
    the Plan says where; then from the last layer down, because what is read soonest gains most. What the host has no
    room for goes to the disk."""
    spec, tiles = job.spec, job.tiles
    placement = _placement(spec, saved_x, saved_o, "device")
    placed = _placed(replace(plan, residual=plan.residual or "device"), folder, placement.x, placement.o)
    if (used := _used(job, placed)).device <= free.device:
        return placed, used  # first, because with nothing on the host no slots are needed
    placement = _placement(spec, saved_x, saved_o)
    placed = _placed(plan, folder, placement.x, placement.o)
    if plan.residual is None:
        beside = replace(placed, residual="device")
        placed = beside if _used(job, beside).device <= free.device else placed
    x, o = list(placement.x), list(placement.o)
    rows = {tape.name: tape.row for tape in replace(job, plan=placed).tapes}
    sizes = {name: row * tiles.length for name, row in rows.items()}
    left = free.device - _used(job, placed).device
    for layer in reversed(range(spec.layers)):
        for words, size in ((o, sizes.get("o", 0)), (x, sizes["x"])):
            if words[layer] == "host" and size <= left:
                words[layer] = "device"
                left -= size
    placed = _placed(placed, folder, x, o)
    used = _used(job, placed)
    if folder is None or used.host <= free.host:
        return placed, used
    left = free.host - used.host - STAGED * max(staged_bytes(tiles, rows.get(name, 0)) for name in ("x", "o"))
    for words, row in ((o, rows.get("o", 0)), (x, rows["x"])):
        for layer, word in enumerate(words):
            if word == "host" and left < 0:
                words[layer] = "disk"
                left += row * tiles.length
    placed = _placed(placed, folder, x, o)
    return placed, _used(job, placed)


def _placed(plan: Plan, folder: str | None, x: Sequence[str], o: Sequence[str]) -> Plan:
    """The Plan with these words; a folder is named only where one of them is the disk."""
    return replace(plan, x=spell(x), o=spell(o), disk=folder if "disk" in (*x, *o) else None)


def _used(job: Job, plan: Plan) -> Budget:
    job = replace(job, plan=plan)
    device = device_bytes(job.tapes, job.tiles) + passing_bytes(job)
    return Budget(device, host_bytes(job.tapes, job.tiles, gpu=True), disk_bytes(job.tapes, job.tiles))
