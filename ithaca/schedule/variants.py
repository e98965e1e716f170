"""What the planner should try: the Plans of a recipe for one length, from the fastest to the one that holds least."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Any

from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes, runs_alone
from ithaca.plans.plan import CHUNK, Plan, mlp_tile
from ithaca.plans.recipes import RECIPES, TILE
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import Memory, step_memory
from ithaca.schedule.sweep.placement import Saved, every_choice, fill, least_choices, some_choices
from ithaca.schedule.sweep.rebuild import fewest_kept
from ithaca.tape.spec import Budget, device_bytes, host_bytes

SHORTEST = 128  # tokens that can be planned for: a tile of attention
LEAST_CHUNK = CHUNK // 8  # tokens; a smaller chunk would save little
SCRATCH = "/var/tmp"  # a folder that every Linux has on a disk (/tmp may be memory), so that a printed command runs

Fit = tuple[Plan, Memory]


class Effort(Enum):
    """Which choices of saved tensors are tried for a Plan that can place them."""

    FEW = "few"  # evenly spread over all: enough to compare Plans
    ALL = "all"
    LEAST = "least"  # the choices with the fewest bytes
    LEAST_ONCE = "least_once"  # the same, without recomputed attention


def recipe_fits(
    recipe: str, spec: Spec, axes: Axes, tokens: int, budget: Budget, effort: Effort, kernel: str = "auto"
) -> Iterator[Fit]:
    """Every way in which a recipe fits the budget of a rank, fastest first. The Plans name the kernel."""
    entry, named = RECIPES[recipe], {"recipe": recipe, "kernel": kernel}
    if not entry.tries:  # a sweep, whose tensors are placed here
        tile, sizes = mlp_tile(spec), _chunks(tokens, axes.context)
        plans = [Plan(**named, chunk=size, tile=min(tile, size)) for size in sizes]
        # The smallest chunk takes the least memory: if it does not fit, none does
        if effort in (Effort.LEAST, Effort.LEAST_ONCE):
            plans = plans[-1:]
        elif next(fitting_plans(plans[-1], spec, axes, tokens, budget, Effort.LEAST), None) is None:
            return
    else:
        tries = entry.tries
        if entry.schedule == "sweep":
            tries = [{**options, "chunk": size} for options in tries for size in _chunks(tokens, axes.context)]
        tries = list(_with_tiles(tries, spec))
        plans = [Plan(**named, optimizer=place, **options) for place in ("device", "host") for options in tries]
    for plan in plans:
        yield from fitting_plans(plan, spec, axes, tokens, budget, effort)


def _with_tiles(tries: Iterable[Mapping[str, Any]], spec: Spec) -> Iterator[dict[str, Any]]:
    """The tries with the model's tile, unless everything is kept, which tiles would not change. Last, the least one."""
    options: Mapping[str, Any] = {}
    tile, longest = mlp_tile(spec), TILE
    for options in tries:
        longest = min(tile, options.get("chunk", tile))
        yield dict(options) if options.get("checkpoint") == "none" else {**options, "tile": longest}
    if longest > TILE:
        yield {**options, "tile": TILE}


def fitting_plans(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget, effort: Effort) -> Iterator[Fit]:
    """The Plan in every way that it fits the budget of a rank, fastest first."""
    choices = _choices(effort, spec.layers)
    variants = _sweep_places(plan) if _places_itself(plan) and plan.kv is None else [plan]
    for variant in variants:
        placed = _placed(variant, spec, axes, tokens, budget, choices) if _places_itself(plan) else variant
        for choice in _with_zero(placed, axes) if placed else ():
            memory = step_memory(Job(spec=spec, plan=choice, tokens=tokens, axes=axes, passes=budget.passes))
            if Budget(memory.total, memory.host, memory.disk).within(budget):
                yield choice, memory


def _with_zero(plan: Plan, axes: Axes) -> list[Plan]:
    """On one rank ZeRO-2 is the faster one, where all else leaves it room: it does without FSDP2."""
    return [replace(plan, zero=2), plan] if plan.zero == 3 and runs_alone(axes, 2) else [plan]


def refit(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget) -> Fit | None:
    """A Plan that fits, placed again with all choices tried; None if it has nothing to place."""
    if not _places_itself(plan):
        return None
    unplaced = replace(plan, x=None, o=None, residual=None, disk=None)
    return next(fitting_plans(unplaced, spec, axes, tokens, budget, Effort.ALL), None)


def _places_itself(plan: Plan) -> bool:
    """Whether the planner places x, o, K and V of each layer. A recipe with `tries` keeps what these say."""
    return plan.sweeps and not plan.entry.tries


@lru_cache(maxsize=64)  # the search asks for the same ones many times
def _choices(effort: Effort, layers: int) -> list[Saved]:
    if effort is Effort.FEW:
        return some_choices(layers)
    if effort is Effort.ALL:
        return every_choice(layers)
    return least_choices(layers, recomputing=effort is Effort.LEAST)


def _chunks(tokens: int, sharing: int) -> list[int]:
    """Chunks from the largest that helps, each half of the one before. A ring gathers the queries of a whole chunk, so
    that many ring ranks need small ones."""
    largest = min(max(CHUNK, TILE * sharing), tokens)
    least = max(min(LEAST_CHUNK, largest // 8), min(SHORTEST, largest))
    return [chunk for halved in range(largest.bit_length()) if (chunk := largest >> halved) >= least]


def _sweep_places(plan: Plan) -> Iterator[Plan]:
    """Where the optimizer's moments, K, V and log-sum-exps can live, from the fastest."""
    for optimizer in ("device", "host"):
        for kv, lse in (("device", "device"), ("device", "host"), ("host", "host")):
            yield replace(plan, optimizer=optimizer, kv=kv, lse=lse)


def _placed(plan: Plan, spec: Spec, axes: Axes, tokens: int, budget: Budget, choices: list[Saved]) -> Plan | None:
    """x and o of every layer in what all else leaves of device, host and disk."""
    all_hosted = replace(plan, x="host", o="host", residual="host")
    least = step_memory(Job(spec=spec, plan=all_hosted, tokens=tokens, axes=axes, passes=budget.passes))
    device = budget.device - least.total + device_bytes(least.tapes, least.tiles)
    host = budget.host - (least.host - host_bytes(least.tapes, least.tiles, gpu=True))
    if device <= 0 or host < 0 or _least(spec, least) > device + host + budget.disk:
        return None
    return fill(plan, spec, axes, tokens, Budget(device, host, budget.disk), choices, SCRATCH)


def _least(spec: Spec, memory: Memory) -> int:
    """Bytes below which nothing can be placed: every o and a few x, or every x alone; and the residual."""
    length, rows = memory.tiles.length, {tape.name: tape.row for tape in memory.tapes}
    few = rows["o"] * spec.layers + rows["x"] * fewest_kept(spec.layers)
    return length * (min(few, rows["x"] * spec.layers) + rows["residual"])
