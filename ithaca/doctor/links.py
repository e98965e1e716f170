"""The collectives of training between ranks, by message size: inside a node, and across nodes.

The nodes are those that the ranks report. Inside: all ranks of a node. Across: the ranks of all nodes that have the
same local rank, so that every GPU uses its own network card; all such groups run at the same time, as in training.

A rate is the bytes that a rank sends to other ranks over the time of a call; nccl-tests calls it the bus bandwidth.
That is what the planner divides by. It takes `all_to_all` with the largest tensor for a link: of the exchanges, the one
that `ulysses` cannot hide.
"""

import statistics
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ithaca.base.sizes import format_bytes
from ithaca.doctor.exam import COLLECTIVE_SECONDS, Exam, Found, Section
from ithaca.doctor.units import columns, format_rate
from ithaca.parallel.collectives import Group
from ithaca.parallel.ring import Ring
from ithaca.rehearsal.kernel_bound import seconds_of

NUMBER = 4  # bytes: tensors are float32, in which gradients are reduced
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "send_recv")
FOR_PLANNER = "all_to_all"


def examine(exam: Exam) -> Found:
    if exam.grid.size == 1:
        return {}
    groups = {"inside": _own_group(exam, _inside(exam.nodes)), "across": _own_group(exam, _across(exam.nodes))}
    return {
        where: {str(size): _rates(exam, Group(group) if group else None, size) for size in exam.sizes.messages}
        for where, group in groups.items()
    }


def _inside(nodes: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each node."""
    return [[rank for rank, name in enumerate(nodes) if name == node] for node in dict.fromkeys(nodes)]


def _across(nodes: tuple[str, ...]) -> list[list[int]]:
    """For each local rank, the ranks that have it, one from each node that has this many ranks."""
    inside = _inside(nodes)
    most = max(map(len, inside))
    return [[ranks[place] for ranks in inside if place < len(ranks)] for place in range(most)]


def _own_group(exam: Exam, groups: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's group; None if it is alone in it. Every rank takes part in making every group."""
    own = None
    for ranks in (ranks for ranks in groups if len(ranks) > 1):
        if len(ranks) == exam.grid.size:
            return exam.grid.group
        group = dist.new_group(ranks, timeout=timedelta(seconds=COLLECTIVE_SECONDS))
        if exam.grid.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own


def _rates(exam: Exam, group: Group | None, size: int) -> dict[str, float]:
    """Bytes a second of each collective over this rank's group, while other groups do the same."""
    found = {}
    calls = _calls(group, size, exam.grid.device) if group else {}
    for name in COLLECTIVES:
        exam.begin_together()
        if name in calls:
            call, sent = calls[name]
            found[name] = sent / _seconds(call, exam.sizes.repeats, exam.grid.device)
    return found


def _calls(group: Group, size: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Each collective on tensors of about `size` bytes, and the bytes that a rank sends to others in it."""
    ranks = group.ranks
    part = max(size // NUMBER // ranks, 1)
    whole, target = (torch.zeros(ranks * part, device=device) for _ in range(2))
    own, parts, sent = torch.zeros(part, device=device), [part] * ranks, NUMBER * part * (ranks - 1)
    return {
        "all_to_all": (lambda: group.all_to_all(target, whole, parts, parts).wait(), sent),
        "all_gather": (lambda: group.all_gather(target, own).wait(), sent),
        "reduce_scatter": (lambda: group.reduce_scatter(own, whole).wait(), sent),
        "send_recv": (lambda: Ring(group).send_recv(whole).wait(), whole.nbytes),
    }


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of a call. All ranks make the same number of calls; the earlier half does not count."""
    times = [seconds_of(call, device) for _ in range(repeats)]
    return statistics.median(times[repeats // 2 :])


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    if exam.grid.size == 1:
        return {"skipped": "one rank sends nothing"}
    found: Found = {}
    for where in ("inside", "across"):
        for size in map(str, exam.sizes.messages):
            rates = [rank[where][size] for rank in told if rank[where][size]]
            if rates:
                slowest = {name: min(rank[name] for rank in rates) for name in COLLECTIVES}
                found.setdefault(where, {})[size] = slowest
    return found


def link_rate(found: Found, where: str) -> float | None:
    """Bytes a second that the planner divides by; None without such links."""
    sizes = found.get(where)
    return sizes[max(sizes, key=int)][FOR_PLANNER] if sizes else None


def lines(found: Found) -> list[str]:
    text = []
    for where, title in (("inside", "inside a node"), ("across", "across nodes")):
        if sizes := found.get(where):
            rows = [[title, *COLLECTIVES]]
            rows += [
                [format_bytes(int(size)), *(format_rate(rates[name], "B/s") for name in COLLECTIVES)]
                for size, rates in sizes.items()
            ]
            text += columns(rows)
    return text


SECTION = Section("links", examine, conclude, lines)
