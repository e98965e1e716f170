"""Whether the tapes of a Plan fit this device, this node and its disk; what does not is refused before anything is
allocated."""

from dataclasses import dataclass, replace

import torch

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_bytes
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Spec
from ithaca.plans.places import REBUILD, spell
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import TapeSpec, device_bytes, passing_bytes, slot_bytes, staging_bytes
from ithaca.schedule.sweep.rebuild import layers_to_keep
from ithaca.tape.budget import host_budget
from ithaca.tape.file import free_space


@dataclass(frozen=True)
class Node:
    """What tapes take of a node's memory and of its disk, and how many ranks they are of."""

    bytes: int
    ranks: int
    disk: int = 0


def check_memory(
    asked: list[TapeSpec], tiles: Tiles, sharing: int, plan: Plan, spec: Spec, device: torch.device, node: Node
) -> None:
    """Refuse what does not fit this device or, all its ranks together, this node or its disk, before anything is
    allocated.

    `sharing`: ranks that share a sequence, each of them with such tiles.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        ways = _elsewhere(asked, tiles, "device", "host", 1)
        weights = passing_bytes(plan, spec, asked)
        needed, fixed = device_bytes(asked, tiles) + weights, slot_bytes(asked, tiles) + weights
        _refuse_over(needed, fixed, free, "the GPU's free memory", ways, tiles.length * sharing)
    budget, reason = host_budget()
    if plan.host_memory is not None and plan.host_memory < budget:
        budget, reason = plan.host_memory, "plan.host_memory"
    fixed = node.ranks * staging_bytes(asked, tiles)
    fixed += 0 if device.type == "cuda" else node.ranks * slot_bytes(asked, tiles)
    ways = _fewer_x(asked, tiles, plan, spec, node.ranks)
    if device.type == "cuda":
        ways += _elsewhere(asked, tiles, "host", "device", node.ranks)
    ways += _to_disk(asked, tiles, node.ranks)
    _refuse_over(node.bytes, fixed, budget, reason, ways, tiles.length * sharing, node.ranks)
    if node.disk:
        assert plan.disk is not None
        ways = _elsewhere(asked, tiles, "disk", "host", node.ranks)
        reason = f"the free space of plan.disk='{plan.disk}'"
        _refuse_over(node.disk, 0, free_space(plan.disk), reason, ways, tiles.length * sharing, node.ranks)


def _refuse_over(needed: int, fixed: int, free: int, reason: str, ways: list[str], tokens: int, ranks: int = 1) -> None:
    """`fixed` of the bytes needed do not depend on the tokens of the sequence."""
    if needed <= free:
        return
    text = f"tapes for {tokens} tokens need {format_bytes(needed)}"
    text += f" for the {ranks} ranks of this node" if ranks > 1 else ""
    text += f", and {reason} is {format_bytes(free)}: {format_bytes(needed - free)} are missing"
    fitting = tokens * (free - fixed) // (needed - fixed)
    last = f"{fitting} tokens would fit" if fitting > 0 else "a smaller plan.chunk or plan.tile may help"
    raise PlanError(f"{text}; {', or '.join([*ways, last])}")


def _elsewhere(asked: list[TapeSpec], tiles: Tiles, place: str, other: str, ranks: int) -> list[str]:
    """What the option with most bytes in a place would free by another word."""
    options = {need.option: 0 for need in asked if need.place == place and need.layers}
    for need in (need for need in asked if need.place == place and need.layers):
        options[need.option] += ranks * need.bytes_of(tiles.length)
    if not options:
        return []
    largest = max(options, key=lambda option: options[option])
    return [f"plan.{largest}={other} frees {format_bytes(options[largest])}"]


def _to_disk(asked: list[TapeSpec], tiles: Tiles, ranks: int) -> list[str]:
    """What o, which goes to a disk more cheaply than x, would free of the host there."""
    hosted = [need for need in asked if need.name == "o" and need.place == "host"]
    freed = sum(need.bytes_of(tiles.length) for need in hosted)
    freed -= staging_bytes([replace(need, place="disk") for need in hosted], tiles)
    return [f"plan.o=disk with a folder in plan.disk frees {format_bytes(ranks * freed)}"] if freed > 0 else []


def _fewer_x(asked: list[TapeSpec], tiles: Tiles, plan: Plan, spec: Spec, ranks: int) -> list[str]:
    """What x of a few layers, from which the others can be rebuilt once each, would free of the host."""
    hosted = next((need for need in asked if need.name == "x"), None)
    if not plan.sweeps or (plan.x, plan.o) != ("host", "host") or hosted is None:
        return []
    enough = next(count for count in range(1, spec.layers + 1) if 2 ** (count + 1) - 2 >= spec.layers)
    kept = layers_to_keep(spec.layers, enough)
    if len(kept) == spec.layers:
        return []
    freed = format_bytes(ranks * (spec.layers - len(kept)) * tiles.length * hosted.row)
    return [f"plan.x='{spell(['host' if layer in kept else REBUILD for layer in range(spec.layers)])}' frees {freed}"]
