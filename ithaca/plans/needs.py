"""What a Plan keeps outside of tensors: which tapes, how they are cut, how many bytes that is, and whether they fit.

Arithmetic only; tapes.py makes memory of it.
"""

import math
from dataclasses import dataclass

import torch

from ithaca.errors import PlanError
from ithaca.model.block import Heads
from ithaca.model.precision import at_least_fp32
from ithaca.model.spec import Spec
from ithaca.parallel.layout import Layout, gathered, hops
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE, spell
from ithaca.plans.plan import Plan
from ithaca.plans.rebuild import (
    LONGEST_PASSING,
    Rebuild,
    layers_to_keep,
    passing_layers,
    plan_rebuilds,
    rebuild_passes,
)
from ithaca.sizes import format_bytes, format_tokens
from ithaca.tape.budget import host_budget
from ithaca.tape.tiles import Tiles

WHOLE_TILE = 8192  # tokens that the schedule `whole` moves to and from the host at a time, when the Plan has no tile


@dataclass(frozen=True)
class Need:
    """Tapes of one kind in one place."""

    name: str
    option: str  # the Plan's, that says where they live
    place: str
    layers: tuple[int, ...]  # that have one; for what layers share, a number for each tape
    features: tuple[int, ...]
    dtype: torch.dtype
    slots: int  # tiles on the device at a time, when they live on the host
    training: bool  # there is no use for them without a backward pass
    ranks: int = 1  # whose tokens it holds: its own alone, or, of some heads, those of all Ulysses ranks

    def tiles(self, local: Tiles) -> Tiles:
        """How it is cut, when a rank's tokens are cut so."""
        return gathered(local, self.ranks)

    def bytes_of(self, tokens: int) -> int:
        """For so many tokens of each rank."""
        return len(self.layers) * tokens * self.ranks * self.row

    @property
    def row(self) -> int:
        """Bytes of one token in one tape."""
        return math.prod(self.features) * self.dtype.itemsize


def needs(
    plan: Plan, spec: Spec, dtype: torch.dtype, mine: Heads | None = None, ulysses: int = 1, ring: int = 1
) -> list[Need]:
    """Every tape that a Plan asks for, of a rank that attends with some heads; None: with all. The gradient's tape also
    takes what the last block puts out, and in the forward pass each x that is not kept."""
    placement, hidden, high = plan.placement(spec.layers), (spec.hidden,), at_least_fp32(dtype)
    mine = mine or Heads.all(spec)
    heads, keys = (spec.heads, spec.head_size), (len(mine.kv), spec.head_size)

    def kept(name: str, words: tuple[str, ...], features: tuple[int, ...], slots: int) -> list[Need]:
        return [
            Need(name, name, place, layers_at(words, place), features, dtype, slots, True)
            for place in KEPT
            if layers_at(words, place)
        ]

    if not plan.sweeps:
        return [need for need in kept("x", placement.x, hidden, 3) if need.place == "host"]
    assert plan.lse is not None
    assert plan.gradient is not None
    assert plan.kv is not None
    # Slots: a tile in use, one ahead, one on its way out; x is read by two (its chunk and the K/V of later ones) and,
    # in the forward pass, written for the next layer as well; an x that only comes by is read through several o.
    # Where chunks are exchanged, another is under way for each time that one travels
    more = 2 * hops(ulysses, ring)
    rebuilds = rebuilds_of(plan, spec)
    comes_by = any(layer not in rebuild.homes for layer, rebuild in rebuilds.items())
    xs = kept("x", placement.x, hidden, 4 + more)
    if "host" not in placement.x and any(
        kind == "o" and placement.o[layer] == "host"
        for rebuild in rebuilds.values()
        for kind, layer in rebuild.homes.values()
    ):
        xs.append(Need("x", "x", "host", (), hidden, dtype, 4 + more, True))
    with_o = tuple(layer for layer, word in enumerate(placement.o) if word != RECOMPUTE)
    return [
        *xs,
        *kept("o", placement.o, heads, (4 if comes_by else 2) + more),
        *([Need("lse", "lse", plan.lse, with_o, (len(mine.q),), high, 2 + more, True, ulysses)] if with_o else []),
        Need("gradient", "gradient", plan.gradient, (0,), hidden, dtype, 4 + more, False),
        Need("keys", "kv", plan.kv, (0, 1), keys, dtype, 8, False, ulysses),
        Need("key_sums", "kv", plan.kv, (0, 1), keys, high, 6, True, ulysses),
    ]


def layers_at(words: tuple[str, ...], place: str) -> tuple[int, ...]:
    return tuple(layer for layer, word in enumerate(words) if word == place)


def rebuilds_of(plan: Plan, spec: Spec) -> dict[int, Rebuild]:
    """What a backward pass makes again, by layer."""
    return plan_rebuilds(plan.placement(spec.layers), has_room_for_x(spec)) if plan.sweeps else {}


def has_room_for_x(spec: Spec) -> bool:
    """Whether a tape of an o can hold an x."""
    return spec.heads * spec.head_size >= spec.hidden


