"""The rates of each GPU, or of the CPU: matrix products, attention by every kernel that runs, memory, the host link.

The measurements are those of `ithaca plan --measure`. All ranks measure at the same time, as in training, where GPUs
share power, and CPU ranks share cores. The link to the host is measured alone too, one rank of each node after the
other: the links of a node share its memory and often a switch. The slowest rank counts, since a step waits for it.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import psutil
import torch

from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.base.sizes import format_bytes, format_count
from ithaca.doctor.exam import Exam, Found, Section, describe
from ithaca.doctor.units import columns, format_rate, rate_title
from ithaca.planner.hardware import CPU
from ithaca.rehearsal.measure import (
    HEAD_SIZES,
    Effort,
    bandwidth,
    compute_dtype,
    host_rate,
    kernel_rates,
    launch_rate,
    matmul_rate,
)
from ithaca.tape.budget import host_budget

SCORES_CHUNK = 1024  # tokens for a kernel that holds all scores
SLOW = 0.9  # of the median: the report names ranks that are slower


def examine(exam: Exam) -> Found:
    device, effort = exam.grid.device, exam.sizes.effort
    found: Found = {**describe_device(device), "rates": {}, "not_run": {}, "errors": []}

    def measure(name: str, work: Callable[[], Any]) -> None:
        exam.begin_together()
        try:
            result = work()
            found["rates"] |= result if isinstance(result, dict) else {name: result}
        except Exception as error:  # another measurement may still succeed, and the other ranks wait for this one
            found["errors"].append(f"{name}: {describe(error)}")

    measure("matmul", lambda: matmul_rate(device, effort))
    measure("bandwidth", lambda: bandwidth(device, effort))
    for kernel in KERNEL_FACTS:
        if reason := refusal(kernel, device):
            found["not_run"][kernel] = reason
        else:
            measure(f"attention.{kernel}", lambda kernel=kernel: attention(kernel, device, effort))
    measure("launches", lambda: launch_rate(device, effort))
    if device.type == "cuda":
        for turn in range(exam.most_on_a_node):
            mine = turn == exam.local_rank
            measure("host_alone", lambda mine=mine: {"host_alone": host_rate(device, effort)} if mine else {})
        measure("host", lambda: host_rate(device, effort))
    return found


def describe_device(device: torch.device) -> Found:
    """The device, and the memory that is free on it and on its node."""
    host, _ = host_budget()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        kind = {"device": properties.name, "id": str(getattr(properties, "uuid", device)), "cores": None}
        return {**kind, "memory": total, "free": free, "host_free": host}
    kind = {"device": CPU, "id": CPU, "cores": os.cpu_count()}
    return {**kind, "memory": psutil.virtual_memory().total, "free": host, "host_free": host}


def refusal(kernel: str, device: torch.device) -> str | None:
    """Why a kernel runs at no head size here; None if it runs."""
    reasons = [make_kernel(kernel).refuses(device, compute_dtype(device), size) for size in HEAD_SIZES.values()]
    return reasons[0] if all(reasons) else None


def attention(kernel: str, device: torch.device, effort: Effort) -> dict[str, float]:
    chunk = min(effort.chunk, SCORES_CHUNK) if KERNEL_FACTS[kernel].scores else effort.chunk
    rates = kernel_rates(kernel, device, replace(effort, chunk=chunk))
    return {f"attention.{kernel}.{name}": rate for name, rate in rates.items()}


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    places = [(exam.nodes[rank], found["id"]) for rank, found in enumerate(told)]
    shared = max(map(places.count, places))
    names = dict.fromkeys(name for found in told for name in found["rates"])
    rates: dict[str, list[float | None]] = {name: [found["rates"].get(name) for found in told] for name in names}
    return {
        "device": told[0]["device"],
        "cores": told[0]["cores"],
        "ranks_on_a_device": shared,
        "memory": min(found["memory"] for found in told),
        "free": min(found["free"] for found in told),
        "host_free": min(found["host_free"] for found in told),
        "slowest": {name: min(filter(None, values)) for name, values in rates.items()},
        "by_rank": rates,
        "notes": _odd_devices(told) + ([] if shared > 1 else _slow_ranks(rates)),
        "not_run": told[0]["not_run"],
        "problems": [f"rank {rank}: {error}" for rank, found in enumerate(told) for error in found["errors"]],
    }


def _odd_devices(told: list[Found]) -> list[str]:
    first = told[0]["device"]
    return [
        f"rank {rank} has another device, {found['device']}"
        for rank, found in enumerate(told)
        if found["device"] != first
    ]


def _slow_ranks(rates: dict[str, list[float | None]]) -> list[str]:
    return [
        f"rank {rank} reaches {value / median(filter(None, values)):.0%} of the median in {name}"
        for name, values in rates.items()
        for rank, value in enumerate(values)
        if value and value < SLOW * median(filter(None, values))
    ]


def lines(found: Found) -> list[str]:
    shared, free = found["ranks_on_a_device"], f"{format_bytes(found['free'])} free of {format_bytes(found['memory'])}"
    kind = f"{found['device']} of {format_count(found['cores'], 'core')}" if found["cores"] else found["device"]
    sharing = f"; {shared} ranks share it, and each measured while the others did" if shared > 1 else ""
    rows = [["", "slowest rank", "fastest rank"]]
    for name, rate in found["slowest"].items():
        unit = UNITS.get(name, "FLOP/s")
        fastest = max(filter(None, found["by_rank"][name]))
        rows.append([TITLES.get(name) or rate_title(name), format_rate(rate, unit), format_rate(fastest, unit)])
    reasons = dict.fromkeys(found["not_run"].values())
    idle = {reason: [kernel for kernel, why in found["not_run"].items() if why == reason] for reason in reasons}
    kernels = [f"not run: {', '.join(names)} ({reason})" for reason, names in idle.items()]
    return [f"{kind}, {free}{sharing}", *columns(rows), *kernels, *found["notes"]]


TITLES = {
    "matmul": "matrix products",
    "bandwidth": "memory, read and written",
    "launches": "operations launched in small steps",
    "host_alone": "host link, one GPU of a node at a time",
    "host": "host link, all GPUs at once",
}
UNITS = {"bandwidth": "B/s", "host": "B/s", "host_alone": "B/s", "launches": "/s"}
SECTION = Section("devices", examine, conclude, lines)
