"""A disk that is slower than the step needs, with both numbers and what the step loses by it."""

import math
from dataclasses import dataclass, replace

from ithaca.base.sizes import format_number, format_seconds
from ithaca.planner.hardware import ASSUMED_DISK, DISK_NUMBERS, Gpu, Machine
from ithaca.planner.seconds import copy_seconds, predict_seconds
from ithaca.schedule.costs import Copies
from ithaca.schedule.job import Job

SLOWER = 1.02  # no warning if a step takes at most this many times as long as with a fast disk


@dataclass(frozen=True)
class SlowDisk:
    """The rate that a step needs of a node's disks in the pass that waits longest for them, and the rate they have."""

    way: str  # forward or backward
    needed: float  # bytes/s, so that nothing waits
    given: float
    disks: int  # those that give it
    step: float  # seconds
    without: float  # seconds, were the disks fast enough

    @property
    def enough(self) -> int:
        """Disks of this speed that would be fast enough."""
        return math.ceil(self.disks * self.needed / self.given)

    def rates(self) -> str:
        """'the forward pass needs 6.2 GB/s of each node's disk, which gives 1.5 GB/s'"""
        needed, given = map(_rate, (self.needed, self.given))
        return f"the {self.way} pass needs {needed} of each node's disk, which gives {given}"


def _rate(rate: float) -> str:
    return f"{format_number(rate / 1e9)} GB/s" if rate >= 1e9 else f"{format_number(rate / 1e6)} MB/s"


def slow_disk(job: Job, gpu: Gpu, machine: Machine, disks: int = 1, passes: int = 1) -> SlowDisk | None:
    """The rates that the disks of a node lack; None if they are fast enough. `passes`: micro-batches of a step."""
    found = predict_seconds(job, gpu, machine, disks)
    if not any(each.disk for each in found.passes):
        return None
    free = predict_seconds(job, replace(gpu, disk_read=math.inf, disk_write=math.inf), machine)
    if found.step <= SLOWER * free.step:
        return None
    work = job.costs.work(job)
    kv = (work.kv.forward, work.kv.backward) if job.plan.kv == "disk" else (Copies(), Copies())
    waits = []  # how many times as fast the disks would have to be
    for each, fetched in zip(found.passes, kv, strict=True):
        # The disk's own time for K and V, which only attention hides
        fetching = copy_seconds(fetched, "disk", replace(gpu, host=math.inf), machine, disks)
        hidden = max(each.attending, copy_seconds(fetched, "host", gpu, machine))
        waits.append(max(each.disk / max(each.computing, each.host), fetching / hidden))
    longest = waits.index(max(waits))
    copied = (work.disk.forward, work.disk.backward)[longest]
    given = machine.gpus * (copied.into + copied.out) / found.passes[longest].disk
    step, without = ((each.step - each.optimizer) * passes + each.optimizer for each in (found, free))
    return SlowDisk(("forward", "backward")[longest], waits[longest] * given, given, disks, step, without)


def slow_disk_line(slow: SlowDisk, gpu: Gpu) -> str:
    """The line of the planner's report."""
    assumed = " (assumed)" if ASSUMED_DISK in (gpu.sources[name] for name in DISK_NUMBERS) else ""
    return (
        f"The disk sets the pace: {slow.rates()}{assumed}; on {slow.enough} such disks a step takes "
        f"{format_seconds(slow.without)}"
    )


def slow_disk_warning(slow: SlowDisk, job: Job) -> str:
    """The sentence with which a run warns."""
    plan = job.plan
    names = ", ".join(f"plan.{name}={getattr(plan, name)}" for name in plan.on_disk)
    more = f"name folders on {slow.enough} such disks (plan.disk='{plan.disk}, …')"
    return (
        f"plan.disk='{plan.disk}' is too slow for this Plan: {slow.rates()}, so a step takes about "
        f"{format_seconds(slow.step)} instead of {format_seconds(slow.without)}; put less on disk ({names}), or {more}"
    )