def layout_of(plan: Plan, tokens: int, ulysses: int, ring: int = 1, shorten: bool = False) -> Layout:
    """Who holds which of so many tokens, that context ranks share."""
    return Layout(tokens, plan.chunk_of(tokens, shorten) if plan.sweeps else tokens, ulysses, ring)


def tiles_of(plan: Plan, layout: Layout) -> Tiles:
    """How a rank's tapes are cut."""
    if plan.sweeps:
        return layout.tiles
    return Tiles(layout.local, min(plan.tile or WHOLE_TILE, layout.local))


def host_bytes(asked: list[Need], tiles: Tiles, device: torch.device) -> int:
    """What the tapes take of this node's memory. On a CPU that is all of it."""
    hosted = sum(need.bytes_of(tiles.length) for need in asked if need.place == "host")
    return hosted if device.type == "cuda" else hosted + device_bytes(asked, tiles)


def device_bytes(asked: list[Need], tiles: Tiles) -> int:
    """What the tapes, and the slots of host tapes, take of the device."""
    return slot_bytes(asked, tiles) + sum(need.bytes_of(tiles.length) for need in asked if need.place == "device")


def slot_bytes(asked: list[Need], tiles: Tiles) -> int:
    rows = min(tiles.size, tiles.length)
    return sum(need.slots * rows * need.ranks * need.row for need in asked if need.place == "host")


def passing_bytes(plan: Plan, spec: Spec, asked: list[Need]) -> int:
    """Weights of other layers that are gathered at once, while an x is made in passing; x has their dtype."""
    itemsize = next((need.dtype.itemsize for need in asked if need.name == "x"), 0)
    block = sum(math.prod(shape) for shape in spec.block_shapes().values())
    return passing_layers(rebuilds_of(plan, spec)) * block * itemsize


def describe(asked: list[Need], tiles: Tiles, plan: Plan, spec: Spec) -> list[str]:
    """In a few lines: how a rank's tokens are cut, where what is kept of them lives, what is made again."""
    places = {
        place: [_described(need, tiles, spec) for need in group]
        for place in KEPT
        if (group := [need for need in asked if need.place == place and need.layers])
    }
    kept = "; ".join(f"on the {place} {', '.join(parts)}" for place, parts in places.items())
    lines = [
        f"{tiles.length} tokens a rank and pass in {tiles.count} tiles of {format_tokens(tiles.size)}",
        f"tapes: {kept}",
    ]
    if not plan.sweeps:
        return lines
    placement = plan.placement(spec.layers)
    if missing := placement.x.count(REBUILD):
        passes = rebuild_passes(placement, has_room_for_x(spec))
        lines.append(f"backward rebuilds x of {missing} layers from o, in {passes} passes through mix and feed")
        if (together := passing_layers(rebuilds_of(plan, spec))) > LONGEST_PASSING:
            weights = format_bytes(passing_bytes(plan, spec, asked))
            lines.append(
                f"for that it gathers up to {together} layers at once, {weights}: "
                f"an x within the last {LONGEST_PASSING} layers avoids that"
            )
    if missing := placement.o.count(RECOMPUTE):
        lines.append(f"backward runs the attention of {missing} of {spec.layers} layers again")
    return lines


def _described(need: Need, tiles: Tiles, spec: Spec) -> str:
    some = need.name in ("x", "o", "lse") and len(need.layers) < spec.layers
    layers = f" of {len(need.layers)} layer{'s' * (len(need.layers) > 1)}" if some else ""
    return f"{need.name.replace('_', ' ')}{layers} {format_bytes(need.bytes_of(tiles.length))}"


@dataclass(frozen=True)
class Node:
    """What tapes take of a node's memory, and how many ranks they are of."""

    bytes: int
    ranks: int


def check_room(
    asked: list[Need], tiles: Tiles, sharing: int, plan: Plan, spec: Spec, device: torch.device, node: Node
) -> None:
    """Refuse what does not fit this device or, all its ranks together, this node, before anything is allocated.

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
    fixed = 0 if device.type == "cuda" else node.ranks * slot_bytes(asked, tiles)
    ways = _fewer_x(asked, tiles, plan, spec, node.ranks)
    if device.type == "cuda":
        ways += _elsewhere(asked, tiles, "host", "device", node.ranks)
    _refuse_over(node.bytes, fixed, budget, reason, ways, tiles.length * sharing, node.ranks)


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


def _elsewhere(asked: list[Need], tiles: Tiles, place: str, other: str, ranks: int) -> list[str]:
    """What the option with most bytes in a place would free by another word."""
    options = {need.option: 0 for need in asked if need.place == place and need.layers}
    for need in (need for need in asked if need.place == place and need.layers):
        options[need.option] += ranks * need.bytes_of(tiles.length)
    if not options:
        return []
    largest = max(options, key=lambda option: options[option])
    return [f"plan.{largest}={other} frees {format_bytes(options[largest])}"]


def _fewer_x(asked: list[Need], tiles: Tiles, plan: Plan, spec: Spec, ranks: int) -> list[str]:
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
