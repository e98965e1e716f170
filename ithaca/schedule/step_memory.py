"""The peak memory of a step on one rank, by owner, and the parts of it that belong to no schedule. No torch.

States and tapes lie on the device all the time. Beside them a step has a few phases that can be the peak: backward of
the last block, while the head's gradient is still being reduced; backward of the first block, when all other gradients
are there; the loss; and the gradient of the embedding. Within a block the schedule says which of MLP and attention
takes what (`peaks` of its `cost.py`). Here stand the costs of what all schedules share:

    sharding    a gathered block and the next one on its way; gradients in fp32, once as sums, once being reduced. One
                rank alone (parallel/one_rank.py) has all weights in the computation's dtype and reduces nothing. From
                the second pass of a step on, the gradients of all layers are there from its beginning
    loss        a tile of logits, and the head's gradient in fp32
    embedding   the table's gradient in fp32
    optimizer   fp32 weights and two moments of this rank's shards, or the slots through which host moments pass
    allocator   memory that one stream has freed and keeps from others, most of it after the head was gathered and
                reduced: a multiple of the head's size, measured on an H200 (bench/results/rehearsals-tuned.json)
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ithaca.base.owners import (
    ALLOCATOR,
    BATCH,
    BLOCKS,
    GATHERED,
    GRADIENTS,
    KERNELS,
    KEYS,
    LOSS,
    OTHER,
    STATES,
    TAPES,
)
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Spec
from ithaca.parallel.axes import runs_alone
from ithaca.parallel.layout import row_range
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.schedule.job import FP32, Bytes, Job
from ithaca.tape.spec import TapeSpec, device_bytes, disk_bytes, host_bytes

LIBRARIES = 64 * 2**20  # bytes that cuBLAS takes
LIBRARIES_GRAPH = 128 * 2**20  # as well for the stream of captures (bench/results/recipes-graphs.json)
PER_TOKEN = 24  # bytes of token ids, labels, positions
LEFT_OVER = 2.4  # times the head in the computation's dtype; more if one block alone runs
LEFT_OVER_ONE_BLOCK = 3.7
LEFT_OVER_READING = 1.0  # without a backward pass: the head as it was gathered
# Without FSDP2 nothing passes between streams: holes among tensors that differ in size (bench/results/recipes-*.json)
LEFT_OVER_ONE_RANK = 0.5
LEFT_OVER_STATES = 2  # hidden states of all local tokens, where blocks run over all of them
MOMENTS = 2  # of AdamW for each parameter
MOMENT_TILE = 8 * 2**20  # elements of host moments that pass through the device together
MOMENT_SLOTS = 4  # such tiles: one in use, one ahead, two on their way out


@dataclass(frozen=True)
class Memory:
    """The memory that one rank takes."""

    parts: dict[str, int]  # bytes of its GPU at the peak, by owner
    phase: str  # of the step that is the peak
    host: int  # bytes of its node's memory
    disk: int
    tapes: list[TapeSpec]
    tiles: Tiles

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def step_memory(job: Job) -> Memory:
    """The peak of a step on the rank of a job."""
    always = resident(job)
    peaks = {name: always + phase for name, phase in phases(job)}
    name = max(peaks, key=lambda name: peaks[name].total())
    parts = {owner: round(size) for owner, size in peaks[name].items() if size}
    parts |= left_over(job)
    host = host_bytes(job.tapes, job.tiles, gpu=True) + host_states(job)
    return Memory(parts, name, host, disk_bytes(job.tapes, job.tiles), job.tapes, job.tiles)


def resident(job: Job) -> Bytes:
    """Bytes on the device all the time: states, tapes, the batch, and what layers that do not run would hold."""
    block = block_parameters(job)
    kv, others = ([tape for tape in job.tapes if (tape.option == "kv") == wanted] for wanted in (True, False))
    states, slots = rank_states(job, moments=True)
    passing = 0 if _alone(job) else job.costs.passing_bytes(job)
    return Counter(
        {
            STATES: states,
            KEYS: device_bytes(kv, job.tiles),
            TAPES: device_bytes(others, job.tiles) + slots,
            BLOCKS: _absent_kept(job, job.layers_running),
            GRADIENTS: job.high * ((job.spec.layers - job.layers_running) * block.mine + _accumulated_gradients(job)),
            GATHERED: passing + kept_weights(job),
            BATCH: PER_TOKEN * job.tiles.length,
            KERNELS: LIBRARIES + (LIBRARIES_GRAPH if job.plan.cuda_graph else 0),
        }
    )


def rank_states(job: Job, moments: bool) -> tuple[int, int]:
    """Device bytes of this rank's weights and moments, and of the slots that host moments pass through."""
    block, table = block_parameters(job), table_parameters(job)
    mine = job.spec.layers * block.mine + table.mine
    hosted = moments and job.plan.optimizer == "host"
    slots = moment_slot_bytes(max(block.largest, table.largest)) if hosted else 0
    return job.high * mine * (1 + moments * _moments_here(job)), slots


