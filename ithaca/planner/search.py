"""The fastest Plan that fits some GPUs at one length, the longest context that fits, and what limits it.

For each number of GPUs that can share a sequence, on its best mesh (meshes.py), every allowed recipe is tried in the
ways that its schedule offers (schedule/variants.py). Those that fit are compared by tokens a second (seconds.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Cluster
from ithaca.planner.meshes import best_mesh
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import Memory
from ithaca.schedule.sweep.placement import Saved, every_choice, least_choices, some_choices
from ithaca.schedule.variants import SHORTEST, fitting_plans, recipe_plans

SAME = 1.02  # rates within this factor count as equal: then the recipe that comes first in the table is taken
LONGEST = 2**32  # tokens that can be planned for
STEP = 2**16  # tokens: the longest context is found in whole steps
MORE = (1.1, 2.0)  # times what there is: how it is seen what helps


@dataclass(frozen=True)
class Answer:
    """A Plan that fits, on a mesh."""

    plan: Plan
    tokens: int
    axes: Axes
    rows: int  # sequences of a pass for those that share them, on the ranks with most
    sequences: int  # of a pass, over all GPUs
    memory: Memory
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Tokens a second and GPU."""
        return self.sequences * self.tokens / self.seconds.step / self.axes.size

    def recomputed(self, spec: Spec) -> int:
        """Layers whose attention runs twice."""
        if self.plan.sweeps:
            return self.plan.placement(spec.layers).o.count(RECOMPUTE)
        return 0 if self.plan.checkpoint in ("none", "selective") else spec.layers


