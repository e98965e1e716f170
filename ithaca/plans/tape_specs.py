"""What a Plan keeps outside of tensors: which tapes, how they are cut, how many bytes that is.

Arithmetic only; room.py says whether they fit, and schedule/tapes.py makes memory of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.layout import Layout, gathered, hops
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE
from ithaca.plans.plan import Plan
from ithaca.schedule.sweep.rebuild import LONGEST_PASSING, Rebuild, passing_layers, plan_rebuilds, rebuild_passes
from ithaca.tape.spec import STAGED, staged_bytes, stretch_bytes

FP32 = 4  # bytes
MOMENTS = 2  # of AdamW for each parameter
MOMENT_TILE = 8 * 2**20  # of their elements that pass through the device together, where they live on the host
MOMENT_SLOTS = 4  # of such tiles: one in use, one ahead, two on their way out
WHOLE_TILE = 8192  # tokens that the schedule `whole` moves to and from the host at a time, when the Plan has no tile


@dataclass(frozen=True)
class TapeSpec:
    """Tapes of one kind in one place."""

    name: str
    option: str  # the Plan's, that says where they live
    place: str
    layers: tuple[int, ...]  # that have one; for what layers share, a number for each tape
    features: tuple[int, ...]
    itemsize: int  # bytes of a number
    exact: bool  # numbers are of at least fp32, not of the computation's dtype
    slots: int  # tiles on the device at a time, when they do not live there; tapes of one name share them
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
        return math.prod(self.features) * self.itemsize


def tape_specs(
    plan: Plan, spec: Spec, itemsize: int, mine: Heads | None = None, ulysses: int = 1, ring: int = 1
) -> list[TapeSpec]:
    """Every tape that a Plan asks for, of a rank that attends with some heads; None: with all. The gradient's tape also
    takes what the last block puts out, and in the forward pass each x that is not kept.

    `itemsize`: bytes of a number of the computation.
    """
    placement, hidden, high = plan.placement(spec.layers), (spec.hidden,), max(itemsize, FP32)
    mine = mine or Heads.all(spec)
    heads, keys, lse = (spec.heads, spec.head_size), (len(mine.kv), spec.head_size), (len(mine.q),)

    def kept(name: str, words: tuple[str, ...], features: tuple[int, ...], slots: int) -> list[TapeSpec]:
        return [
            TapeSpec(name, name, place, layers_at(words, place), features, itemsize, False, slots, True)
            for place in KEPT
            if place in words
        ]

    if not plan.sweeps:
        return [need for need in kept("x", placement.x, hidden, 3) if need.place != "device"]
    assert plan.lse is not None
    assert plan.residual is not None
    assert plan.kv is not None
    # Slots: a tile in use, one ahead, one on its way out; x is read by two (its chunk and the K/V of later ones) and,
    # in the forward pass, written for the next layer as well; an x that only comes by is read through several o.
    # Where chunks are exchanged, another is under way for each time that one travels
    more = 2 * hops(ulysses, ring)
    rebuilds = rebuilds_of(plan, spec)
    comes_by = any(layer not in rebuild.homes for layer, rebuild in rebuilds.items())
    xs = kept("x", placement.x, hidden, 4 + more)
    if not {"host", "disk"} & {*placement.x} and any(
        kind == "o" and placement.o[layer] != "device"
        for rebuild in rebuilds.values()
        for kind, layer in rebuild.homes.values()
    ):
        xs.append(TapeSpec("x", "x", "host", (), hidden, itemsize, False, 4 + more, True))
    with_o = tuple(layer for layer, word in enumerate(placement.o) if word != RECOMPUTE)
    return [
        *xs,
        *kept("o", placement.o, heads, (4 if comes_by else 2) + more),
        *([TapeSpec("lse", "lse", plan.lse, with_o, lse, high, True, 2 + more, True, ulysses)] if with_o else []),
        TapeSpec("residual", "residual", plan.residual, (0,), hidden, itemsize, False, 4 + more, False),
        TapeSpec("kv", "kv", plan.kv, (0, 1), keys, itemsize, False, 8, False, ulysses),
        TapeSpec("kv_gradients", "kv", plan.kv, (0, 1), keys, high, True, 6, True, ulysses),
    ]


def layers_at(words: tuple[str, ...], place: str) -> tuple[int, ...]:
    return tuple(layer for layer, word in enumerate(words) if word == place)


def rebuilds_of(plan: Plan, spec: Spec) -> Mapping[int, Rebuild]:
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


def host_bytes(asked: list[TapeSpec], tiles: Tiles, gpu: bool) -> int:
    """What the tapes, and the staging of disk tapes, take of this node's memory. Without a GPU that is all of it."""
    hosted = sum(need.bytes_of(tiles.length) for need in asked if need.place == "host") + staging_bytes(asked, tiles)
    return hosted if gpu else hosted + device_bytes(asked, tiles)


def disk_bytes(asked: list[TapeSpec], tiles: Tiles) -> int:
    """What the tapes take of the disk."""
    return sum(len(need.layers) * stretch_bytes(need.tiles(tiles), need.row) for need in asked if need.place == "disk")


def staging_bytes(asked: list[TapeSpec], tiles: Tiles) -> int:
    """Host memory that tiles pass through on their way to the disk and back."""
    return STAGED * max(
        (staged_bytes(need.tiles(tiles), need.row) for need in asked if need.place == "disk"), default=0
    )


def device_bytes(asked: list[TapeSpec], tiles: Tiles) -> int:
    """What the tapes, and the slots of those elsewhere, take of the device."""
    return slot_bytes(asked, tiles) + sum(need.bytes_of(tiles.length) for need in asked if need.place == "device")


def slot_bytes(asked: list[TapeSpec], tiles: Tiles) -> int:
    rows = min(tiles.size, tiles.length)
    slots = {need.name: need.slots * rows * need.ranks * need.row for need in asked if need.place != "device"}
    return sum(slots.values())


def moment_slot_bytes(largest: int) -> int:
    """What AdamW's moments on the host take of the device; `largest`: elements of the rank's largest shard."""
    return MOMENTS * MOMENT_SLOTS * min(MOMENT_TILE, largest) * FP32


def passing_bytes(plan: Plan, spec: Spec, asked: list[TapeSpec]) -> int:
    """Weights of other layers that are gathered at once, while an x is made in passing; x has their dtype."""
    itemsize = next((need.itemsize for need in asked if need.name == "x"), 0)
    block = sum(math.prod(shape) for shape in spec.block_shapes().values())
    return passing_layers(rebuilds_of(plan, spec)) * block * itemsize


def describe(asked: list[TapeSpec], tiles: Tiles, plan: Plan, spec: Spec) -> list[str]:
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


def _described(need: TapeSpec, tiles: Tiles, spec: Spec) -> str:
    some = need.name in ("x", "o", "lse") and len(need.layers) < spec.layers
    layers = f" of {len(need.layers)} layer{'s' * (len(need.layers) > 1)}" if some else ""
    return f"{need.name.replace('_', ' ')}{layers} {format_bytes(need.bytes_of(tiles.length))}"
