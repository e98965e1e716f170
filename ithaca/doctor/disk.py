"""The disk beside a computation: the rates of tapes on it, and how much they slow the computation down.

Ranks write and read the file that disk tapes use (tape/file.py), all ranks of a node at once: the disk is the node's.
First the disk works alone, then beside matrix products on the device. A disk that is fast alone may be slow beside a
busy CPU, and without direct access the copies take cores from the computation.
"""

import threading

from ithaca.base.sizes import format_bytes
from ithaca.doctor.exam import Exam, Found, Section
from ithaca.doctor.units import columns, format_rate
from ithaca.rehearsal.kernel_bound import median_seconds, seconds_of
from ithaca.rehearsal.measure import products
from ithaca.tape.devices import count_devices
from ithaca.tape.file import TapeFile
from ithaca.tape.rate import write_and_read

RATES = ("write", "read", "write_beside", "read_beside")


def examine(exam: Exam) -> Found:
    if not exam.disk:
        return {}
    device, effort, size = exam.grid.device, exam.sizes.effort, exam.sizes.disk
    work, flops = products(device, effort)
    file = TapeFile(exam.disk, size)
    try:
        exam.begin_together()
        alone = flops / median_seconds(work, effort.copy_seconds, device)
        exam.begin_together()
        found = write_and_read(file, size)
        exam.begin_together()
        beside: dict[str, float] = {}
        disk = threading.Thread(target=lambda: beside.update(write_and_read(file, size)))
        disk.start()
        spent = calls = 0.0
        while disk.is_alive() or not calls:
            spent, calls = spent + seconds_of(work, device), calls + 1
        disk.join()
    finally:
        file.close()
    found |= {f"{name}_beside": rate for name, rate in beside.items()}
    return {"direct": file.direct, "computing": alone, "computing_beside": calls * flops / spent, **found}


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    if not exam.disk:
        return {"skipped": "no folder on a disk was named: --disk FOLDER measures it"}
    nodes = {
        node: [found for rank, found in enumerate(told) if exam.nodes[rank] == node]
        for node in dict.fromkeys(exam.nodes)
    }
    return {
        "folder": ", ".join(exam.disk),
        "devices": count_devices(exam.disk),
        "direct": all(found["direct"] for found in told),
        "bytes": exam.sizes.disk,
        **{name: min(sum(found[name] for found in ranks) for ranks in nodes.values()) for name in RATES},
        "slowdown": max(found["computing"] / found["computing_beside"] for found in told),
    }


def lines(found: Found) -> list[str]:
    rows = [["bytes a second of a node", "alone", "beside products"]]
    rows += [
        [name, format_rate(found[name], "B/s"), format_rate(found[f"{name}_beside"], "B/s")]
        for name in ("write", "read")
    ]
    cached = [] if found["direct"] else ["the folder's file system has no direct access: the page cache helped"]
    each = f"{found['folder']}, {format_bytes(found['bytes'])} for each rank"
    return [each, *columns(rows), f"matrix products take {found['slowdown']:.2f} × as long beside the disk", *cached]


SECTION = Section("disk", examine, conclude, lines)
