"""The fastest Plan that fits some GPUs at one length, the longest context that fits, and what limits it.

For each number of GPUs that can share a sequence, `search` tries every recipe on its meshes, best first (meshes.py), in
the ways that its schedule offers (schedule/variants.py). It compares the Plans that fit by tokens per second
(seconds.py). `longest` grows the context until nothing fits, and `binding` finds out which memory limits it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.balance import least_chunks
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import Cluster
from ithaca.planner.kernels import chosen_again, kernel_of, replaying_kernel
from ithaca.planner.meshes import SAME as SAME_MESH
from ithaca.planner.meshes import Shapes, ranked_meshes
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.plan import PLACED, Plan
from ithaca.plans.recipes import RECIPES
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import Memory
from ithaca.schedule.variants import SHORTEST, Effort, faster_alone, fitting_plans, recipe_variants, refit

SAME = 1.02  # rates within this factor count as equal: then the recipe that comes first in the table is taken
HARDLY = 1.002  # rates of one recipe within this factor count as equal
DISK_COUNTS = 0.1  # a second that a disk is busy while the GPU computes: it may be slower than assumed, and it wears
LONGEST = 2**32  # the most tokens that can be planned for
STEP = 2**16  # tokens: the longest context is found in whole steps
ACCURACY = 256  # the longest context is right to one part in this many
MORE = (1.1, 2.0)  # `binding` tries this many times the memory
LEAST_MEMORY = "sweep"  # the recipe with which the longest contexts fit
LEAST_STATES = "tensor"  # the one that fits on the fewest GPUs: no rank gathers a whole block


@dataclass(frozen=True)
class Answer:
    """A Plan that fits, with its mesh, its memory and its time."""

    plan: Plan
    tokens: int  # of one sequence
    axes: Axes
    rows: int  # sequences in a pass for each group of GPUs that share them, in the largest group
    sequences: int  # sequences in a pass, over all GPUs
    memory: Memory
    seconds: Seconds
    kernel: str  # the attention kernel that the Plan names, or that `auto` is on this GPU, here
    passes: int = 1  # of a step, one after the other; `seconds` are those of all

    @property
    def batch(self) -> int:
        """Sequences in a step, over all GPUs."""
        return self.passes * self.sequences

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.batch * self.tokens / self.seconds.step / self.axes.size

    @property
    def worth(self) -> float:
        """The rate that answers are compared by."""
        return self.rate * self.seconds.step / _cost(self.seconds)

    def recomputed(self, spec: Spec) -> int:
        """Layers whose attention runs again in backward."""
        job = self.job(spec)
        return round((job.costs.work(job).attention_runs - 1) * spec.layers)

    def job(self, spec: Spec, documents: Documents | None = None) -> Job:
        """One pass of a rank, with the kernel that is assumed."""
        plan = replace(self.plan, kernel=self.kernel)
        return pass_job(spec, plan, self.tokens, self.rows, self.axes, documents)


def search(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str | None = None,
    mesh: tuple[int, int] | None = None,
    sequences: int | None = None,
    documents: Documents | None = None,
) -> Answer | None:
    """The fastest Plan for this length; None if nothing fits.

    `mesh`: (ulysses, ring), or (tensor, ring) with that recipe, if that is decided already. `sequences`: the sequences
    in a pass over all GPUs, at least one for each group of GPUs that share one; if it is not given, exactly one for
    each group. `documents`: what each sequence is packed with; if they are not given, it is one document.
    """
    if not SHORTEST <= tokens <= LONGEST:
        raise PlanError(f"--tokens {tokens} is out of range: give {SHORTEST} (a tile of attention) to {LONGEST}")
    found: list[Answer] = []
    for sharing in cluster.sharing() if mesh is None else [mesh[0] * mesh[1]]:
        shard = cluster.count // sharing
        if mesh is None and sequences is not None and shard > sequences:
            continue
        rows = -(-(sequences or 1) // shard)
        if answer := best_of(spec, cluster, tokens, sharing, recipe, mesh, rows, documents):
            found.append(replace(answer, sequences=sequences or shard))
        slower = len(found) > 1 and found[-1].rate <= found[-2].rate and not found[-1].recomputed(spec)
        if slower and sharing >= cluster.machine.gpus:
            break  # sharing over more nodes only adds messages
    best = _preferred(found)
    return best and _refined(spec, cluster, best, documents)


def fitting(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    mesh: tuple[int, int],
    effort: Effort,
    rows: int = 1,
    documents: Documents | None = None,
) -> Iterator[Answer]:
    """The ways in which a recipe fits on one mesh; `rows`: sequences for each group of GPUs that share them.

    Ways that cannot be faster than one before them by more than `HARDLY` are left out.
    """
    axes = _axes(cluster, recipe, mesh)
    copied = replace(axes, replicate=cluster.copies)
    timed = _Timed(spec, cluster, tokens, rows, axes, documents)
    best, once, replaying = float("inf"), False, replaying_kernel(spec, cluster)
    if effort is Effort.FEW and not fits(spec, cluster, rows * tokens, recipe, mesh, Effort.LEAST):
        return  # sooner than by trying every variant: most questions about too few GPUs end here
    for variant in _variants(spec, cluster, rows * tokens, recipe, copied, effort):
        if best < float("inf") and timed.bound(variant) * HARDLY >= best:
            continue
        graphs_left = any(plan.cuda_graph for plan in faster_alone(variant, copied, replaying))
        found = fitting_plans(variant, spec, copied, rows * tokens, cluster.budget, effort, timed.cost, replaying)
        for plan, memory in found:
            seconds = timed(plan)
            best = min(best, _cost(seconds))
            named = plan if plan.cuda_graph else chosen_again(plan, cluster)  # not every kernel replays
            answer = Answer(named, tokens, axes, rows, rows * axes.shard, memory, seconds, plan.kernel)
            once = not answer.recomputed(spec)
            graphs_left = graphs_left and not plan.cuda_graph
            yield answer
        if variant.entry.tries and once and not graphs_left:
            return  # the tries that follow use less memory. Only a CUDA graph that still had no room could be faster


def fits(spec: Spec, cluster: Cluster, tokens: int, recipe: str, mesh: tuple[int, int], effort: Effort) -> bool:
    """Whether any Plan of a recipe fits on one mesh, without asking how fast."""
    copied = replace(_axes(cluster, recipe, mesh), replicate=cluster.copies)
    variants = _variants(spec, cluster, tokens, recipe, copied, effort)
    return any(next(fitting_plans(plan, spec, copied, tokens, cluster.budget, effort), None) for plan in variants)


def _axes(cluster: Cluster, recipe: str, mesh: tuple[int, int]) -> Axes:
    return RECIPES[recipe].axes(*mesh, shard=cluster.count // (mesh[0] * mesh[1]))


def _variants(spec: Spec, cluster: Cluster, tokens: int, recipe: str, axes: Axes, effort: Effort) -> list[Plan]:
    kernel = kernel_of(spec, cluster)
    limits = least_chunks(spec, axes, cluster.gpu, cluster.machine, kernel)
    return recipe_variants(recipe, spec, axes, tokens, cluster.budget, effort, kernel, limits)


def _cost(seconds: Seconds) -> float:
    return seconds.step + DISK_COUNTS * seconds.disk


class _Timed:
    """The seconds of Plans for one question."""

    def __init__(
        self, spec: Spec, cluster: Cluster, tokens: int, rows: int, axes: Axes, documents: Documents | None
    ) -> None:
        self._asked = spec, cluster, tokens, rows, axes, documents
        self._found: dict[Plan, Seconds] = {}

    def __call__(self, plan: Plan) -> Seconds:
        if plan not in self._found:
            spec, cluster, tokens, rows, axes, documents = self._asked
            self._found[plan] = pass_seconds(spec, cluster, plan, tokens, rows, axes, documents)
        return self._found[plan]

    def cost(self, plan: Plan) -> tuple[float, float]:
        """The cost that Plans are compared by, in seconds of a step; and the seconds if copies took no time."""
        seconds = self(plan)
        return _cost(seconds), seconds.step - seconds.waits

    def bound(self, plan: Plan) -> float:
        """A lower bound of a variant's seconds under any placement of tensors: nothing is recomputed or copied."""
        if plan.entry.tries:
            return 0.0
        here: dict[str, Any] = dict.fromkeys((*PLACED, "optimizer"), "device")
        return self(faster_alone(replace(plan, **here, disk=None), self._asked[4])[0]).step


