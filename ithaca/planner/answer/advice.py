"""One sentence for a GPU that ran out of memory: what held it, the predicted peak, and the options that save most."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ithaca.base.errors import PlanError
from ithaca.base.owners import ALLOCATOR
from ithaca.base.sizes import format_bytes
from ithaca.plans.plan import CHUNK, Plan
from ithaca.plans.recipes import TILE
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

NAMED = 3  # owners in the sentence
OFFERED = 2  # options in the sentence
LEAST = 1024  # tokens: smaller chunks and tiles are not offered
SAVES_MOST = "sweep"  # the recipe that is offered in place of others


def out_of_memory(job: Job, first: str, allocated: int, reserved: int, total: int) -> str:
    """The sentence. `first`: the first line of torch's or the driver's error; `total`: bytes of the GPU."""
    parts = step_memory(job).parts
    largest = sorted((item for item in parts.items() if item[0] != ALLOCATOR), key=lambda item: -item[1])[:NAMED]
    held = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in largest)
    text = (
        f"out of memory ({first}): torch had allocated {format_bytes(allocated)} and reserved {format_bytes(reserved)} "
        f"of this GPU's {format_bytes(total)}; the predicted peak is {format_bytes(sum(parts.values()))}, most of it "
        f"{held}"
    )
    offers = sorted(_offers(job, sum(parts.values())), reverse=True)[:OFFERED]
    ways = [f"{option} takes {format_bytes(saved)} less" for saved, option in offers]
    return f"{text}: {', '.join(ways) if ways else 'use fewer tokens or more GPUs'}"


def _offers(job: Job, peak: int) -> Iterator[tuple[int, str]]:
    """Options that lower the peak, each with the bytes that it saves."""
    for changes in _changes(job.plan):
        try:
            saved = peak - step_memory(replace(job, plan=replace(job.plan, **changes))).total
        except PlanError:
            continue  # the rest of the Plan does not allow it
        if saved > 0:
            yield saved, ", ".join(f"plan.{name}={value}" for name, value in changes.items() if value is not None)


def _changes(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes of a settled Plan that may save memory, one at a time."""
    options = plan.entry.options
    places = (name for name in ("x", "o", "lse", "residual", "kv") if name in options)
    yield from ({name: "host"} for name in places if "device" in (getattr(plan, name) or ""))
    if plan.optimizer == "device":
        yield {"optimizer": "host"}
    if plan.checkpoint in ("none", "selective"):
        yield {"checkpoint": "full", "tile": TILE}
    if plan.chunks is not None:
        yield {"chunks": 2 * plan.chunks}
    for name, default in (("chunk", CHUNK), ("tile", TILE), ("loss_tile", None)):
        value = getattr(plan, name) or default
        if value and value > LEAST and (name in options or name == "loss_tile"):
            yield {name: value // 2}
    if plan.shares and plan.recipe != SAVES_MOST:
        yield {**dict.fromkeys(options), "recipe": SAVES_MOST}
