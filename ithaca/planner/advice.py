"""When a GPU runs out of memory: who held it, what was predicted, which option would have helped. Arithmetic only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ithaca.base.errors import PlanError
from ithaca.base.owners import ALLOCATOR
from ithaca.base.sizes import format_bytes
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

NAMED = 3  # owners, and
OFFERED = 2  # options, that are told of


@dataclass(frozen=True)
class Rank:
    """What ran, on one of shard × ring × ulysses ranks; `tokens` of a sequence, or of all that share a pass."""

    spec: Spec
    plan: Plan
    tokens: int
    ulysses: int
    ring: int
    shard: int

    def predicted(self, plan: Plan | None = None) -> dict[str, int]:
        plan = self.plan if plan is None else plan
        axes = Axes(shard=self.shard, ring=self.ring, ulysses=self.ulysses)
        return step_memory(Job(spec=self.spec, plan=plan, tokens=self.tokens, axes=axes)).parts


def out_of_memory(rank: Rank, first: str, allocated: int, reserved: int, total: int) -> str:
    """One sentence. `first`: of the driver's or torch's own words; bytes are torch's, and the GPU's."""
    parts = rank.predicted()
    holders = sorted((item for item in parts.items() if item[0] != ALLOCATOR), key=lambda item: -item[1])[:NAMED]
    held = ", ".join(f"{owner} {format_bytes(size)}" for owner, size in holders)
    text = (
        f"out of memory ({first}): torch had allocated {format_bytes(allocated)} and reserved {format_bytes(reserved)} "
        f"of this GPU's {format_bytes(total)}; predicted were {format_bytes(sum(parts.values()))} at the peak, most of "
        f"it {held}"
    )
    offers = sorted(_offers(rank, sum(parts.values())), reverse=True)[:OFFERED]
    ways = [f"{option} takes {format_bytes(saved)} less" for saved, option in offers]
    return f"{text}: {', '.join(ways) if ways else 'fewer tokens, or more GPUs, take less'}"


def _offers(rank: Rank, now: int) -> Iterator[tuple[int, str]]:
    """Bytes that an option would save."""
    for changes in _changes(rank.plan.settled()):
        try:
            saved = now - sum(rank.predicted(replace(rank.plan.settled(), **changes)).values())
        except PlanError:
            continue  # not with the rest of this Plan
        if saved > 0:
            yield saved, ", ".join(f"plan.{name}={value}" for name, value in changes.items() if value is not None)


def _changes(plan: Plan) -> Iterator[dict[str, Any]]:
    """What could be told otherwise, one thing at a time."""
    places = ("x", "o", "lse", "residual", "kv") if plan.sweeps else ("x",)
    yield from ({name: "host"} for name in places if "device" in (getattr(plan, name) or ""))
    if plan.optimizer == "device":
        yield {"optimizer": "host"}
    if plan.checkpoint in ("none", "selective"):
        yield {"checkpoint": "full", "tile": 8192}
    for name, most in (("chunk", 2**16), ("tile", 2**13), ("loss_tile", None)):
        value = getattr(plan, name) or most
        if value and value > 1024 and (name != "chunk" or plan.sweeps):
            yield {name: value // 2}
    if not plan.sweeps and plan.shares:
        yield {"recipe": "sweep", "checkpoint": None, "heads": None, "travel": None, "x": None, "tile": None}
