"""The longest context that fits some GPUs, and what keeps it from being longer."""

from dataclasses import replace

from ithaca.model.spec import Spec
from ithaca.planner.cluster import Cluster
from ithaca.planner.fitting import LONGEST, SHORTEST, fitting, mesh_of
from ithaca.plans.plan import Plan
from ithaca.schedule.sweep.placement import least_choices

STEP = 2**16  # tokens by which it is told
MORE = (1.1, 2.0)  # times what there is, by which it is seen what helps


def longest(
    spec: Spec, cluster: Cluster, recipe: str | None = None, recomputing: bool = False, from_: int = STEP
) -> int:
    """The most tokens, in whole `STEP`s, that fit when all GPUs that can share a sequence; where not even one does, the
    nearest half, quarter … of it, or 0.

    Under `sweep` attention runs once, unless `recomputing` is allowed. `from_`: a length that is known to fit.
    """
    plan = Plan(recipe=recipe or "sweep")
    sizes = [*reversed(cluster.sharing())] if plan.shares else [1]
    choices = least_choices(spec.layers, recomputing)

    def fits(tokens: int) -> bool:
        meshes = (mesh_of(spec, cluster, plan, tokens, sharing) for sharing in sizes)
        mesh = next((mesh for mesh in meshes if mesh), None)
        return next(fitting(spec, cluster, tokens, plan.recipe, mesh, choices), None) is not None

    low, most = max(from_ // STEP, 1), LONGEST // STEP
    if not fits(low * STEP):
        return next((tokens for tokens in _halves(STEP) if fits(tokens)), 0)
    high, growth = low, 2 if low == 1 else 1.2
    while high < most and fits((high := min(int(high * growth) + 1, most)) * STEP):
        low = high
    while high - low > max(low // 256, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def _halves(tokens: int) -> list[int]:
    return [tokens >> halved for halved in range(1, tokens.bit_length()) if tokens >> halved >= SHORTEST]


def binding(spec: Spec, cluster: Cluster, recipe: str | None, most: int) -> str:
    """Which of GPU, host and disk keeps the context from being longer: that of which a tenth more helps most, or,
    where that is less than a step, twice as much. None of them does where no more can be planned for."""
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
