"""Which attention kernels the Plans of a question may have."""

from dataclasses import replace
from typing import NoReturn

from ithaca.attention.kernels.facts import KERNEL_FACTS, KernelFacts, gpu_kernels
from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.planner.hardware import CPU, Cluster
from ithaca.plans.plan import Plan


def kernel_of(spec: Spec, cluster: Cluster) -> str:
    return kernels_of(spec, cluster)[0].name


def replaying_kernel(spec: Spec, cluster: Cluster) -> str | None:
    """The fastest kernel that CUDA graphs can have; None on a CPU."""
    if cluster.gpu.name == CPU:
        return None
    return next((facts.name for facts in kernels_of(spec, cluster) if facts.replays), None)


def kernels_of(spec: Spec, cluster: Cluster) -> list[KernelFacts]:
    """The attention kernels that can be had, the best first: the one that was asked for, or those that are there."""
    if cluster.kernels is not None:
        return [KERNEL_FACTS[name] for name in cluster.kernels]
    possible = gpu_kernels(spec.head_size, cluster.gpu.capability)
    if cluster.kernel == "auto":
        return [facts for facts in possible if facts.installed or facts.name in cluster.gpu.described]
    if cluster.gpu.name == CPU:
        raise PlanError(f"--kernel {cluster.kernel} is for GPUs, and {cluster.gpus} has none: leave it out")
    fast = [facts for facts in possible if facts.device is not None]  # not `naive`, whose time is not predicted
    return [facts for facts in fast if facts.name == cluster.kernel] or _refuse_kernel(spec, cluster, fast)


def chosen_again(plan: Plan, cluster: Cluster) -> Plan:
    """The Plan without its kernel's name if `auto` finds it: where it trains, a faster one may be installed."""
    found = cluster.kernel == "auto" and KERNEL_FACTS[plan.kernel].installed
    return replace(plan, kernel="auto") if found else plan


def _refuse_kernel(spec: Spec, cluster: Cluster, fast: list[KernelFacts]) -> NoReturn:
    """Raise the error for a kernel that this GPU cannot run with this model, or that is for comparisons only."""
    gpu = cluster.gpu
    if not fast:
        why = f"cannot be chosen: only naive has heads of {spec.head_size}"
    elif KERNEL_FACTS[cluster.kernel].device is None:
        why = "is for comparisons: its time is not predicted"
    else:
        capability = ".".join(map(str, gpu.capability))
        why = f"does not run on {gpu.name} (compute capability {capability}) with heads of {spec.head_size}"
    raise PlanError(f"--kernel {cluster.kernel} {why}; use {', '.join([*(facts.name for facts in fast), 'auto'])}")
