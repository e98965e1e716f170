"""The command `ithaca rehearse`: a scene from its options, and the report as lines or as JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError, PlanError, RunError, read_option
from ithaca.base.sizes import format_bytes, format_count, format_seconds, format_tokens
from ithaca.config import read_config
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.answer.next_command import Trial, next_command, next_lines
from ithaca.planner.documents import Documents, read_documents
from ithaca.planner.hardware import Machine, parse_gpus, read_gpus
from ithaca.planner.meshes import choose
from ithaca.plans.plan import Plan

NODE_GPUS, NODE_GPU = 8, "H100-80GB"  # the nodes that the mesh is chosen for


def run(
    model: str,
    ranks: int,
    tokens: int,
    layers: int | None,
    recipe: str,
    sets: list[str],
    cap: int | None,
    memory_only: bool,
    bare: bool,
    hardware: Path | None,
    as_json: bool,
    documents: str | None = None,
    evaluates: bool = False,
) -> None:
    """Run `ithaca rehearse MODEL --ranks P --tokens S` and print its report."""
    if bare and memory_only:
        raise ConfigError("--bare times the kernels that --memory-only leaves out: give one of the two")
    if bare and evaluates:
        raise ConfigError("--bare times the kernels of a training step, and --evaluate has none: give one of the two")
    words, packed = scene_words(model, ranks, tokens, layers, recipe, sets, cap, hardware, documents)
    from ithaca.rehearsal.rehearse import rehearse  # imports torch, which takes seconds
    from ithaca.rehearsal.scene import Scene

    scene = Scene(**words, memory_only=memory_only, bare=bare)
    if evaluates:
        from ithaca.rehearsal.evaluation import run_evaluation_scene

        report = rehearse(scene, run=run_evaluation_scene)
    else:
        report = rehearse(scene)
    if packed:
        report["documents_packed"] = packed.describe(tokens)
    if not report["fits"]:
        if as_json:
            print(json.dumps(report, indent=2))
        raise RunError(does_not_fit(report))
    trial = Trial(
        model=model,
        spec=read_spec(find_config(model)[0]),
        tokens=tokens,
        plan=words["plan"],
        axes=words["axes"],
        nodes=ranks // _node_gpus(ranks),
        documents=packed,
    )
    report["train"] = next_command(trial)
    print(json.dumps(report, indent=2) if as_json else "\n".join([*_lines(report), "", *next_lines(trial)]))


def does_not_fit(report: dict[str, Any]) -> str:
    """Return the sentence for a scene that does not fit this device."""
    return (
        f"{format_tokens(report['tokens'])} tokens do not fit ({report['why']}): the predicted peak is "
        f"{format_bytes(report['peak_bytes_predicted'])}"
    )


def scene_words(
    model: str,
    ranks: int,
    tokens: int,
    layers: int | None,
    recipe: str,
    sets: list[str],
    cap: int | None,
    hardware: Path | None,
    documents: str | None,
) -> tuple[dict[str, Any], Documents | None]:
    """Return the fields of a `Scene` from a command's options, and its documents. Raise an error for wrong options."""
    config = read_config(None, [f"plan.recipe={recipe}", *sets])
    foreign = [item for item in sets if not item.startswith(("plan.", "mesh."))]
    if foreign:
        raise ConfigError(f"--set {foreign[0]} has no effect in a rehearsal: set options of plan or mesh")
    if config.plan is None:
        raise ConfigError("--recipe auto cannot be rehearsed: give the recipe that ithaca plan chooses, as sweep")
    mesh_given = any(item.startswith("mesh.") for item in sets)
    axes = _axes(model, ranks, tokens, config.plan, dict(vars(config.mesh)), mesh_given)
    packed = None if documents is None else read_option("--documents", read_documents, documents)
    bounds = None if packed is None else (0, *accumulate(packed.lengths(tokens)))
    read_gpus(hardware)  # report a mistake in this file before the step, not after it
    words = {
        "model": model,
        "plan": config.plan,
        "tokens": tokens,
        "layers": layers,
        "cap": cap,
        "hardware": hardware,
        "axes": axes,
        "documents": bounds,
    }
    return words, packed


