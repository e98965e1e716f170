"""How long a step takes, by part: the work that a schedule states, divided by what kernels and links reach.

    attention    forward, 2.5 times that backward, and once more where it is recomputed; and merging outputs of tiles
    linear       matrix products, and the bytes that norms, gates, rotary and residuals move between them
    exchange     messages between ranks that share a sequence, by link; the schedule says how much of it is hidden
    copies       tapes in host memory and on disk, in the busier direction; hidden behind the rest
    weights      gathered for each pass and reduced in fp32 over all ranks; hidden behind all but the shortest blocks
    optimizer    reads and writes 28 bytes a parameter of the shard, or moves moments over the link to the host

Three factors were measured on the H200: heads of up to 64 features run slower; so does one kernel call over a whole
sequence than a walk over tiles; and what lies between a block's products adds to them. Padding is left out.
"""

from dataclasses import dataclass

from ithaca.model.spec import Spec
from ithaca.planner.hardware import Gpu, Machine
from ithaca.planner.links import exchange_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import BF16, FP32, Job

NARROW_HEADS = {"forward": 451 / 589, "backward": 419 / 516}  # head size 64 against 128, measured on an H200
ONE_CALL = 522 / 589  # forward, a sequence of 512K at once against tiles of 64K
BETWEEN = 1.12  # times the time of products and of the bytes beside them
DISK = 4e9  # bytes a second that a node's disk writes, and reads: assumed


@dataclass(frozen=True)
class Seconds:
    """One step of one rank."""

    attention_forward: float
    attention_backward: float
    linear: float
    exchange: float
    copies: float
    weights: float
    optimizer: float
    step: float

    @property
    def computing(self) -> float:
        return self.attention_forward + self.attention_backward + self.linear


def predict_seconds(job: Job, gpu: Gpu, machine: Machine) -> Seconds:
    """The time of a step of a job on some GPUs."""
    work = job.costs.work(job)
    narrow = job.spec.head_size <= 64
    forward_rate = gpu.attention_forward * (NARROW_HEADS["forward"] if narrow else 1.0)
    forward_rate *= ONE_CALL if work.one_call else 1.0
    backward_rate = gpu.attention_backward * (NARROW_HEADS["backward"] if narrow else 1.0)
    merging = work.merged / gpu.bandwidth
    forward = work.attention_runs * (work.attention / forward_rate + merging)
    backward = 2.5 * work.attention / backward_rate + merging
    linear = BETWEEN * (work.linear / gpu.matmul + work.moved / gpu.bandwidth)
    ulysses, ring = exchange_seconds(job, machine)
    copies = max(work.host.most / gpu.host, work.disk.most * machine.gpus / DISK)
    weights = _weights(job.spec, job.plan, machine)
    optimizer = _optimizer(job.spec, job.plan, gpu, machine)
    exposed = job.costs.exposed(job, forward + backward + linear, ulysses, ring)
    step = optimizer + max(exposed, copies, ulysses + ring, weights)
    return Seconds(forward, backward, linear, ulysses + ring, copies, weights, optimizer, step)


def _weights(spec: Spec, plan: Plan, machine: Machine) -> float:
    """Gathered in bf16 for both passes (under ZeRO-1 and 2 once), reduced in fp32, over the slower link."""
    if machine.ranks == 1:
        return 0.0
    sent = spec.parameters() * (machine.ranks - 1) / machine.ranks * (BF16 * (2 if plan.zero == 3 else 1) + FP32)
    return sent / (machine.across if machine.nodes > 1 else machine.inside)


def _optimizer(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine) -> float:
    """Weights, gradients and moments are read, weights and moments written; all in fp32."""
    shard = spec.parameters() / machine.ranks
    if plan.optimizer == "host":
        return 8 * shard / gpu.host
    return 28 * shard / gpu.bandwidth