def search(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str | None = None,
    mesh: tuple[int, int] | None = None,
    sequences: int | None = None,
) -> Answer | None:
    """The fastest Plan for this length; None if nothing fits.

    `mesh`: ulysses × ring that share a sequence, if that is settled. `sequences`: of a pass, over all GPUs; not given:
    one for those that share it. There must be one for each of those.
    """
    if not SHORTEST <= tokens <= LONGEST:
        raise PlanError(f"--tokens {tokens} cannot be planned for: {SHORTEST}, a tile of attention, to {LONGEST} can")
    found: list[Answer] = []
    for sharing in cluster.sharing() if mesh is None else [mesh[0] * mesh[1]]:
        shard = cluster.count // sharing
        if mesh is None and sequences is not None and shard > sequences:
            continue
        rows = -(-(sequences or 1) // shard)
        if answer := _best_of(spec, cluster, tokens, sharing, recipe, mesh, rows):
            found.append(replace(answer, sequences=sequences or shard))
        if sharing >= cluster.machine.gpus and len(found) > 1 and found[-1].rate <= found[-2].rate:
            break  # over still more nodes there is only more to exchange
    best = _preferred(found)
    return best and _refined(spec, cluster, best)


def fitting(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    mesh: tuple[int, int] | None,
    choices: list[Saved],
    rows: int = 1,
) -> Iterator[Answer]:
    """The ways in which a recipe fits on one mesh; `rows`: sequences for those that share them."""
    if mesh is None:
        return
    ulysses, ring = mesh
    axes = Axes(shard=cluster.count // (ulysses * ring), ring=ring, ulysses=ulysses)
    for plan in recipe_plans(recipe, rows * tokens, axes.context):
        for placed, memory in fitting_plans(plan, spec, axes, rows * tokens, cluster.budget, choices):
            seconds = _pass_seconds(spec, cluster, placed, tokens, rows, axes)
            answer = Answer(placed, tokens, axes, rows, rows * axes.shard, memory, seconds)
            yield answer
            if plan.sweeps and not answer.recomputed(spec):
                return  # what holds less is no faster


def _pass_seconds(spec: Spec, cluster: Cluster, plan: Plan, tokens: int, rows: int, axes: Axes) -> Seconds:
    """The time of a pass over several sequences, none of which sees another."""
    job = Job(spec=spec, plan=plan, tokens=rows * tokens, sequence=tokens, axes=axes)
    return predict_seconds(job, cluster.gpu, cluster.machine)


def _refined(spec: Spec, cluster: Cluster, answer: Answer) -> Answer:
    """The same with every choice of what is saved."""
    if not answer.plan.sweeps:
        return answer
    settled = replace(answer.plan, x=None, o=None, residual=None, disk=None)
    tokens, every = answer.rows * answer.tokens, every_choice(spec.layers)
    found = next(fitting_plans(settled, spec, answer.axes, tokens, cluster.budget, every), None)
    if found is None:
        return answer
    seconds = _pass_seconds(spec, cluster, found[0], answer.tokens, answer.rows, answer.axes)
    return replace(answer, plan=found[0], memory=found[1], seconds=seconds)


def _best_of(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    sharing: int,
    recipe: str | None,
    mesh: tuple[int, int] | None,
    rows: int,
) -> Answer | None:
    """The fastest when so many GPUs share a sequence."""
    names = [recipe] if recipe else [name for name in RECIPES if _suits(name, sharing, mesh)]
    meshes = {name: mesh or best_mesh(spec, cluster, name, tokens, sharing) for name in names}
    some = some_choices(spec.layers)
    found = (answer for name in names for answer in fitting(spec, cluster, tokens, name, meshes[name], some, rows))
    return _preferred([*found])


def _suits(recipe: str, sharing: int, mesh: tuple[int, int] | None) -> bool:
    """Whether a recipe is worth a try when so many share a sequence."""
    if sharing == 1:
        return recipe in ("sweep", "dense")
    entry = RECIPES[recipe]
    return (entry.ulysses or entry.ring) and (mesh is None or entry.allows(*mesh))


def _preferred(answers: list[Answer]) -> Answer | None:
    """The fastest; among equally fast ones, that of the recipe that comes first in the table."""
    fastest = max((answer.rate for answer in answers), default=0.0)
    good = (answer for answer in answers if answer.rate * SAME >= fastest)
    order = [*RECIPES]
    return min(good, key=lambda answer: (order.index(answer.plan.recipe), -answer.rate), default=None)


def longest(
    spec: Spec, cluster: Cluster, recipe: str | None = None, recomputing: bool = False, from_: int = STEP
) -> int:
    """The most tokens, in whole `STEP`s, that fit when all GPUs that can share a sequence.

    If not even one step fits: the nearest half, quarter … of it, or 0. Under `sweep` attention runs once, unless
    `recomputing` is allowed. `from_`: a length that is known to fit.
    """
    plan = Plan(recipe=recipe or "sweep")
    sizes = [*reversed(cluster.sharing())] if plan.shares else [1]
    choices = least_choices(spec.layers, recomputing)

    def fits(tokens: int) -> bool:
        meshes = (best_mesh(spec, cluster, plan.recipe, tokens, sharing) for sharing in sizes)
        mesh = next((mesh for mesh in meshes if mesh), None)
        return next(fitting(spec, cluster, tokens, plan.recipe, mesh, choices), None) is not None

    low, most = max(from_ // STEP, 1), LONGEST // STEP
    if not fits(low * STEP):
        halves = [STEP >> halved for halved in range(1, STEP.bit_length()) if STEP >> halved >= SHORTEST]
        return next((tokens for tokens in halves if fits(tokens)), 0)
    high, growth = low, 2 if low == 1 else 1.2
    while high < most and fits((high := min(int(high * growth) + 1, most)) * STEP):
        low = high
    while high - low > max(low // 256, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def binding(spec: Spec, cluster: Cluster, recipe: str | None, most: int) -> str:
    """Which of GPU, host and disk limits the context: the one of which a tenth more helps most.

    If a tenth helps by less than a step, twice as much is tried. 'planner': no longer context can be planned for.
    """
    if most == LONGEST:
        return "planner"
    found: dict[str, int] = {}
    for share in MORE:
        more = {
            "GPU": replace(cluster, gpu=replace(cluster.gpu, memory=cluster.gpu.memory * share)),
            "host": replace(cluster, host=cluster.host * share),
            **({"disk": replace(cluster, disk=cluster.disk * share)} if cluster.disk else {}),
        }
        found = {name: longest(spec, other, recipe, from_=max(most, STEP)) for name, other in more.items()}
        if max(found.values()) > most:
            break
    return max(found, key=lambda name: found[name])
