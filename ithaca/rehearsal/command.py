"""What `ithaca rehearse` does: a scene from its options, and what was seen as lines or as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError, PlanError, RunError
from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.config import read_config
from ithaca.model.config_json import find_config
from ithaca.model.spec import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Machine, parse_gpus, read_gpus
from ithaca.planner.meshes import choose
from ithaca.plans.plan import Plan

NODE_GPUS, USUAL = 8, "H100-80GB"  # the nodes that a mesh is chosen for


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
) -> None:
    """`ithaca rehearse MODEL --ranks P --tokens S`."""
    config = read_config(None, [f"plan.recipe={recipe}", *sets])
    wrong = [word for word in sets if not word.startswith(("plan.", "mesh."))]
    if wrong:
        raise ConfigError(f"--set {wrong[0]} has no part in a rehearsal: options of plan and mesh have")
    if config.plan is None:
        raise ConfigError("--recipe auto cannot be rehearsed: ithaca plan chooses a recipe, which can")
    axes = _axes(model, ranks, tokens, config.plan, dict(vars(config.mesh)), any(w.startswith("mesh.") for w in sets))
    if bare and memory_only:
        raise ConfigError("--bare times kernels, which --memory-only leaves out: give one of them")
    read_gpus(hardware)  # whose mistakes are better told before a step than after it
    from ithaca.rehearsal.rehearse import Scene, rehearse  # only now: torch takes its time

    scene = Scene(
        model=model,
        plan=config.plan,
        tokens=tokens,
        layers=layers,
        cap=cap,
        memory_only=memory_only,
        bare=bare,
        hardware=hardware,
        axes=axes,
    )
    found = rehearse(scene)
    if not found["fits"]:
        if as_json:
            print(json.dumps(found, indent=2))
        raise RunError(
            f"{format_tokens(tokens)} tokens do not fit ({found['why']}): predicted were "
            f"{format_bytes(found['peak_bytes_predicted'])}"
        )
    print(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _axes(model: str, ranks: int, tokens: int, plan: Plan, given: dict[str, Any], chosen: bool) -> Axes:
    """The axes of so many ranks: as given, or all ranks on one sequence, on the best mesh."""
    if ranks < 1:
        raise PlanError(f"--ranks {ranks} cannot be rehearsed: 1 or more can")
    for name, size in given.items():
        if size is not None and size < 1:
            raise PlanError(f"mesh.{name}={size} is not a number of ranks: 1 or more is")
    if not chosen and not plan.shares:
        return Axes(shard=ranks)
    if not chosen:
        spec = read_spec(find_config(model)[0])
        gpus = next(count for count in range(min(ranks, NODE_GPUS), 0, -1) if ranks % count == 0)
        gpu = parse_gpus(USUAL, read_gpus())[1]
        return choose(spec, plan, gpu, Machine(nodes=ranks // gpus, gpus=gpus), tokens)[0].axes
    sharing = given["ring"] * given["ulysses"]
    shard = given["shard"] or max(ranks // sharing, 1)
    if given["replicate"] != 1 or shard * sharing != ranks:
        raise PlanError(
            f"replicate {given['replicate']} × shard {shard} × ring {given['ring']} × ulysses {given['ulysses']} is "
            f"{given['replicate'] * shard * sharing}, but --ranks is {ranks}: shard, ring and ulysses must make it"
        )
    return Axes(shard=shard, ring=given["ring"], ulysses=given["ulysses"])


def _lines(found: dict[str, Any]) -> list[str]:
    mesh = " × ".join(f"{name} {size}" for name, size in found["mesh"].items() if size > 1) or "alone"
    lines = [
        f"{found['model']}, {format_tokens(found['tokens'])} tokens, recipe '{found['recipe']}', rank 0 of "
        f"{found['ranks']} ({mesh}), {found['layers']} of {found['model_layers']} layers, on this {found['device']}",
        f"memory at its peak: {format_bytes(found['peak_bytes'])}"
        + _against(found["peak_bytes_predicted"], format_bytes),
    ]
    width = max(map(len, found["memory"]))
    lines += [f"  {owner:{width}}  {format_bytes(size)}" for owner, size in found["memory"].items()]
    lines.append(f"on the host: {format_bytes(found['host_bytes'])} of tapes for this rank, all layers")
    if found["disk_bytes"]:
        lines.append(f"on the disk: {format_bytes(found['disk_bytes'])}, all layers")
    if "seconds" in found:
        parts = ", ".join(
            f"{part} {format_seconds(found[f'{part}_seconds'])}" for part in ("forward", "backward", "optimizer")
        )
        lines.append(
            f"a step of these layers: {format_seconds(found['seconds'])} ({parts}; attention "
            f"{format_seconds(found['attention_seconds'])}), messages looped back"
            + _against(found["seconds_predicted"], format_seconds)
        )
    if "over_bare" in found:
        lines.append(
            f"its kernels and products alone: {format_seconds(found['bare_seconds'])}; forward and backward take "
            f"{found['over_bare']:.3f} times that"
        )
    return lines


def _against(predicted: float | None, spell: Callable[[float], str]) -> str:
    return "" if predicted is None else f" (predicted {spell(predicted)})"
