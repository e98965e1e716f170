"""Installed versions, and missing packages with the line that installs them. All ranks must have the same."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from ithaca import __version__
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.doctor.exam import Exam, Found, Section
from ithaca.parallel.nccl import nccl_version

PACKAGES = {
    "flash-attn-4": f"pip install 'ithaca[{KERNEL_FACTS['flash4'].extra}]'",
    "triton": "pip install triton (it comes with torch for CUDA)",
    "transformers": "pip install transformers (training does without; it loads what Ithaca exports)",
}
CUDA = "pip install torch, in a build for CUDA"


def examine(exam: Exam) -> Found:
    versions = {"ithaca": __version__, "Python": platform.python_version(), "torch": torch.__version__, **_cuda()}
    versions |= {package: _installed(package) for package in PACKAGES}
    return {"versions": versions, "missing": _missing(versions, exam.grid.device)}


def _cuda() -> dict[str, str | None]:
    """The libraries of CUDA that torch was built with."""
    if torch.version.cuda is None:
        return {"CUDA": None, "NCCL": None, "cuDNN": None}
    nccl = ".".join(map(str, nccl_version())) if dist.is_nccl_available() else None
    cudnn = torch.backends.cudnn.version()
    return {"CUDA": torch.version.cuda, "NCCL": nccl, "cuDNN": None if cudnn is None else str(cudnn)}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(versions: dict[str, str | None], device: torch.device) -> dict[str, str]:
    """The line that installs each missing package. A package that could not run here is not missing."""
    lines = {"CUDA": CUDA, "NCCL": CUDA, "cuDNN": CUDA, **PACKAGES}
    found = {name: lines[name] for name, number in versions.items() if number is None}
    needs = KERNEL_FACTS["flash4"].capability or (0, 0)
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < needs:
        found.pop("flash-attn-4", None)
    if device.type != "cuda":
        found.pop("triton", None)
    return found


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    first = told[0]["versions"]
    problems = [
        f"rank {rank} on {exam.nodes[rank]} has {name} {number}, but rank 0 has {first[name]}: install the same"
        for rank, found in enumerate(told)
        for name, number in found["versions"].items()
        if number != first[name]
    ]
    return {**told[0], "problems": problems}


def lines(found: Found) -> list[str]:
    there = [f"{name} {number}" for name, number in found["versions"].items() if number is not None]
    missing: dict[str, list[str]] = {}
    for name, line in found["missing"].items():
        missing.setdefault(line, []).append(name)
    return [", ".join(there), *(f"missing: {', '.join(names)}: {line}" for line, names in missing.items())]


SECTION = Section("versions", examine, conclude, lines)
