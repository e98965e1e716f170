"""What the planner should try: the Plans of a recipe for one length, from the fastest to the one that holds least."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from functools import lru_cache, partial
from itertools import count
from types import MappingProxyType
from typing import Any

from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes, runs_alone
from ithaca.parallel.head_split import split_heads, usable_rounds
from ithaca.plans.places import IN_MEMORY, KEPT
from ithaca.plans.plan import CHUNK, Plan, mlp_tile
from ithaca.plans.recipes import RECIPES, TILE
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import Memory, beside_graph, step_memory
from ithaca.schedule.sweep.placement import (
    Cost,
    Saved,
    every_choice,
    fill,
    least_choices,
    some_choices,
)
from ithaca.schedule.sweep.rebuild import fewest_kept
from ithaca.tape.spec import Budget, device_bytes, host_bytes

SHORTEST = 128  # tokens that can be planned for: a tile of attention
LEAST_CHUNK = CHUNK // 8  # tokens; a smaller chunk would save little
MOST_ROUNDS = 8  # of heads, in a block
SCRATCH = "/var/tmp"  # a folder that every Linux has on a disk (/tmp may be memory), so that a printed command runs

NO_LIMITS: Mapping[str, int] = MappingProxyType({})

Fit = tuple[Plan, Memory]


class Effort(Enum):
    """Which choices of saved tensors are tried for a Plan that can place them."""

    FEW = "few"  # evenly spread over all: enough to compare Plans
    ALL = "all"
    LEAST = "least"  # the choices with the fewest bytes
    LEAST_ONCE = "least_once"  # the same, without recomputed attention


def recipe_variants(
    recipe: str,
    spec: Spec,
    axes: Axes,
    tokens: int,
    budget: Budget,
    effort: Effort,
    kernel: str = "auto",
    least_chunks: Mapping[str, int] = NO_LIMITS,
) -> list[Plan]:
    """The Plans of a recipe to try, which name the kernel. `fitting_plans` places the tapes that they leave open.

    `least_chunks`: for each place of K and V off the device, the smallest chunk with which that place is worth while.
    """
    entry, named = RECIPES[recipe], {"recipe": recipe, "kernel": kernel}
    if entry.tries:
        tries = entry.tries
        if entry.schedule == "sweep":
            tries = [{**options, "chunk": size} for options in tries for size in _chunks(tokens, axes.context, 1)]
        tries = list(_with_tiles(tries, spec))
        return [Plan(**named, optimizer=place, **options) for place in IN_MEMORY for options in tries]
    tile, away = mlp_tile(spec), KEPT if budget.disk else IN_MEMORY
    chunks = {kv: _chunks(tokens, axes.context, 1 if kv == "device" else least_chunks.get(kv, 1)) for kv in away}
    rounds = _head_rounds(spec, axes)
    if effort in (Effort.LEAST, Effort.LEAST_ONCE):
        chunks = {kv: sizes[-1:] for kv, sizes in chunks.items()}  # the smallest takes the least memory,
        rounds = [None, *rounds[-1:]]  # and the fewest heads in a round
    else:
        rounds = [None, *rounds]
    return [
        Plan(**named, heads=heads, chunk=size, tile=min(tile, size), optimizer=optimizer, kv=kv, disk=_folder_of(kv))
        for size in dict.fromkeys(size for sizes in chunks.values() for size in sizes)
        for kv, sizes in chunks.items()
        for heads in rounds
        for optimizer in IN_MEMORY
        if size in sizes
    ]


def _head_rounds(spec: Spec, axes: Axes) -> list[int]:
    """Query heads per round, for two head rounds and for the most; none for models whose K and V are small.

    More rounds hold less of K and V, and each costs a little.
    """
    if 2 * spec.kv_heads * spec.head_size < spec.hidden:
        return []
    usable = usable_rounds(split_heads(spec.heads, spec.kv_heads, axes.ulysses), whole_groups=True)
    tried = [heads for heads in usable if spec.heads <= MOST_ROUNDS * heads and 2 * heads <= spec.heads]
    return sorted({tried[-1], tried[0]}, reverse=True) if tried else []


def _folder_of(kv: str) -> str | None:
    return SCRATCH if kv == "disk" else None


def _with_tiles(tries: Iterable[Mapping[str, Any]], spec: Spec) -> Iterator[dict[str, Any]]:
    """Set each try's MLP tile to the model's default. With checkpoint='none' tiles save nothing, so none is set.

    A last try has the smallest tile.
    """
    options: Mapping[str, Any] = {}
    tile, longest = mlp_tile(spec), TILE
    for options in tries:
        longest = min(tile, options.get("chunk", tile))
        yield dict(options) if options.get("checkpoint") == "none" else {**options, "tile": longest}
    if longest > TILE:
        yield {**options, "tile": TILE}


def fitting_plans(
    plan: Plan,
    spec: Spec,
    axes: Axes,
    tokens: int,
    budget: Budget,
    effort: Effort,
    cost: Cost | None = None,
    replaying: str | None = None,
) -> Iterator[Fit]:
    """A Plan of `recipe_variants` in every way that it fits the budget of a rank, fastest first.

    `cost`: what a Plan costs (placement.py), to compare placements by. `replaying`: the kernel of CUDA graphs.
    """
    budgeted = partial(_memory, spec=spec, axes=axes, tokens=tokens, budget=budget)
    if not plan.entry.places:
        fit = plan, budgeted(plan)
    elif (fit := _placed(plan, spec, axes, tokens, budget, _choices(effort, spec.layers), cost)) is None:
        return
    faster = [(choice, budgeted(choice)) for choice in faster_alone(fit[0], axes, replaying)[:-1]]
    for choice, memory in (*faster, fit):
        if _within(choice, memory, spec, axes, tokens, budget):
            yield choice, memory


def _within(plan: Plan, memory: Memory, spec: Spec, axes: Axes, tokens: int, budget: Budget) -> bool:
    """Whether a Plan fits, with a pass without gradients beside its CUDA graph if it has one."""
    beside = beside_graph(Job(spec=spec, plan=plan, tokens=tokens, axes=axes)) if plan.cuda_graph else 0
    return Budget(memory.total + beside, memory.host, memory.disk).within(budget)


def _memory(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget) -> Memory:
    return step_memory(Job(spec=spec, plan=plan, tokens=tokens, axes=axes, passes=budget.passes))


def faster_alone(plan: Plan, axes: Axes, replaying: str | None = None) -> list[Plan]:
    """A Plan and, before it, variants that may be faster on one rank but need more memory.

    ZeRO-2 does without FSDP2. Then passes can be CUDA graphs, with a kernel that can be replayed, which is faster if
    the step waits for the host.
    """
    if plan.zero != 3 or not runs_alone(axes, 2):
        return [plan]
    without = replace(plan, zero=2)
    return [without, *with_graph(without, axes, replaying), plan]


def with_graph(plan: Plan, axes: Axes, replaying: str | None) -> list[Plan]:
    """The same Plan with passes as CUDA graphs, if they can be. `replaying`: the kernel that they attend with."""
    possible = "cuda_graph" in plan.entry.options and plan.x in (None, "device") and runs_alone(axes, plan.zero)
    return [replace(plan, cuda_graph=True, kernel=replaying)] if possible and replaying else []


def fitting_graph(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget, replaying: str | None) -> list[Plan]:
    """The Plan of `with_graph`, if it fits the budget of a rank."""
    asked = spec, axes, tokens, budget
    return [each for each in with_graph(plan, axes, replaying) if _within(each, _memory(each, *asked), *asked)]


def refit(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget, cost: Cost) -> Fit | None:
    """A Plan that fits, placed again with all choices tried; None if it has nothing to place."""
    if not plan.entry.places:
        return None
    assert plan.kv is not None
    unplaced = replace(plan, x=None, o=None, lse=None, residual=None, disk=_folder_of(plan.kv))
    return next(fitting_plans(unplaced, spec, axes, tokens, budget, Effort.ALL, cost), None)


@lru_cache(maxsize=64)  # the search asks for the same values many times
def _choices(effort: Effort, layers: int) -> list[Saved]:
    if effort is Effort.FEW:
        return some_choices(layers)
    if effort is Effort.ALL:
        return every_choice(layers)
    return least_choices(layers, recomputing=effort is Effort.LEAST)


def _chunks(tokens: int, sharing: int, at_least: int) -> list[int]:
    """Chunks from the largest that helps, each half of the one before. A ring gathers the queries of a whole chunk, so
    many ring ranks need small chunks. If all are smaller than `at_least`, one chunk that is not."""
    largest = min(max(CHUNK, TILE * sharing), tokens)
    least = max(min(LEAST_CHUNK, largest // 8), min(SHORTEST, largest))
    chunks = [chunk for halved in range(largest.bit_length()) if (chunk := largest >> halved) >= least]
    doubled = next(chunk for times in count() if (chunk := largest << times) >= min(at_least, tokens))
    return [chunk for chunk in chunks if chunk >= at_least] or [min(doubled, tokens)]


def _placed(
    plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget, choices: list[Saved], cost: Cost | None
) -> Fit | None:
    """The Plan with x, o, log-sum-exps and residual placed in the memory that everything else leaves; or None."""
    all_hosted = replace(plan, x="host", o="host", lse="host", residual="host")
    least = _memory(all_hosted, spec, axes, tokens, budget)
    device = budget.device - least.total + device_bytes(least.tapes, least.tiles)
    host = budget.host - (least.host - host_bytes(least.tapes, least.tiles, gpu=True))
    if device <= 0 or host < 0 or _least(spec, least) > device + host + budget.disk:
        return None
    for _ in range(2):
        free = Budget(device, host, budget.disk)
        placed = fill(plan, spec, axes, tokens, free, choices, SCRATCH, cost=cost)
        if placed is None:
            return None
        memory = _memory(placed, spec, axes, tokens, budget)
        if memory.total <= budget.device:
            return placed, memory
        device -= memory.total - budget.device  # attention that is recomputed takes more beside the tapes
    return None


def _least(spec: Spec, memory: Memory) -> int:
    """Bytes below which nothing can be placed: every o and a few x, or every x alone; and the residual."""
    length, rows = memory.tiles.length, {tape.name: tape.row for tape in memory.tapes}
    few = rows["o"] * spec.layers + rows["x"] * fewest_kept(spec.layers)
    return length * (min(few, rows["x"] * spec.layers) + rows["residual"])
