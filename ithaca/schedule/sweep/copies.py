"""The bytes that a sweep copies between the device, host memory and the disk in a step, tape by tape. No torch.

A tape that is not on the device, in one head round over several chunks:

| | forward | backward |
|---|---|---|
| x | written and read once | read by its chunk, and for K and V of later chunks |
| o, log-sum-exp | written once | read once |
| residual | the last block's output and its gradient | read and written by every block |
| K, V | written once; each chunk reads those of all chunks before it | the same, and the sums of their gradients |

A single chunk copies less: a tile that is read at once stays in its slot. Every further head round reads x again. An x
that is rebuilt reads x and o of the layers below (rebuild.py).
"""

from typing import TYPE_CHECKING

from ithaca.plans.places import KEPT, RECOMPUTE
from ithaca.schedule.costs import Copies, StepCopies, local_tokens
from ithaca.schedule.sweep.chunks import chunks_asked_early, head_passes, visits_of
from ithaca.schedule.sweep.rebuild import EMBEDDING, rebuilds_of

if TYPE_CHECKING:
    from ithaca.schedule.job import Job


def copies(job: "Job", places: tuple[str, ...]) -> StepCopies:
    """Bytes that tapes in these places take to the device and from it in a step. The loss counts as forward."""
    plan, spec, placement = job.plan, job.spec, job.plan.placement(job.spec.layers)
    local, rounds, reads = local_tokens(job), len(job.rounds), _backward_reads(job)
    x, o = job.hidden(local), job.queries(local)
    lse = local * job.axes.ulysses * len(job.heads.q) * job.high
    again = float(job.chunks > 1)  # a single tile that is read at once stays in its slot
    forward, backward = Copies(), _rebuild_copies(job, places, reads)
    for layer in range(spec.layers):
        if placement.x[layer] in places:
            forward += Copies(into=(again + rounds - 1) * x, out=x)  # written by the layer below
            backward += Copies(into=reads[layer] * x)
        elif placement.x[layer] not in KEPT and plan.residual in places:
            forward += Copies(into=(again + rounds - 1) * x, out=x)  # it passes through the residual tape
        if placement.o[layer] in places:
            forward, backward = forward + Copies(out=o), backward + Copies(into=rounds * o)
        if placement.o[layer] != RECOMPUTE and plan.lse in places:
            # Forward, each round but the first adds to those before
            forward += Copies(into=(rounds - 1) * lse, out=rounds * lse)
            backward += Copies(into=rounds * lse)
    if plan.residual in places:
        blocks = rounds * spec.layers  # every round of every block
        forward += Copies(into=again * x, out=2 * x)  # the last block's output, and its gradient by the loss
        backward += Copies(into=again * (blocks + 1) * x, out=blocks * x)  # and the embedding
        if rounds > 1:
            # o from each round to the next; its gradient from the first round to each of the others
            waiting = spec.layers * o
            forward += Copies(into=again * (rounds - 1) * waiting, out=(rounds - 1) * waiting)
            backward += Copies(into=(again + rounds - 2) * waiting, out=waiting)
    total = StepCopies(forward, backward)
    return total + kv_copies(job) if plan.kv in places else total


def _backward_reads(job: "Job") -> list[float]:
    """How often backward reads each layer's x: in each head round by its chunk, and for K and V of later chunks.

    The last layer still has K and V of its last round.
    """
    rounds, early = len(job.rounds), chunks_asked_early(job) / job.chunks
    return [rounds + rounds * early] * (job.spec.layers - 1) + [rounds + (rounds - 1) * early]


def kv_copies(job: "Job") -> StepCopies:
    """K and V, and the sums of their gradients, of all layers: each chunk visits those of all chunks before it."""
    layers, visits = job.spec.layers, visits_of(job).count / job.chunks  # visits to other tiles, by each tile
    heads = len(head_passes(job)[0].kv[job.head_rank])  # tapes are as wide as the largest round
    kv = 2 * local_tokens(job) * job.axes.ulysses * heads * job.spec.head_size * job.itemsize
    sums = kv * job.high // job.itemsize
    passes = layers * len(job.rounds)
    forward = Copies(into=passes * visits * kv, out=passes * kv)
    # Backward computes them again, but for the last round of the last layer, which reads its own tiles instead
    backward = Copies(into=(passes * visits + 1) * kv, out=(passes - 1) * kv)
    recomputed = job.plan.placement(layers).o.count(RECOMPUTE)
    backward += Copies(into=(visits + 1) * kv * recomputed)  # a chunk attends twice, and reads its own tile again
    # A chunk's own are taken as soon as they are complete. A rank without heads in a round adds nothing
    adding = layers * sum(1 for split in head_passes(job) if split.kv[job.head_rank])
    gradients = adding * visits * sums
    return StepCopies(forward, backward + Copies(into=gradients, out=gradients))


def _rebuild_copies(job: "Job", places: tuple[str, ...], reads: list[float]) -> Copies:
    """What rebuilding x reads and writes: x and o of the layers below, and the tapes that take the result.

    `reads`: how often backward reads each x.
    """
    placement, local = job.plan.placement(job.spec.layers), local_tokens(job)
    x, o = job.hidden(local), job.queries(local)
    at = dict(enumerate(placement.x))  # where each x is by now
    total = Copies()
    for layer, rebuild in rebuilds_of(job.plan, job.spec).items():
        targets = {above: getattr(placement, kind)[index] for above, (kind, index) in rebuild.targets.items()}
        passing = layer not in rebuild.targets
        times = reads[layer] if passing else 1
        for below in range(rebuild.source, layer):
            if below != EMBEDDING:
                total += Copies(into=times * o * (placement.o[below] in places))
            if below != EMBEDDING and (below == rebuild.source or not passing):
                total += Copies(into=times * x * (at[below] in places))
            at[below + 1] = targets.get(below + 1, "" if passing else targets[layer])
            total += Copies(out=x * (at[below + 1] in places))
        for above, place in targets.items():  # read by their own backward passes
            total += Copies(into=reads[above] * x * (place in places))
    return total
