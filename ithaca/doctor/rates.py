"""The planner's assumptions about this machine, and the measured numbers, as GPUs of its table.

The measured GPU has the assumed numbers where nothing was measured. A device that no table describes, such as a CPU,
gets a table of its own. The planner knows GPUs alone, so a few numbers of a CPU stand for something else, and their
sources say so.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from ithaca.doctor.exam import Exam, Found
from ithaca.doctor.links import FOR_PLANNER, link_rate
from ithaca.planner.hardware import AMPERE, HERE, OLD_KERNEL, Cluster, Gpu, read_gpus
from ithaca.rehearsal.measure import KERNELS, write_rates
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.tape.budget import KEPT_BACK

CPU_KERNEL = "torch-cpu"
OTHER_KERNEL = "flash"  # computes what `cudnn+flash` leaves
RATES = ("matmul", "bandwidth", "host", "launches")
NEEDED = ("matmul", "bandwidth")  # without them nothing is predicted

Tables = dict[str, dict[str, tuple[float, str]]]  # a TOML table's name -> numbers, each with its source


def assumed_gpu(exam: Exam) -> Gpu | None:
    """The GPU here as hardware.toml has it; None if it has none."""
    return known_gpu(exam.grid.device)


def measured_tables(exam: Exam, findings: Mapping[str, Found]) -> Tables:
    """The numbers that were measured, as a file for `--hardware` has them; nothing if the device was not measured."""
    devices, links, gpu = findings.get("devices", {}), findings.get("links", {}), assumed_gpu(exam)
    if not all(name in devices.get("slowest", {}) for name in NEEDED):
        return {}
    shared = devices["ranks_on_a_device"]
    source = HERE if shared == 1 else f"{HERE}, {shared} ranks on one device at once"
    node = devices["host_free"] / (1 - KEPT_BACK)
    numbers = {name: (devices["slowest"][name], source) for name in RATES if name in devices["slowest"]}
    numbers["memory"] = (devices["memory"], "measured: its driver")
    numbers["ram"] = (node / exam.most_on_a_node, "measured: free memory of the node")
    for where in ("inside", "across"):
        if rate := link_rate(links, where):
            numbers[where] = (rate, f"measured by ithaca doctor: {FOR_PLANNER}, {devices['device']}")
    for name, rate in disk_rates(findings.get("disk", {})).items():
        folder = findings["disk"]["folder"]
        numbers[name] = (rate, f"measured by ithaca doctor: {folder}, beside products, all ranks of a node at once")
    kernels = {kernel: kernel for kernel in KERNELS}
    if gpu is None:
        kernels |= _stand_ins(exam, devices, numbers)
    name = gpu.name if gpu else devices["device"].replace(" ", "-")
    tables = {f'"{name}"': numbers}
    for kernel, measured in kernels.items():
        begin = f"attention.{measured}."
        said = source if kernel == measured else f"{source}, with kernel {measured}"
        rates = {key: value for key, value in devices["slowest"].items() if key.startswith(begin)}
        tables[f'"{name}".attention."{kernel}"'] = {
            key.removeprefix(begin): (rate, said) for key, rate in rates.items()
        }
    return tables


def disk_rates(disk: Found) -> dict[str, float]:
    """Bytes a second of one disk of a node, as the planner counts them; nothing if none was measured."""
    if "write_beside" not in disk:
        return {}
    return {f"disk_{way}": disk[f"{way}_beside"] / disk["devices"] for way in ("read", "write")}


def _stand_ins(exam: Exam, devices: Found, numbers: dict[str, tuple[float, str]]) -> dict[str, str]:
    """Add the numbers that a device in no table needs. Return the kernels whose rates stand for another's."""
    matmul, bandwidth = numbers["matmul"][0], numbers["bandwidth"][0]
    numbers["flops"] = (matmul, "no data sheet: the measured rate of matrix products")
    for where in ("inside", "across"):
        numbers.setdefault(where, (bandwidth / 2, "assumed: a copy in memory; no such link was measured"))
    if exam.grid.gpu:
        major, minor = torch.cuda.get_device_capability(exam.grid.device)
        numbers["capability"] = (major + minor / 10, "its driver")
        return {}
    half = devices["host_free"] / (1 - KEPT_BACK) / exam.most_on_a_node / 2
    numbers["memory"] = (half, "half of a rank's share of the free memory stands for a GPU's")
    numbers["ram"] = (half, "the other half")
    numbers["host"] = (bandwidth / 2, "a copy in memory stands for a GPU's link")
    numbers["capability"] = (AMPERE, f"of a GPU with kernel {OLD_KERNEL}, for which {CPU_KERNEL} stands")
    return dict.fromkeys((OLD_KERNEL, OTHER_KERNEL), CPU_KERNEL)


def known_gpus(exam: Exam, tables: Tables) -> dict[str, Gpu]:
    """The GPU here as it is `assumed`, and as it was `measured`; one of them may be missing."""
    found = {"assumed": assumed_gpu(exam), "measured": _read(tables) if tables else None}
    return {name: gpu for name, gpu in found.items() if gpu}


def _read(tables: Tables) -> Gpu:
    """The GPU of some tables, as `ithaca plan --hardware` reads it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hardware.toml"
        write_rates(file, tables)
        return read_gpus(file)[next(iter(tables)).strip('"')]


def gpus_option(exam: Exam, name: str) -> str:
    """The ranks' devices as `--gpus` of `ithaca plan` has them: 8xH200-141GB, or with nodes 2x8xH200-141GB."""
    nodes = len(set(exam.nodes))
    return f"{exam.grid.size}x{name}" if nodes == 1 else f"{nodes}x{exam.most_on_a_node}x{name}"


def cluster(exam: Exam, gpu: Gpu) -> Cluster:
    """The nodes that the ranks are on."""
    here = exam.most_on_a_node
    return Cluster(exam.grid.size, gpu, host=here * gpu.ram, node_gpus=here)
