"""How long attention takes: the FLOPs of a job over the rate of the kernel that runs, by the lengths of its documents.

The rates of hardware.toml are those of long documents. Short ones are slower, each kernel in its own way. `cudnn` makes
one call over a whole document and slows down with its length. `cudnn+flash` cuts such calls. It also cuts documents of
unequal lengths into cuDNN's shapes, and torch's flash attention computes what remains.
"""

from math import log2

from ithaca.attention.kernels.facts import KERNEL_FACTS, KernelFacts, gpu_kernel
from ithaca.planner.hardware import AttentionRates, Gpu
from ithaca.schedule.costs import Work, counted
from ithaca.schedule.job import Job

K = 2**10
BUCKET = KERNEL_FACTS["cudnn+flash"].bucket
LEAST = 0.25  # of the rate, however short the documents are: assumed

# Document length -> share of the rate at 64K, forward and backward. H200, 32 query and 8 key/value heads of 128:
# documents of 4K in 64K, one of 8K, one of 64K; for `cudnn` forward also one of 512K
_CUDNN = {4 * K: (612 / 601, 464 / 531), 8 * K: (587 / 601, 513 / 531), 64 * K: (1.0, 1.0)}
BY_LENGTH = {
    "flash4": {4 * K: (566 / 662, 487 / 616), 8 * K: (633 / 662, 577 / 616), 64 * K: (1.0, 1.0)},
    "cudnn+flash": _CUDNN,
    "cudnn": {**_CUDNN, 512 * K: (522 / 589, 1.0)},
}
LIKE = {"cudnn": "cudnn+flash"}  # kernels with the rates of another; kernels without any have those of `flash`
OTHERS = "flash"


def job_kernel(job: Job, gpu: Gpu) -> KernelFacts:
    """The kernel that the Plan names; with `auto`, the one for this GPU."""
    return KERNEL_FACTS.get(job.plan.kernel) or gpu_kernel(job.spec.head_size, gpu.capability)


def attention_seconds(job: Job, work: Work, gpu: Gpu) -> tuple[float, float]:
    """Seconds of one forward and of one backward pass of attention, in all layers."""
    kernel = job_kernel(job, gpu).name
    parts = {kernel: 1.0}
    if kernel == "cudnn+flash":
        rest = ragged_share(job.document_lengths)
        parts = {kernel: 1 - rest, OTHERS: rest}
    seconds = [0.0, 0.0]
    for name, share in parts.items():
        rates = zip(kernel_rates(gpu, name).of(job.spec.head_size), by_length(name, work.call), (1.0, 2.5), strict=True)
        for direction, (rate, slower, flops) in enumerate(rates):
            seconds[direction] += share * flops * work.attention / (rate * slower)
    return seconds[0], seconds[1]


def kernel_rates(gpu: Gpu, kernel: str) -> AttentionRates:
    rates = gpu.rates(LIKE.get(kernel, kernel)) or gpu.rates(OTHERS)
    assert rates is not None
    return rates


def ragged_share(lengths: tuple[int, ...]) -> float:
    """The share of attention's FLOPs that `cudnn+flash` leaves to flash: remainders of lengths after whole buckets."""
    found = counted(lengths)
    if len(found) == 1:
        return 0.0
    cut = sum(count * (length // BUCKET * BUCKET) ** 2 for length, count in found)
    return 1 - cut / sum(count * length**2 for length, count in found)


def by_length(kernel: str, length: float) -> tuple[float, float]:
    """The share of its rate that a kernel reaches on documents of this length, forward and backward.

    Between two measured lengths it is linear in the logarithm; below the shortest it falls as between the first two.
    """
    points = BY_LENGTH.get(kernel)
    if points is None:
        return 1.0, 1.0
    return _share(points, length, 0), _share(points, length, 1)


def _share(points: dict[int, tuple[float, float]], length: float, direction: int) -> float:
    lengths = [*points]
    if length >= lengths[-1]:
        return points[lengths[-1]][direction]
    upper = next(index for index in range(1, len(lengths)) if length < lengths[index])
    (low, at_low), (high, at_high) = ((at, points[at][direction]) for at in lengths[upper - 1 : upper + 1])
    found = at_low + (at_high - at_low) * log2(length / low) / log2(high / low)
    return found if length >= low else max(min(found, at_low), LEAST)