def pass_seconds(
    spec: Spec, cluster: Cluster, plan: Plan, tokens: int, rows: int, axes: Axes, documents: Documents | None
) -> Seconds:
    """The time of a pass over several sequences, which do not attend to each other."""
    return predict_seconds(pass_job(spec, plan, tokens, rows, axes, documents), cluster.gpu, cluster.machine)


def pass_job(spec: Spec, plan: Plan, tokens: int, rows: int, axes: Axes, documents: Documents | None) -> Job:
    """A pass over several sequences."""
    lengths = documents.lengths(tokens) if documents else (tokens,)
    return Job(spec=spec, plan=plan, tokens=rows * tokens, documents=rows * lengths, axes=axes)


def _refined(spec: Spec, cluster: Cluster, answer: Answer, documents: Documents | None) -> Answer:
    """The same answer with every choice of saved tensors tried."""
    named = replace(answer.plan, kernel=answer.kernel)
    axes = replace(answer.axes, replicate=cluster.copies)
    timed = _Timed(spec, cluster, answer.tokens, answer.rows, answer.axes, documents)
    found = refit(named, spec, axes, answer.rows * answer.tokens, cluster.budget, timed.cost)
    if found is None:
        return answer
    plan, memory = found
    return replace(answer, plan=chosen_again(plan, cluster), memory=memory, seconds=timed(plan))


