"""The balance chunk: the chunk at which fetching a tile of K and V takes as long as attending to it. No torch.

Where K and V live off the device, a chunk of T tokens fetches the tiles of all chunks before it, one while it attends
to another. Bytes of a tile grow with T, FLOPs of a visit with T²: from the balance chunk on, fetching is hidden.
The idea is FPDT's, whose authors found 64K by trying.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from ithaca.base.sizes import format_number, format_tokens
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.attention_rates import job_kernel, kernel_rates
from ithaca.planner.hardware import Gpu, Machine
from ithaca.planner.seconds import copy_seconds
from ithaca.plans.places import KEPT
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Copies
from ithaca.schedule.job import Job
from ithaca.schedule.sweep.chunks import head_passes


@dataclass(frozen=True)
class Balance:
    """A visit of one chunk to the K and V of another, in the direction that needs the larger chunk to balance."""

    chunk: int  # tokens, at which both take as long
    fetch: float  # seconds for each token of the chunk
    attend: float  # seconds for each token of the chunk, squared


def balance(job: Job, gpu: Gpu, machine: Machine) -> Balance:
    """The balance chunk of a job whose K and V live off the device.

    With hq query and hkv key/value heads of size D on a rank, b bytes a number, f bytes a sum (fp32), chunks of T
    tokens, A FLOP/s of the attention kernel and B bytes/s of the link to the host in each direction:

        forward    fetch  K, V in                 2 hkv D b T / B          attend   4 hq D T² / A
        backward   fetch  K, V, dK, dV in         2 hkv D (b + f) T / B    attend  10 hq D T² / A
                          (dK, dV out are less)

        T = hkv b A / (2 hq B) forward,  hkv (b + f) A / (5 hq B) backward; the larger of both

    On a disk that n GPUs share, with R and W bytes/s to read and to write, fetching takes n (in / R + out / W). Over
    several ring ranks a tile has fewer tokens and all queries visit it, so their number cancels.
    """
    heads, size = head_passes(job)[0], job.spec.head_size
    hq, hkv = len(heads.q[job.head_rank]), len(heads.kv[job.head_rank])
    tile, sums = 2 * hkv * size * job.itemsize, 2 * hkv * size * job.high  # bytes of a token
    moved = Copies(into=tile), Copies(into=tile + sums, out=sums)
    found = []
    rates = kernel_rates(gpu, job_kernel(job, gpu).name).of(size)
    for rate, copied, flops in zip(rates, moved, (4, 10), strict=True):
        fetch, attend = copy_seconds(copied, job.plan.kv, gpu, machine), flops * hq * size / rate
        found.append(Balance(ceil(fetch / attend), fetch / job.axes.ring, attend / job.axes.ring))
    return max(found, key=lambda one: one.chunk)


def describe(found: Balance, chunk: int) -> str:
    """'Chunks of 64K: fetching a tile of K and V takes 1.2 ms, attending to it 36 ms; they balance at 3K'"""
    fetch, attend = (f"{format_number(1e3 * time)} ms" for time in (found.fetch * chunk, found.attend * chunk**2))
    at = format_tokens(-(-found.chunk // 1024) * 1024)
    return (
        f"Chunks of {format_tokens(chunk)}: fetching a tile of K and V takes {fetch}, attending to it {attend}; they "
        f"balance at {at}"
    )


@lru_cache(maxsize=256)  # the search asks for the same values many times
def least_chunks(spec: Spec, axes: Axes, gpu: Gpu, machine: Machine, kernel: str) -> Mapping[str, int]:
    """For each place off the device where K and V can live, the balance chunk."""
    return {
        place: balance(Job(spec=spec, plan=_plan(place, kernel), tokens=1, axes=axes), gpu, machine).chunk
        for place in KEPT
        if place != "device"
    }


def _plan(place: str, kernel: str) -> Plan:
    return Plan(recipe="sweep", kv=place, kernel=kernel, disk="/" if place == "disk" else None)
