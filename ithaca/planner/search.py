"""The fastest Plan that fits some GPUs, at one length.

For each number of GPUs that can share a sequence, on its best mesh (meshes.py), every recipe that is allowed is given
what there is (fitting.py). What fits is compared by tokens a second (seconds.py).
"""

from dataclasses import replace

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.planner.cluster import Cluster
from ithaca.planner.fitting import LONGEST, SHORTEST, Answer, fit, fitting, mesh_of, pass_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.sweep.placement import every_choice, some_choices

SAME = 1.02  # rates within that are no difference
PREFERRED = ("sweep", "dense", "ulysses", "untied", "hybrid", "ring", "alst")


def search(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str | None = None,
    mesh: tuple[int, int] | None = None,
    sequences: int | None = None,
) -> Answer | None:
    """The fastest for this length; None where nothing fits.

    `mesh`: ulysses × ring that share a sequence, where that is settled. `sequences`: of a pass, over all GPUs; not
    given: one for those that share it. There must be one for each of those.
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


def _refined(spec: Spec, cluster: Cluster, answer: Answer) -> Answer:
    """The same with every choice of what is kept."""
    if not answer.plan.sweeps:
        return answer
    mesh = answer.ulysses, answer.ring
    settled = replace(answer.plan, x=None, o=None, residual=None, disk=None)
    every = every_choice(spec.layers)
    fitted = next(fit(spec, cluster, settled, answer.rows * answer.tokens, *mesh, answer.shard, every), None)
    if fitted is None:
        return answer
    seconds = pass_seconds(spec, cluster, fitted[0], answer.tokens, answer.rows, mesh)
    return replace(answer, plan=fitted[0], memory=fitted[1], seconds=seconds)


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
    names = [recipe] if recipe else [name for name in PREFERRED if _suits(Plan(recipe=name), sharing, mesh)]
    meshes = {name: mesh or mesh_of(spec, cluster, Plan(recipe=name), tokens, sharing) for name in names}
    some = some_choices(spec.layers)
    found = (answer for name in names for answer in fitting(spec, cluster, tokens, name, meshes[name], some, rows))
    return _preferred([*found])


def _suits(plan: Plan, sharing: int, mesh: tuple[int, int] | None) -> bool:
    """Whether a recipe is worth a try when so many share a sequence."""
    if sharing == 1:
        return plan.recipe in ("sweep", "dense")
    return plan.shares and (mesh is None or ((mesh[0] == 1 or plan.shares_heads) and (mesh[1] == 1 or plan.rings)))


def _preferred(answers: list[Answer]) -> Answer | None:
    """The fastest; of those as fast, the recipe that is preferred."""
    fastest = max((answer.rate for answer in answers), default=0.0)
    good = (answer for answer in answers if answer.rate * SAME >= fastest)
    return min(good, key=lambda answer: (PREFERRED.index(answer.plan.recipe), -answer.rate), default=None)