def kept_weights(job: Job) -> int:
    """Bytes of all weights that stay gathered during a step."""
    return _kept_weights(job, job.spec.layers * block_parameters(job).all + table_parameters(job).all)


def _accumulated_gradients(job: Job) -> int:
    """Gradient elements of running layers and the table that earlier micro-batches of the step have left.

    A CUDA graph has memory of its own for the gradients of one pass.
    """
    mine = job.layers_running * block_parameters(job).mine + table_parameters(job).mine
    return mine * (2 if job.plan.cuda_graph else 1) if job.passes > 1 else 0


def beside_graph(job: Job) -> int:
    """Bytes of a pass without gradients, as a validation's, while a CUDA graph keeps those of training passes."""
    reading = max(peak.total() for peak in job.costs.reading(job).values())
    return kept_weights(job) + reading + job.loss_rows * job.spec.vocab * job.itemsize


def _alone(job: Job) -> bool:
    return runs_alone(job.axes, job.plan.zero)


def _kept_weights(job: Job, weights: int) -> int:
    """Bytes of weights that stay gathered during a step. One rank alone copies no weight that has the right dtype."""
    if job.plan.zero == 3 or (_alone(job) and job.itemsize == job.high):
        return 0
    return job.itemsize * weights


def absent_layers(job: Job, running: Job) -> Bytes:
    """Bytes that a job holds for layers that `running`, the same job with fewer layers, does not have."""
    absent, block = job.spec.layers - running.spec.layers, block_parameters(job)
    return Counter(
        {
            STATES: job.high * absent * block.mine * (1 + _moments_here(job)),
            GRADIENTS: job.high * absent * block.mine,
            TAPES: device_bytes(job.tapes, job.tiles) - device_bytes(running.tapes, running.tiles),
            BLOCKS: _absent_kept(job, running.spec.layers),
            GATHERED: _kept_weights(job, absent * block.all),
        }
    )


def _absent_kept(job: Job, running: int) -> int:
    """Bytes that the layers after the first `running` keep for their backward pass, beside their gradients.

    A layer frees what it kept before its gradients are there. With everything kept that is most of a rank's memory, so
    the larger of the two is held; under other checkpoints both are, which is a little too much.
    """
    absent = range(running, job.spec.layers)
    kept = job.costs.kept(job, absent)
    if job.plan.checkpoint != "none":
        return kept
    return max(kept - job.high * len(absent) * block_parameters(job).mine, 0)


def phases(job: Job) -> Iterator[tuple[str, Bytes]]:
    """The phases of a step that can be its peak, with what each holds beside `resident`."""
    spec, high, tied = job.rank_spec, job.high, job.spec.tied
    head, block, kept = table_parameters(job), block_parameters(job), job.costs.kept
    reduces, table = not _alone(job), high * spec.vocab * spec.hidden
    # Under ZeRO-1 they wait for the last pass of a step to be reduced; a single pass reduces them as it makes them
    waits = job.plan.zero == 1 and reduces and job.passes > 1
    whole_gradients = high * job.layers_running * block.all if waits else 0
    # A tied head's gradient waits with the loss for the embedding's; so does the final norm's for FSDP2 to reduce it
    waiting = (high * head.all if reduces else table) if tied else 0
    own = block.mine + (0 if reduces else _summed_apart(job))
    new = job.passes == 1  # otherwise this rank's gradients are there already, and others are added to them
    of_head = 0 if not new or (tied and reduces) else high * head.unit_mine - waiting
    # While the last block goes backward the head's gradient may be being reduced; while the first does, a block's
    reducing = reduces and not tied and not job.costs.settles(job)
    after_head = Counter(
        {
            GRADIENTS: of_head + reducing * high * head.unit,
            LOSS: waiting,
            BLOCKS: kept(job, range(job.layers_running)),
        }
    )
    after_blocks = Counter(
        {
            GRADIENTS: of_head + high * (reduces * block.all + new * (job.layers_running - 1) * own),
            LOSS: waiting,
            BLOCKS: kept(job, range(1)),
        }
    )
    for name, peak in job.costs.peaks(job).items():
        inside = peak + _open_block(job) + Counter({GRADIENTS: whole_gradients})
        yield f"{name} of the last block", inside + after_head
        if job.layers_running > 1:
            yield f"{name} of the first block", inside + after_blocks
    yield from _loss_phases(job)
    # The gradient of the embedding. In a tied model its sum with the head's, while the first block's is being reduced
    shards = new * high * job.layers_running * own + of_head
    at_end = {GRADIENTS: shards + reduces * (high * block.all if tied else table), BLOCKS: table}
    if tied:
        at_end |= {LOSS: table, GATHERED: reduces * job.itemsize * head.unit}
    if reduces and tied:
        at_end |= {OTHER: table}
    elif not reduces and not job.plan.sweeps:
        at_end |= {OTHER: job.itemsize * spec.vocab * spec.hidden}  # as autograd has it before it is cast
    yield "the embedding's gradient", Counter(at_end)


