"""Which Ulysses × ring ranks can share a sequence, and which of them are expected to be fastest.

Every mesh is timed by the one cost model (seconds.py). Among meshes within 1 % of the fastest, the one with the least K
and V on a GPU is best, then the one that sends least across nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit
from ithaca.planner.hardware import Cluster, Gpu, Machine
from ithaca.planner.links import Sent, busiest
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job

SAME = 1.01  # times within this factor count as equal


@dataclass(frozen=True)
class Choice:
    """A mesh that works, for one step over one sequence of each group of ranks."""

    axes: Axes
    split: HeadSplit
    sent: Sent
    kv_bytes: int  # of a block's K and V on a GPU, with their gradients
    seconds: Seconds


def choose(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine, tokens: int, sharing: int | None = None) -> list[Choice]:
    """Every mesh that works when `sharing` GPUs share a sequence (None: all of them), the best first."""
    plan, sharing = plan.settled(), machine.ranks if sharing is None else sharing
    _check(plan, machine, sharing)
    shapes = [
        (ulysses, sharing // ulysses)
        for ulysses in range(1, min(sharing, spec.heads) + 1)
        if sharing % ulysses == 0 and plan.entry.allows(ulysses, sharing // ulysses)
    ]
    if not shapes:
        most = max(count for count in range(1, spec.heads + 1) if machine.ranks % count == 0)
        raise PlanError(
            f"recipe '{plan.recipe}' cannot share a sequence among {sharing} GPUs, as the model has {spec.heads} query "
            f"heads: {most} can share one (share={most}), or use recipe 'sweep'"
        )
    found = [_weigh(spec, plan, gpu, machine, tokens, ulysses, ring) for ulysses, ring in shapes]
    fastest = min(choice.seconds.step for choice in found)

    def rank(choice: Choice) -> tuple[float, int, int, float]:
        step = choice.seconds.step
        return (0.0 if step <= SAME * fastest else step, choice.kv_bytes, choice.sent.across, step)

    return sorted(found, key=rank)


def best_mesh(spec: Spec, cluster: Cluster, recipe: str, tokens: int, sharing: int) -> tuple[int, int] | None:
    """The best ulysses × ring of so many GPUs; None if the recipe cannot share among them."""
    if sharing == 1 or not Plan(recipe=recipe).shares:
        return (1, 1) if sharing == 1 else None
    # Nearly the same for all lengths, so powers of two are enough
    length = 2 ** (tokens.bit_length() - 1)
    return _best_mesh(spec, recipe, cluster.gpu, cluster.machine, length, sharing)


@lru_cache(maxsize=1024)  # the search asks for the same ones many times
def _best_mesh(
    spec: Spec, recipe: str, gpu: Gpu, machine: Machine, tokens: int, sharing: int
) -> tuple[int, int] | None:
    try:
        axes = choose(spec, Plan(recipe=recipe), gpu, machine, tokens, sharing)[0].axes
    except PlanError:
        return None
    return axes.ulysses, axes.ring


def impossible(spec: Spec, plan: Plan, machine: Machine, sharing: int | None = None) -> Iterator[str]:
    """Why other divisions of the GPUs do not work, each in a few words."""
    sharing = machine.ranks if sharing is None else sharing
    for ulysses in (count for count in range(1, sharing + 1) if sharing % count == 0):
        ring = sharing // ulysses
        if ulysses > spec.heads:
            yield f"{ulysses} × {ring}: more Ulysses ranks than the {spec.heads} query heads"
        elif not plan.entry.allows(ulysses, ring):
            kind = "ring" if plan.entry.ulysses else "Ulysses"
            yield f"{ulysses} × {ring}: recipe '{plan.recipe}' has no {kind} ranks"


def _check(plan: Plan, machine: Machine, sharing: int) -> None:
    if not plan.shares:
        raise PlanError(f"recipe '{plan.recipe}' shares no sequence among GPUs: 'sweep' does")
    if type(sharing) is not int or sharing < 1 or machine.ranks % sharing:
        fitting = [str(count) for count in range(1, machine.ranks + 1) if machine.ranks % count == 0]
        raise PlanError(f"share={sharing} does not divide {machine.ranks} GPUs: {', '.join(fitting[-8:])} do")


def _weigh(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine, tokens: int, ulysses: int, ring: int) -> Choice:
    axes = Axes(shard=machine.ranks // (ulysses * ring), ring=ring, ulysses=ulysses)
    job = Job(spec=spec, plan=plan, tokens=tokens, axes=axes)
    to_ulysses, to_ring = busiest(job, machine)
    kv = [tape for tape in job.tapes if tape.option == "kv"]
    return Choice(
        axes=axes,
        split=job.split,
        sent=to_ulysses + to_ring,
        kv_bytes=sum(tape.bytes_of(job.tiles.length) for tape in kv) or 4 * job.own_keys(),
        seconds=predict_seconds(job, gpu, machine),
    )
