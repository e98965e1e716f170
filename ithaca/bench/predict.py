"""The planner's predictions for a row: memory at a length, the longest context, seconds of a step. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ithaca.attention.kernels.facts import gpu_kernel
from ithaca.base.owners import ALLOCATOR, KERNELS
from ithaca.bench.rows import Limits, Options, read_plan
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Gpu, Machine, causal_mfu
from ithaca.planner.seconds import predict_seconds
from ithaca.schedule.job import BF16, FP32, Job
from ithaca.schedule.step_memory import Memory, step_memory
from ithaca.tape.budget import KEPT_BACK

SHORTEST = 1024  # tokens: no shorter context is looked for
CPU_SHORTEST = 128
FINE = 256  # a length is right to one part in this many


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device that rows run on, or are predicted for."""

    gpu: Gpu | None  # as the table has it; None on a CPU, or if no table has it
    on_cpu: bool = False
    kernel: str | None = None  # the attention kernel there; None: the one that the planner assumes

    @property
    def shortest(self) -> int:
        return CPU_SHORTEST if self.on_cpu else SHORTEST


@dataclass(frozen=True)
class Prediction:
    """A Plan on some ranks, at any length."""

    spec: Spec
    options: Options
    axes: Axes
    limits: Limits
    place: Place

    def job(self, tokens: int) -> Job:
        """Rank 0 of the whole job."""
        plan, gpu = read_plan(self.options), self.place.gpu
        kernel = self.place.kernel or gpu_kernel(self.spec.head_size, gpu.capability if gpu else (9, 0)).name
        plan = replace(plan, kernel=kernel) if plan.kernel == "auto" else plan
        itemsize = FP32 if self.place.on_cpu else BF16
        return Job(spec=self.spec, plan=plan, tokens=tokens, axes=self.axes, itemsize=itemsize, rank=0)

    def device_bytes(self, memory: Memory) -> int:
        """Bytes of the device at the peak. A meter on a CPU counts tensors alone."""
        own = (KERNELS, ALLOCATOR) if self.place.on_cpu else ()
        return memory.total - sum(memory.parts.get(owner, 0) for owner in own)

    def beyond(self, memory: Memory) -> str | None:
        """Return 'host' or 'disk' if the node has too little of it; None if it has enough of both."""
        host, disk = memory.host * self.limits.ranks, memory.disk * self.limits.ranks
        if host > (1 - KEPT_BACK) * self.limits.host:
            return "host"
        return "disk" if disk > self.limits.disk else None

    def limit(self, tokens: int) -> str | None:
        """Return which memory is too small for this many tokens: 'GPU', 'host' or 'disk'; None if they fit."""
        memory = step_memory(self.job(tokens))
        return self.beyond(memory) or ("GPU" if self.device_bytes(memory) > self.limits.cap else None)

    def why_not(self, tokens: int) -> dict[str, Any]:
        """Return the bytes that tokens take that do not fit. `libraries_bytes`: beside tensors, on a GPU."""
        memory = step_memory(self.job(tokens))
        libraries = 0 if self.place.on_cpu else memory.parts.get(KERNELS, 0)
        found = {"fails": tokens, "limit": self.limit(tokens)}
        return found | {"fails_bytes": self.device_bytes(memory), "libraries_bytes": libraries}

    def longest(self) -> int:
        """Return the longest context that is predicted to fit; 0 if none does."""
        return longest(lambda tokens: self.limit(tokens) is None, self.place.shortest, self.limits.most)

    def seconds(self, tokens: int, links: bool) -> float | None:
        """Predicted seconds of a step, with the links of a node or with messages that loop back, as in a rehearsal."""
        gpu = self.place.gpu
        if gpu is None:
            return None
        here = Machine(nodes=self.axes.size, gpus=1, inside=gpu.bandwidth / 2, across=gpu.bandwidth / 2)
        node = Machine(nodes=1, gpus=self.limits.ranks, inside=gpu.inside, across=gpu.across)
        return predict_seconds(self.job(tokens), gpu, node if links else here).step

    def speed(self, tokens: int, seconds: float) -> dict[str, Any]:
        """Tokens a second and GPU, and causal MFU, of steps that take so long."""
        rate, gpu = tokens / seconds / self.axes.context, self.place.gpu
        mfu = causal_mfu(self.spec, tokens, rate, gpu.flops) if gpu else None
        return {"seconds": seconds, "tokens_per_second_per_gpu": rate, "mfu_causal": mfu}


def longest(fits: Callable[[int], bool], shortest: int, most: int) -> int:
    """Return the longest length, to one part in `FINE`, for which `fits` holds; 0 if there is none, `most` at most."""
    if not fits(shortest):
        return 0
    low = shortest
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    if low == most:
        return most
    high, step = 2 * low, max(low // FINE, shortest)
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
