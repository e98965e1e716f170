"""The assumptions of a planner's answer: the attention kernel, and numbers that were not measured on this GPU."""

from dataclasses import replace

from ithaca.attention.kernels.facts import KERNEL_FACTS, gpu_kernels
from ithaca.base.sizes import format_bytes, format_seconds
from ithaca.model.spec import Spec
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import DISK_NUMBERS, HERE, MARGIN, RUNTIME, Cluster, Gpu, rate_names
from ithaca.planner.search import Answer, pass_seconds
from ithaca.schedule.variants import fitting_graph
from ithaca.tape.budget import KEPT_BACK


def kernel_text(spec: Spec, cluster: Cluster, answer: Answer, documents: Documents | None) -> str:
    """The assumed kernel; how to install it, or the time of a step with a faster kernel that is not installed."""
    facts = KERNEL_FACTS[answer.kernel]
    if cluster.kernel == "auto" and answer.kernel in cluster.gpu.described:
        return f"{answer.kernel}, whose rates are in the file of --hardware"
    if not facts.installed:
        return f"{answer.kernel}, which is not installed here; where it trains: pip install 'ithaca[{facts.extra}]'"
    if cluster.kernel != "auto":
        return answer.kernel
    best = gpu_kernels(spec.head_size, cluster.gpu.capability)[0]
    if best.name == answer.kernel or best.extra is None:  # nothing to install
        return answer.kernel
    plan, axes, tokens = replace(answer.plan, kernel=best.name), answer.axes, answer.rows * answer.tokens
    graphs = fitting_graph(
        plan,
        spec,
        replace(axes, replicate=cluster.copies),
        tokens,
        cluster.budget,
        best.name if best.replays else None,
    )
    found = [
        pass_seconds(spec, cluster, each, answer.tokens, answer.rows, axes, documents).repeated(answer.passes)
        for each in (plan, *graphs)
    ]
    with_it = min(found, key=lambda seconds: seconds.step)
    if with_it.step >= answer.seconds.step:
        return answer.kernel
    return (
        f"{answer.kernel}; with {best.name} a step would take {format_seconds(with_it.step)}: "
        f"pip install 'ithaca[{best.extra}]'"
    )


def assumptions(spec: Spec, cluster: Cluster, answer: Answer) -> list[str]:
    """The numbers that were not measured on this GPU, each with its source."""
    gpu = cluster.gpu
    names = [name for name in used_numbers(spec, cluster, answer) if name != "across" or cluster.machine.nodes > 1]
    found = [f"{_figure(gpu, name)}: {gpu.sources[name]}" for name in names if gpu.sources[name] != HERE]
    return [
        *found,
        f"{format_bytes(RUNTIME)} of each GPU for the driver and NCCL, {MARGIN:.0%} of it for errors of prediction",
        f"{KEPT_BACK:.0%} of host memory kept free",
    ]


def used_numbers(spec: Spec, cluster: Cluster, answer: Answer) -> list[str]:
    """The numbers of the GPU that an answer depends on: of attention, those of its kernel and head size."""
    own = {f"attention.{answer.kernel}.{number}" for number in rate_names(spec.head_size)}
    names = [name for name in cluster.gpu.sources if not name.startswith("attention.") or name in own]
    return [name for name in names if answer.memory.disk or name not in DISK_NUMBERS]


def _figure(gpu: Gpu, name: str) -> str:
    if name == "capability":
        return f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    if name.startswith("attention."):
        _, kernel, number = name.split(".")
        direction, size = number.removesuffix("_64"), " with heads of 64" if number.endswith("_64") else ""
        return f"attention {direction} of {kernel}{size} {getattr(gpu.rates(kernel), number) / 1e12:.4g} TFLOP/s"
    value, title = getattr(gpu, name), name.replace("_", " ")
    if name == "launches":
        return f"{value:.4g} GPU operations/s launched by the host"
    if name in ("flops", "matmul"):
        return f"{title} {value / 1e12:.4g} TFLOP/s"
    return f"{title} {value / 1e9:.4g} GB" + ("" if name in ("memory", "ram") else "/s")
