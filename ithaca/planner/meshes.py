"""Which Ulysses × ring ranks can share a sequence, and which of these meshes is the best.

Every mesh is timed by the one cost model (seconds.py). Among meshes within 1 % of the fastest, the best is the one with
the least K and V on a GPU, then the one that sends the fewest bytes across nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit
from ithaca.planner.hardware import Cluster, Gpu, Machine
from ithaca.planner.seconds import Seconds, Sent, busiest, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job

SAME = 1.01  # times within this factor count as equal

Shapes = tuple[tuple[int, int], ...]  # (ulysses, ring) of several meshes; tensor in place of ulysses under `tensor`


@dataclass(frozen=True)
class Choice:
    """A mesh that works, timed for one sequence on each group of GPUs that share one."""

    axes: Axes
    tokens: int  # of one sequence
    split: HeadSplit
    sent: Sent  # by the rank whose links are busy longest
    kv_bytes: int  # K and V of a block on a GPU, with their gradients
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.axes.data * self.tokens / self.seconds.step / self.axes.size


def choose(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine, tokens: int, sharing: int | None = None) -> list[Choice]:
    """Every mesh that works if `sharing` GPUs share a sequence (None: all GPUs), the best first."""
    plan, sharing = plan.settled(), machine.ranks if sharing is None else sharing
    if not plan.shares:
        raise PlanError(f"recipe '{plan.recipe}' cannot share a sequence among GPUs: use recipe 'sweep'")
    shapes = mesh_shapes(spec, plan, machine, sharing)
    if not shapes:
        raise cannot_share(spec, plan, machine, sharing)
    found = [weigh(spec, plan, gpu, machine, tokens, ulysses, ring) for ulysses, ring in shapes]
    fastest = min(choice.seconds.step for choice in found)

    def order(choice: Choice) -> tuple[float, int, int, int, float]:
        step = choice.seconds.step
        return (0.0 if step <= SAME * fastest else step, choice.kv_bytes, choice.sent.across, choice.sent.inside, step)

    return sorted(found, key=order)


def cannot_share(spec: Spec, plan: Plan, machine: Machine, sharing: int) -> PlanError:
    """The error for a recipe that allows no mesh of this many GPUs."""
    most = max(count for count in range(1, spec.heads + 1) if machine.ranks % count == 0)
    return PlanError(
        f"recipe '{plan.recipe}' cannot share a sequence among {sharing} GPUs because the model has {spec.heads} query "
        f"heads: share it among {most} (--share {most}), or use recipe 'sweep'"
    )


def mesh_shapes(spec: Spec, plan: Plan, machine: Machine, sharing: int) -> list[tuple[int, int]]:
    """(ulysses, ring) of every mesh on which `sharing` GPUs can share a sequence."""
    if type(sharing) is not int or sharing < 1 or machine.ranks % sharing:
        divisors = [str(count) for count in range(1, machine.ranks + 1) if machine.ranks % count == 0]
        raise PlanError(f"--share {sharing} does not divide {machine.ranks} GPUs: use {', '.join(divisors[-8:])}")
    return [
        (ulysses, sharing // ulysses)
        for ulysses in range(1, min(sharing, spec.heads) + 1)
        if sharing % ulysses == 0 and plan.entry.allows(ulysses, sharing // ulysses)
        # Tensor ranks wait for each message, so they stay within a node
        if not plan.entry.tensor or machine.gpus % ulysses == 0
    ]


def ranked_meshes(spec: Spec, cluster: Cluster, recipe: str, tokens: int, sharing: int) -> Shapes:
    """(ulysses, ring) of every mesh on which this many GPUs can share a sequence, the best first."""
    if sharing == 1:
        return ((1, 1),)
    # The order hardly depends on the length, so powers of two are enough
    length = 2 ** (tokens.bit_length() - 1)
    return _ranked(spec, recipe, cluster.gpu, cluster.machine, length, sharing)


@lru_cache(maxsize=1024)  # the search asks for the same values many times
def _ranked(spec: Spec, recipe: str, gpu: Gpu, machine: Machine, tokens: int, sharing: int) -> Shapes:
    try:
        choices = choose(spec, Plan(recipe=recipe), gpu, machine, tokens, sharing)
    except PlanError:
        return ()  # the recipe cannot share a sequence among this many GPUs
    return tuple((choice.axes.by_heads, choice.axes.ring) for choice in choices)


def impossible(spec: Spec, plan: Plan, machine: Machine, sharing: int | None = None) -> Iterator[str]:
    """Why other meshes of these GPUs do not work, each in a few words."""
    sharing = machine.ranks if sharing is None else sharing
    for ulysses in (count for count in range(1, sharing + 1) if sharing % count == 0):
        ring = sharing // ulysses
        if ulysses > spec.heads:
            kind = "tensor" if plan.entry.tensor else "Ulysses"
            yield f"{ulysses} × {ring}: more {kind} ranks than the {spec.heads} query heads"
        elif not plan.entry.allows(ulysses, ring):
            kind = "Ulysses" if ulysses > 1 and not plan.entry.ulysses else "ring"
            yield f"{ulysses} × {ring}: recipe '{plan.recipe}' has no {kind} ranks"
        elif plan.entry.tensor and machine.gpus % ulysses:
            yield f"{ulysses} × {ring}: tensor ranks stay within a node, which has {machine.gpus} GPUs"


def weigh(
    spec: Spec,
    plan: Plan,
    gpu: Gpu,
    machine: Machine,
    tokens: int,
    ulysses: int,
    ring: int,
    documents: tuple[int, ...] | None = None,
) -> Choice:
    """One mesh: what its links carry and how long a step takes. `documents`: lengths of those in the sequence."""
    axes = plan.entry.axes(ulysses, ring, shard=machine.ranks // (ulysses * ring))
    job = Job(spec=spec, plan=plan, tokens=tokens, documents=documents, axes=axes)
    to_ulysses, to_ring = busiest(job, machine)
    kv = [tape for tape in job.tapes if tape.option == "kv"]
    return Choice(
        axes=axes,
        tokens=tokens,
        split=job.split,
        sent=to_ulysses + to_ring,
        kv_bytes=sum(tape.bytes_of(job.tiles.length) for tape in kv) or 4 * job.own_keys(),
        seconds=predict_seconds(job, gpu, machine),
    )
