"""The time of a step, by part: the work that the schedule states, divided by the rates of kernels and links.

    attention    forward, 2.5 times as much backward, forward again if it is recomputed; merging the outputs of tiles
    linear       matrix products, and the bytes that norms, gates, rotary and residuals read and write
    exchange     messages between ranks that share a sequence, by link; the schedule says how much of it is hidden
    copies       tapes in host memory and on disk, in the busier direction; hidden behind the rest
    weights      gathered for each pass, gradients reduced in fp32, over all ranks; hidden behind all but short blocks
    optimizer    reads and writes 28 bytes per parameter of the shard, or copies moments from the host and back

Three factors were measured on the H200: attention is slower with heads of up to 64 features; one kernel call over a
whole sequence is slower than a walk over tiles; small operations between a block's products add to their time. Padding
is left out.
"""

from dataclasses import dataclass

from ithaca.model.spec import Spec
from ithaca.planner.hardware import Gpu, Machine
from ithaca.planner.links import exchange_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import BF16, FP32, Job

NARROW_HEADS = {"forward": 451 / 589, "backward": 419 / 516}  # rate of head size 64 over that of 128, on an H200
ONE_CALL = 522 / 589  # forward rate of one call over 512K over that of tiles of 64K
BETWEEN = 1.12  # the time of a block's products with everything between them, over the products and bytes alone
DISK = 4e9  # bytes/s that a node's disk writes, and as many that it reads: assumed


@dataclass(frozen=True)
class Seconds:
    """The seconds of one step of one rank, by part. Parts overlap, so `step` is less than their sum."""

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
        """Attention and matrix products."""
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
    """Seconds to gather weights in bf16, for both passes or once, and to reduce gradients, over the slower link."""
    if machine.ranks == 1:
        return 0.0
    sent = spec.parameters() * (machine.ranks - 1) / machine.ranks * (BF16 * (2 if plan.zero == 3 else 1) + FP32)
    return sent / (machine.across if machine.nodes > 1 else machine.inside)


def _optimizer(spec: Spec, plan: Plan, gpu: Gpu, machine: Machine) -> float:
    """Seconds to read weights, gradients and moments and to write weights and moments, all in fp32."""
    shard = spec.parameters() / machine.ranks
    if plan.optimizer == "host":
        return 8 * shard / gpu.host
    return 28 * shard / gpu.bandwidth