def _axes(model: str, ranks: int, tokens: int, plan: Plan, mesh: dict[str, Any], mesh_given: bool) -> Axes:
    """The axes of all ranks: those given, or the best ones with which all ranks share one sequence."""
    if ranks < 1:
        raise PlanError(f"--ranks {ranks} cannot be rehearsed: give 1 or more")
    for name, size in mesh.items():
        if size is not None and size < 1:
            raise PlanError(f"mesh.{name}={size} is not a number of ranks: give 1 or more")
    if not mesh_given and not plan.shares:
        return Axes(shard=ranks)
    if not mesh_given:
        spec = read_spec(find_config(model)[0])
        node = _node_gpus(ranks)
        gpu = parse_gpus(NODE_GPU, read_gpus())[1]
        return choose(spec, plan, gpu, Machine(nodes=ranks // node, gpus=node), tokens)[0].axes
    axes = Axes(**{**mesh, "shard": 1})
    axes = replace(axes, shard=mesh["shard"] or max(ranks // axes.context, 1))
    if axes.replicate != 1 or axes.size != ranks:
        product = " × ".join(f"{name} {size}" for name, size in vars(axes).items())
        raise PlanError(
            f"{product} is {axes.size}, but --ranks is {ranks}: leave replicate out and let the product of the others "
            f"be {ranks}"
        )
    return axes


def _node_gpus(ranks: int) -> int:
    """Return the GPUs on each node: as many as a node has and as divide the ranks."""
    return next(count for count in range(min(ranks, NODE_GPUS), 0, -1) if ranks % count == 0)


def _lines(report: dict[str, Any]) -> list[str]:
    mesh = ", ".join(f"{name} {size}" for name, size in report["mesh"].items() if size > 1)
    device = "GPU" if report["device"] == "cuda" else "CPU"
    lines = [
        f"{report['model']}: {format_tokens(report['tokens'])} tokens, recipe '{report['recipe']}', rank 0 of "
        f"{report['ranks']}{mesh and f' ({mesh})'}, {report['layers']} of "
        f"{format_count(report['model_layers'], 'layer')}, on this {device}",
        *([f"Documents: {report['documents_packed']}"] if "documents_packed" in report else []),
        f"Memory at its peak: {format_bytes(report['peak_bytes'])}"
        + ("" if "cache" in report else _predicted(report["peak_bytes_predicted"], format_bytes)),
    ]
    width = max(map(len, report["memory"]))
    lines += [f"  {owner:{width}}  {format_bytes(size)}" for owner, size in report["memory"].items()]
    if "cache" in report:
        lines += _about_evaluation(report)
    lines.append(f"Host memory: {format_bytes(report['host_bytes'])} of tapes for this rank, all layers")
    if report["disk_bytes"]:
        lines.append(f"Disk: {format_bytes(report['disk_bytes'])} of tapes for this rank, all layers")
    if "seconds" in report:
        parts = ", ".join(
            f"{part} {format_seconds(report[f'{part}_seconds'])}" for part in ("forward", "backward", "optimizer")
        )
        lines.append(
            f"Step of {format_count(report['layers'], 'layer')}, without links between GPUs: "
            f"{format_seconds(report['seconds'])}" + _predicted(report["seconds_predicted"], format_seconds)
        )
        attention = format_seconds(report["attention_seconds"])
        lines.append(f"  {parts}; attention kernels ({report['kernel']}) {attention}")
    if "over_bare" in report:
        lines.append(
            f"Kernels and matrix products alone: {format_seconds(report['bare_seconds'])}; forward and backward take "
            f"{report['over_bare']:.3f} × that"
        )
    return lines


def _about_evaluation(report: dict[str, Any]) -> list[str]:
    """Lines about what only an evaluation has."""
    where = "on the device" if report["cache"] == "device" else "in host memory"
    lines = [f"K and V of all layers: {where}"]
    if report["peak_bytes_predicted"] is not None:
        lines.append(
            f"Predicted: {format_bytes(report['peak_bytes_predicted'])}; a training step under this Plan: "
            f"{format_bytes(report['training_peak_bytes_predicted'])}"
        )
    if "reading_seconds" in report:
        reading, token = (format_seconds(report[f"{part}_seconds"]) for part in ("reading", "token"))
        lines.append(f"Reading a prompt: {reading}; each new token of its continuations: {token}")
    return lines


def _predicted(value: float | None, format_value: Callable[[float], str]) -> str:
    return "" if value is None else f" (predicted {format_value(value)})"
