"""Checks, before anything is allocated, that the tapes of a job fit the device, the node and its disk; and describes
the tapes in words."""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_bytes, format_count, format_tokens
from ithaca.base.tiles import Tiles
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, spell
from ithaca.schedule.job import Job
from ithaca.schedule.sweep.rebuild import LONGEST_PASSING, layers_to_keep, passing_layers, rebuild_passes, rebuilds_of
from ithaca.tape.budget import host_budget
from ithaca.tape.devices import by_file_system, count_devices, is_memory
from ithaca.tape.file import free_space, shares
from ithaca.tape.spec import TapeSpec, device_bytes, disk_bytes, host_bytes, slot_bytes, staging_bytes

NodeRanks = list[tuple[int, list[TapeSpec]]]  # the ranks of a node: how many have these tapes, which heads decide


@dataclass(frozen=True)
class NodeTapes:
    """Bytes that the tapes of all ranks on a node take in its memory and on its disk."""

    bytes: int
    ranks: int
    disk: tuple[int, ...] = ()  # in each folder


def check_memory(job: Job, tapes: Sequence[TapeSpec], device: torch.device, node: NodeTapes) -> None:
    """Raise an error if tapes do not fit this device or, all ranks together, this node or its disk."""
    tiles, gpu = job.tiles, device.type == "cuda"
    ranks = _node_ranks(job, tapes, node.ranks)
    if gpu:
        free = free_device_memory(device)
        # A pass without gradients has no tape of x and rebuilds none
        weights = job.costs.passing_bytes(job) if any(tape.training for tape in tapes) else 0
        needed, fixed = device_bytes(tapes, tiles) + weights, slot_bytes(tapes, tiles) + weights
        advice = _advise_moving(job, [(1, [*tapes])], "device", "host")
        _refuse_over(
            job, needed, fixed, free, "the GPU's free memory", advice, lambda cut: device_bytes(tapes, cut) + weights
        )
    budget, reason = _host_budget(job)
    fixed = sum(
        times * (staging_bytes(theirs, tiles) + (0 if gpu else slot_bytes(theirs, tiles))) for times, theirs in ranks
    )
    advice = _advise_fewer_x(job, tapes, node.ranks)
    advice += _advise_moving(job, ranks, "host", "device") if gpu else []
    advice += _advise_disk(job, tapes, node.ranks)

    def hosted(cut: Tiles) -> int:
        return sum(times * host_bytes(theirs, cut, gpu) for times, theirs in ranks)

    _refuse_over(job, node.bytes, fixed, budget, reason, advice, hosted, node.ranks)
    if any(node.disk):
        _check_disks(job, ranks, node)


def check_cache(job: Job, tapes: Sequence[TapeSpec], device: torch.device, node: NodeTapes) -> None:
    """Raise an error if the tapes for prompts (decode_cost.py) do not fit this device or this node's memory."""
    budget, reason = _host_budget(job)
    places = [(node.bytes, budget, reason, f" for the {node.ranks} ranks of this node" if node.ranks > 1 else "")]
    if device.type == "cuda":
        places.append((device_bytes(tapes, job.tiles), free_device_memory(device), "the GPU's free memory", ""))
    for needed, free, reason, of in places:
        if needed > free:
            tokens = job.layout.padded
            raise PlanError(
                f"K and V of all layers for prompts of {tokens} tokens need {format_bytes(needed)}{of}, and {reason} "
                f"is {format_bytes(free)}: {tokens * free // needed} tokens would fit, or more ranks that share a "
                "sequence"
            )


def free_device_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process can still take, those that its allocator holds unused included."""
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _node_ranks(job: Job, tapes: Sequence[TapeSpec], ranks: int) -> NodeRanks:
    """The tapes of all ranks of this node, of which this is one. Ulysses ranks of a sequence follow each other."""
    heads, training = job.axes.by_heads, any(tape.training for tape in tapes)
    first = job.head_rank // ranks * ranks if ranks < heads else 0
    counts = Counter((first + number) % heads for number in range(ranks))
    every = ((times, replace(job, rank=rank).tapes) for rank, times in counts.items())
    return [(times, [tape for tape in theirs if training or not tape.training]) for times, theirs in every]


def _host_budget(job: Job) -> tuple[int, str]:
    """Bytes of this node's memory that tapes may take, and the reason."""
    budget, reason = host_budget()
    if job.plan.host_memory is not None and job.plan.host_memory < budget:
        return job.plan.host_memory, "plan.host_memory"
    return budget, reason