def best_of(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    sharing: int,
    recipe: str | None,
    mesh: tuple[int, int] | None = None,
    rows: int = 1,
    documents: Documents | None = None,
) -> Answer | None:
    """The fastest answer if this many GPUs share a sequence."""
    found = []
    for name in [recipe] if recipe else [name for name in RECIPES if _suits(name, sharing, mesh)]:
        meshes = (mesh,) if mesh else ranked_meshes(spec, cluster, name, tokens, sharing)
        if answer := _best_on(spec, cluster, tokens, name, meshes, rows, documents):
            found.append(answer)
    return _preferred(found)


def _best_on(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    meshes: Shapes,
    rows: int,
    documents: Documents | None,
) -> Answer | None:
    """The fastest answer of a recipe on the first of these meshes that fits, or on the first that attends only once."""
    found: Answer | None = None
    for mesh in meshes:
        once = fitting(spec, cluster, tokens, recipe, mesh, Effort.LEAST_ONCE, rows)
        if found and not _runs_once(spec, next(once, None)):
            continue
        answers = fitting(spec, cluster, tokens, recipe, mesh, Effort.FEW, rows, documents)
        best = _fastest(answers)
        if best and (found is None or best.worth > SAME_MESH * found.worth):
            found = best
        if _runs_once(spec, found):
            break
    return found


def _fastest(answers: Iterable[Answer]) -> Answer | None:
    """The first answer hardly slower than the fastest: earlier answers have larger chunks, and more on the device."""
    found = [*answers]
    least = min((_cost(answer.seconds) for answer in found), default=0.0)
    return next((answer for answer in found if _cost(answer.seconds) <= HARDLY * least), None)


def _runs_once(spec: Spec, answer: Answer | None) -> bool:
    """Whether there is an answer that does not recompute attention."""
    return answer is not None and not answer.recomputed(spec)