def _summed_apart(job: Job) -> int:
    """Gradients of a block's weights that several tensor ranks hold. Without FSDP2 their sums come on top."""
    if job.axes.tensor == 1:
        return 0
    part = TensorPart(job.spec, job.head_rank, job.axes.tensor)
    shapes = part.narrow.block_shapes()
    return sum(math.prod(shape) for name, shape in shapes.items() if part.sharers(name))


def _loss_phases(job: Job) -> Iterator[tuple[str, Bytes]]:
    head, tile, ranks = table_parameters(job), job.loss_rows, job.axes.tensor
    logits = ranks * tile * job.rank_spec.vocab * job.itemsize
    if ranks > 1:  # in at least fp32 as well; and the tile of all ranks, with its gradient
        logits += logits * job.high // job.itemsize + 2 * ranks * job.hidden(tile)
    # Without tapes, the last block's output and its gradient are tensors
    states = 0 if job.plan.sweeps else 2 * job.hidden(job.block_tokens)
    states += job.costs.kept(job, range(job.layers_running))
    reduces = not _alone(job)
    at_head = {GATHERED: reduces * job.itemsize * head.unit, BLOCKS: states}
    yield "the loss", Counter({**at_head, LOSS: job.high * head.unit + logits + 3 * job.hidden(tile)})
    if reduces and not job.spec.tied:
        gradient = {LOSS: job.high * head.unit, GRADIENTS: job.high * head.unit}
        yield "the head's gradient", Counter({**at_head, **gradient})


def _open_block(job: Job) -> Bytes:
    """A block's gathered weights, the next one's on their way, the sums of its gradients; a tied model's table."""
    return Counter({GATHERED: gathered_weights(job), BLOCKS: job.high * block_parameters(job).all})


def gathered_weights(job: Job) -> int:
    """Bytes of a block's gathered weights and of the next one's on their way; of a tied model's table, too."""
    prefetches = job.axes.parameter > 1 and job.layers_running > 1
    gathered = 0 if job.plan.zero < 3 else block_parameters(job).all * (2 if prefetches else 1)
    table = table_parameters(job).unit if job.spec.tied and job.plan.zero == 3 else 0
    return job.itemsize * (gathered + table)


def host_states(job: Job) -> int:
    """Host memory of the optimizer's moments."""
    mine = job.spec.layers * block_parameters(job).mine + table_parameters(job).mine
    return (MOMENTS - _moments_here(job)) * job.high * mine


def _moments_here(job: Job) -> int:
    """AdamW's moments that live on the device: both, or none."""
    return MOMENTS if job.plan.optimizer == "device" else 0


def moment_slot_bytes(largest: int) -> int:
    """Device memory of the slots for host moments; `largest`: elements of the rank's largest shard."""
    return MOMENTS * MOMENT_SLOTS * min(MOMENT_TILE, largest) * FP32


def left_over(job: Job, reads: bool = False) -> Bytes:
    """Bytes that the allocator holds beside tensors. `reads`: in an evaluation, not a step."""
    return Counter({ALLOCATOR: round(_left_over(job, reads))})


def _left_over(job: Job, reads: bool) -> float:
    head = job.itemsize * table_parameters(job).unit
    if _alone(job):
        states = 0 if job.plan.sweeps else LEFT_OVER_STATES * job.hidden(job.block_tokens)
        return LEFT_OVER_ONE_RANK * head + states
    if reads:
        return LEFT_OVER_READING * head
    return head * (LEFT_OVER if job.layers_running > 1 else LEFT_OVER_ONE_BLOCK)


@dataclass(frozen=True)
class Parameters:
    """Counts of parameters: of all ranks together, and of one rank."""

    all: int
    mine: int
    largest: int  # this rank's part of the largest one
    unit: int  # of the head, which is gathered and reduced together
    unit_mine: int


def block_parameters(job: Job) -> Parameters:
    """The parameters of one block."""
    return _parameters(job.rank_spec, job.axes.parameter, block=True)


def table_parameters(job: Job) -> Parameters:
    """The parameters outside of the blocks: embedding, final norm, head."""
    return _parameters(job.rank_spec, job.axes.parameter, block=False)


@lru_cache(maxsize=256)  # the planner's search asks for the same values many times
def _parameters(spec: Spec, ranks: int, block: bool) -> Parameters:
    shapes = spec.block_shapes() if block else {name: shape for name, shape in spec.shapes() if ".layers." not in name}
    unit = {name: shape for name, shape in shapes.items() if block or spec.tied or "embed" not in name}
    return Parameters(
        all=sum(map(math.prod, shapes.values())),
        mine=sum(_part(shape, ranks) for shape in shapes.values()),
        largest=max(_part(shape, ranks) for shape in shapes.values()),
        unit=sum(map(math.prod, unit.values())),
        unit_mine=sum(_part(shape, ranks) for shape in unit.values()),
    )


def _part(shape: tuple[int, ...], ranks: int) -> int:
    return len(row_range(shape[0], 0, ranks)) * math.prod(shape[1:])