def _check_disks(job: Job, ranks: NodeRanks, node: NodeTapes) -> None:
    """Raise an error if a folder cannot be used or its file system is too full. Folders may share a file system."""
    folders, advice = job.plan.folders, _advise_moving(job, ranks, "disk", "host")
    free = [free_space(folder) for folder in folders]
    for one, other in combinations(folders, 2):
        if os.path.samefile(one, other):
            raise PlanError(
                f"plan.disk='{job.plan.disk}' names one folder as '{one}' and '{other}': name it once, or a folder on "
                "another disk"
            )
    for numbers in by_file_system(folders):
        named = ", ".join(folders[number] for number in numbers)
        together = " (one file system)" if len(numbers) > 1 else ""
        reason, needed = f"the free space of plan.disk='{named}'{together}", sum(node.disk[n] for n in numbers)
        there = f" in '{named}'" if len(numbers) < len(folders) else ""

        def stored(cut: Tiles, numbers: Sequence[int] = numbers) -> int:
            parts = [(times, shares(disk_bytes(theirs, cut), len(folders))) for times, theirs in ranks]
            return sum(times * part[number] for times, part in parts for number in numbers)

        _refuse_over(job, needed, 0, free[numbers[0]], reason, advice, stored, node.ranks, there)


def _refuse_over(
    job: Job,
    needed: int,
    fixed: int,
    free: int,
    reason: str,
    advice: list[str],
    size: Callable[[Tiles], int],
    ranks: int = 1,
    there: str = "",
) -> None:
    """Raise an error if more is needed than free.

    `fixed` bytes do not depend on the length of the sequence. `size`: what is needed for tokens that are cut so.
    """
    if needed <= free:
        return
    text = f"tapes for {job.layout.padded} tokens need {format_bytes(needed)}{there}"
    text += f" for the {ranks} ranks of this node" if ranks > 1 else ""
    text += f", and {reason} is {format_bytes(free)}: {format_bytes(needed - free)} are missing"
    raise PlanError(f"{text}; {', or '.join([*advice, _advise_length(job, size, free, fixed)])}")


def _advise_length(job: Job, size: Callable[[Tiles], int], free: int, fixed: int) -> str:
    """The most tokens that fit, in words; smaller pieces of the sequence if what they take has no room by itself."""

    def too_many(tokens: int) -> bool:
        return size(replace(job, tokens=tokens).tiles) > free

    fitting = bisect_left(range(1, job.tokens), True, key=too_many) if fixed < free else 0
    cut = next((name for name in ("chunk", "chunks") if (getattr(job.plan, name) or 0) > fitting), None)
    if fitting:
        return f"{fitting} tokens would fit" + (f" with plan.{cut}={fitting}" if cut else "")
    smaller = "a larger plan.chunks" if job.plan.chunks is not None else "a smaller plan.chunk or plan.tile"
    return f"{smaller} may help"


def _advise_moving(job: Job, ranks: NodeRanks, place: str, other: str) -> list[str]:
    """What moving the largest tapes of a place to the other place would free of these ranks, in words."""
    options: Counter[str] = Counter()
    for times, tapes in ranks:
        for tape in (tape for tape in tapes if tape.place == place and tape.layers):
            options[tape.option] += times * tape.bytes_of(job.tiles.length)
    if not options:
        return []
    largest = max(options, key=lambda option: options[option])
    return [f"plan.{largest}={other} frees {format_bytes(options[largest])}"]