def _suits(recipe: str, sharing: int, mesh: tuple[int, int] | None) -> bool:
    """Whether a recipe is worth trying if this many GPUs share a sequence."""
    if sharing == 1:
        return recipe in ("sweep", "dense")  # on one GPU the others run as `dense` does
    entry = RECIPES[recipe]
    if mesh is not None:
        return not entry.tensor and entry.allows(*mesh)
    return entry.ulysses or entry.ring or entry.tensor


def _preferred(answers: list[Answer]) -> Answer | None:
    """The fastest answer; among equally fast ones, that of the recipe that comes first in the table.

    Of one recipe, where it hardly matters, the answer with the fewest sequences at a time.
    """
    fastest = max((answer.worth for answer in answers), default=0.0)
    good = [answer for answer in answers if answer.worth * SAME >= fastest]
    first = next((name for name in RECIPES if any(answer.plan.recipe == name for answer in good)), None)
    good = [answer for answer in good if answer.plan.recipe == first]
    fastest = max((answer.worth for answer in good), default=0.0)
    equal = [answer for answer in good if answer.worth * HARDLY >= fastest]
    return min(equal, key=lambda answer: (answer.sequences, -answer.worth), default=None)


def longest(
    spec: Spec, cluster: Cluster, recipe: str | None = None, recomputing: bool = False, from_: int = STEP
) -> int:
    """The most tokens, in whole `STEP`s, that fit if as many GPUs as possible share a sequence.

    If one step does not fit, the largest half, quarter … of it that does; 0 if none. Recipes that can save attention
    outputs save all of them, unless `recomputing` allows attention to run again. `from_`: a length that fits.
    """
    if recipe is None:
        names = (LEAST_MEMORY, LEAST_STATES)
        return next((most for name in names if (most := longest(spec, cluster, name, recomputing, from_))), 0)
    effort = Effort.LEAST if recomputing else Effort.LEAST_ONCE
    most = 0
    for mesh in widest_meshes(spec, cluster, recipe, from_):

        def fits_here(tokens: int) -> bool:
            return fits(spec, cluster, tokens, recipe, mesh, effort)  # noqa: B023

        # A mesh is looked at only if it takes a longer context than the meshes before it
        longer = min(most + max(most // ACCURACY, min(most, STEP)), LONGEST) if most else from_
        if longer > most and (longer == STEP or fits_here(longer)):
            most = max(most, _longest(fits_here, from_))
    return most


def widest_meshes(spec: Spec, cluster: Cluster, recipe: str, tokens: int) -> Shapes:
    """The meshes on which as many GPUs as possible share a sequence, the best first."""
    sizes = [*reversed(cluster.sharing())] if Plan(recipe=recipe).shares else [1]
    every = (ranked_meshes(spec, cluster, recipe, tokens, sharing) for sharing in sizes)
    return next((meshes for meshes in every if meshes), ())


def _longest(fits: Callable[[int], bool], from_: int) -> int:
    """The longest context on one mesh."""
    low, most = max(from_ // STEP, 1), LONGEST // STEP
    if not fits(low * STEP):
        halves = [STEP >> halved for halved in range(1, STEP.bit_length()) if STEP >> halved >= SHORTEST]
        return next((tokens for tokens in halves if fits(tokens)), 0)
    high, growth = low, 2 if low == 1 else 1.2
    while high < most and fits((high := min(int(high * growth) + 1, most)) * STEP):
        low = high
    while high - low > max(low // ACCURACY, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def binding(spec: Spec, cluster: Cluster, recipe: str | None, most: int) -> str:
    """What limits the context to `most` tokens: 'GPU', 'host' or 'disk', whichever helps most if there is more of it.

    First 10 % more is tried. If that helps by less than a `STEP`, twice as much is. 'planner': `most` is the longest
    context that can be planned for.
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