def _advise_disk(job: Job, tapes: Sequence[TapeSpec], ranks: int) -> list[str]:
    """What moving o to the disk would free of the host, in words. o goes there more cheaply than x."""
    hosted = [tape for tape in tapes if tape.name == "o" and tape.place == "host"]
    freed = sum(tape.bytes_of(job.tiles.length) for tape in hosted)
    freed -= staging_bytes([replace(tape, place="disk") for tape in hosted], job.tiles)
    return [f"plan.o=disk with a folder in plan.disk frees {format_bytes(ranks * freed)}"] if freed > 0 else []


def _advise_fewer_x(job: Job, tapes: Sequence[TapeSpec], ranks: int) -> list[str]:
    """What saving x of fewer layers would free of the host, in words. Each other x can be rebuilt, once, from these."""
    hosted = next((tape for tape in tapes if tape.name == "x"), None)
    plan, layers = job.plan, job.spec.layers
    if not plan.sweeps or (plan.x, plan.o) != ("host", "host") or hosted is None:
        return []
    enough = next(count for count in range(layers) if 2 ** (count + 2) - 2 >= layers)
    saved = layers_to_keep(layers, enough)
    freed = format_bytes(ranks * (layers - len(saved)) * job.tiles.length * hosted.row)
    return [f"plan.x='{spell(['host' if layer in saved else REBUILD for layer in range(layers)])}' frees {freed}"]


def describe_tapes(job: Job) -> list[str]:
    """How a rank's tokens are cut, where saved tensors live, and what is recomputed: a few lines."""
    tiles, spec = job.tiles, job.spec
    places = {
        place: ", ".join(_described(tape, job) for tape in group)
        for place in KEPT
        if (group := [tape for tape in job.tapes if tape.place == place and tape.layers])
    }
    where = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
    lines = [
        f"Each pass: {tiles.length} tokens a rank in {format_count(tiles.count, 'tile')} "
        f"of {format_tokens(tiles.size)}",
        "Saved activations: " + "; ".join(f"{where[place]} {names}" for place, names in places.items()),
        *_about_folders(job.plan.folders),
    ]
    if not job.plan.sweeps:
        return lines
    placement, rounds = job.plan.placement(spec.layers), len(job.rounds)
    if rounds > 1:
        heads = max(len(split.kv[job.head_rank]) for (split,) in job.rounds)
        lines.append(
            f"Each block runs over its tiles {rounds} times: K and V of {heads} of {len(job.heads.kv)} key/value heads "
            "at a time"
        )
    if placement.x[0] == REBUILD:
        lines.append("Backward recomputes x of layer 0 from the embedding")
    if missing := placement.x[1:].count(REBUILD):
        passes = rebuild_passes(placement, spec, rounds)
        lines.append(
            f"Backward recomputes x of {format_count(missing, 'layer')} from attention outputs: "
            f"{format_count(passes, 'pass')} of output projection and MLP"
        )
        if (together := passing_layers(rebuilds_of(job.plan, spec))) > LONGEST_PASSING:
            weights = format_bytes(job.costs.passing_bytes(job))
            lines.append(
                f"For that it gathers up to {together} layers at once, {weights}: saving an x within the last "
                f"{LONGEST_PASSING} layers avoids that"
            )
    if missing := placement.o.count(RECOMPUTE):
        lines.append(f"Backward recomputes the attention of {missing} of {spec.layers} layers")
    return lines


def _about_folders(folders: tuple[str, ...]) -> list[str]:
    """How tapes are striped over several folders, and which folders are memory."""
    lines = []
    if len(folders) > 1:
        devices = count_devices(folders)
        fewer = f" on {format_count(devices, 'device')}: no faster than that many" if devices < len(folders) else ""
        lines.append(f"Tapes on disk are striped over {len(folders)} folders, {', '.join(folders)}{fewer}")
    lines += [
        f"plan.disk='{folder}' is memory (tmpfs): tapes there take host memory; name a folder on a disk"
        for folder in folders
        if is_memory(folder)
    ]
    return lines


def _described(tape: TapeSpec, job: Job) -> str:
    some = tape.name in ("x", "o", "lse") and len(tape.layers) < job.spec.layers
    layers = f" of {format_count(len(tape.layers), 'layer')}" if some else ""
    return f"{tape.name.replace('_', ' ')}{layers} {format_bytes(tape.bytes_of(job.tiles.length))}"
