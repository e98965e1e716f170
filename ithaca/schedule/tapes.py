"""The tapes of a model's pass: what a Plan keeps, where, how many bytes that is, and whether they are there.

`needs` is arithmetic. `Tapes` turns it into memory, once for a number of tokens: host tapes of all layers lie in one
slab, device tapes are tensors, and each kind of host tape has its few slots on the device. A forward pass that will be
followed by backward begins a `Pass`, and no other may begin while that one waits for its backward.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ithaca.errors import PlanError
from ithaca.model.precision import at_least_fp32
from ithaca.model.spec import Spec
from ithaca.schedule.plan import Plan
from ithaca.sizes import format_bytes, format_tokens
from ithaca.tape.budget import host_budget
from ithaca.tape.engine import Engine
from ithaca.tape.slab import Slab
from ithaca.tape.slots import Slots
from ithaca.tape.tape import DeviceTape, HostTape, Tape
from ithaca.tape.tiles import Tiles

WHOLE_TILE = 8192  # tokens that the schedule `whole` moves to and from the host at a time, when the Plan has no tile


@dataclass(frozen=True)
class Need:
    """Tapes of one kind."""

    name: str
    option: str  # the Plan's, that says where they live
    place: str
    count: int
    features: tuple[int, ...]
    dtype: torch.dtype
    slots: int  # tiles on the device at a time, when they live on the host
    kept: bool  # from the forward pass to the backward one

    def bytes_of(self, tokens: int) -> int:
        return self.count * tokens * self.row

    @property
    def row(self) -> int:
        """Bytes of one token in one tape."""
        numbers = 1
        for size in self.features:
            numbers *= size
        return numbers * self.dtype.itemsize


def needs(plan: Plan, spec: Spec, dtype: torch.dtype) -> list[Need]:
    """Every tape that a Plan asks for. The gradient's tape also takes what the last block puts out."""
    layers, hidden, high = spec.layers, (spec.hidden,), at_least_fp32(dtype)
    heads, keys = (spec.heads, spec.head_size), (spec.kv_heads, spec.head_size)

    def need(name: str, option: str, count: int, features: tuple[int, ...], kind: torch.dtype, slots: int) -> Need:
        kept = name not in ("gradient", "keys")
        return Need(name, option, getattr(plan, option), count, features, kind, slots, kept)

    if not plan.sweeps:
        return [need("x", "x", layers, hidden, dtype, 3)] if plan.x == "host" else []
    # Slots: a tile in use, one ahead, one on its way out; x is read by two (its chunk and the K/V of later ones) and,
    # in the forward pass, written for the next layer as well
    return [
        need("x", "x", layers, hidden, dtype, 4),
        need("o", "o", layers, heads, dtype, 2),
        need("lse", "lse", layers, (spec.heads,), high, 2),
        need("gradient", "gradient", 1, hidden, dtype, 4),
        need("keys", "kv", 2, keys, dtype, 8),
        need("key_sums", "kv", 2, keys, high, 6),
    ]


def tiles_of(plan: Plan, tokens: int, shorten: bool = False) -> Tiles:
    """How the tapes for so many tokens are cut."""
    return Tiles(tokens, plan.chunk_of(tokens, shorten) if plan.sweeps else min(plan.tile or WHOLE_TILE, tokens))


def host_bytes(asked: list[Need], tiles: Tiles, device: torch.device) -> int:
    """What the tapes take of this node's memory. On a CPU that is all of it."""
    hosted = sum(need.bytes_of(tiles.length) for need in asked if need.place == "host")
    return hosted if device.type == "cuda" else hosted + device_bytes(asked, tiles)


def device_bytes(asked: list[Need], tiles: Tiles) -> int:
    """What the tapes, and the slots of host tapes, take of the device."""
    return slot_bytes(asked, tiles) + sum(need.bytes_of(tiles.length) for need in asked if need.place == "device")


def slot_bytes(asked: list[Need], tiles: Tiles) -> int:
    rows = min(tiles.size, tiles.length)
    return sum(need.slots * rows * need.row for need in asked if need.place == "host")


def describe(asked: list[Need], tiles: Tiles) -> list[str]:
    """In two lines: how a rank's tokens are cut, and where what is kept of them lives."""
    places = {
        place: [f"{need.name.replace('_', ' ')} {format_bytes(need.bytes_of(tiles.length))}" for need in group]
        for place in ("device", "host")
        if (group := [need for need in asked if need.place == place])
    }
    kept = "; ".join(f"on the {place} {', '.join(parts)}" for place, parts in places.items())
    return [
        f"{tiles.length} tokens a rank and pass in {tiles.count} tiles of {format_tokens(tiles.size)}",
        f"tapes: {kept}",
    ]


def check_room(
    asked: list[Need], tiles: Tiles, plan: Plan, device: torch.device, node_bytes: int, node_ranks: int
) -> None:
    """Refuse what does not fit this device or, all its ranks together, this node, before anything is allocated."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        movable = [need for need in asked if need.place == "device"]
        _refuse_over(
            device_bytes(asked, tiles), slot_bytes(asked, tiles), free, "the GPU's free memory", movable, tiles, "host"
        )
    budget, reason = host_budget()
    if plan.host_memory is not None and plan.host_memory < budget:
        budget, reason = plan.host_memory, "plan.host_memory"
    movable = [need for need in asked if need.place == "host" and device.type == "cuda"]
    fixed = 0 if device.type == "cuda" else node_ranks * slot_bytes(asked, tiles)
    _refuse_over(node_bytes, fixed, budget, reason, movable, tiles, "device", node_ranks)


def _refuse_over(
    needed: int, fixed: int, free: int, reason: str, movable: list[Need], tiles: Tiles, elsewhere: str, ranks: int = 1
) -> None:
    """`fixed` of the bytes needed do not depend on the tokens."""
    if needed <= free:
        return
    text = f"tapes for {tiles.length} tokens need {format_bytes(needed)}"
    text += f" for the {ranks} ranks of this node" if ranks > 1 else ""
    text += f", and {reason} is {format_bytes(free)}: {format_bytes(needed - free)} are missing"
    fitting = tiles.length * (free - fixed) // (needed - fixed)
    ways = [f"{fitting} tokens would fit"] if fitting > 0 else ["a smaller plan.chunk or plan.tile may help"]
    if movable:
        largest = max(movable, key=lambda need: need.bytes_of(tiles.length))
        freed = format_bytes(ranks * largest.bytes_of(tiles.length))
        ways.insert(0, f"plan.{largest.option}={elsewhere} frees {freed}")
    raise PlanError(f"{text}; {', or '.join(ways)}")


class Tapes:
    """Memory for passes of one number of tokens."""

    def __init__(self, asked: list[Need], tiles: Tiles, engine: Engine, say: Callable[[str], None]):
        self.tiles, self._engine = tiles, engine
        hosted = [need for need in asked if need.place == "host"]
        sizes = [tiles.length * need.row for need in hosted for _ in range(need.count)]
        slab = Slab(sizes, engine.device, say)
        # Before the memory goes, by close or with the last reference: nothing may still copy from it or to it
        self._let_go = weakref.finalize(self, _let_go, engine, slab)
        self._let_go.atexit = False  # pyrefly: ignore
        parts = iter(slab.parts)
        self._slots: list[Slots] = []
        self._tapes: dict[str, list[Tape]] = {}
        for need in asked:
            shape = (tiles.length, *need.features)
            if need.place == "device":
                memory = [torch.empty(shape, dtype=need.dtype, device=engine.device) for _ in range(need.count)]
                self._tapes[need.name] = [DeviceTape(tape, tiles) for tape in memory]
            else:
                slots = Slots(engine, min(tiles.size, tiles.length), need.features, need.dtype, need.slots)
                memory = [next(parts).view(need.dtype).view(shape) for _ in range(need.count)]
                self._tapes[need.name] = [HostTape(tape, tiles, slots) for tape in memory]
                self._slots.append(slots)
        self._pass: weakref.ref[Pass] | None = None

    def begin(self, kept: bool) -> "Pass":
        """Begin a forward pass; `kept` when a backward one follows."""
        assert not self.busy
        self._mend()
        begun = Pass(self._tapes, kept)
        self._pass = weakref.ref(begun) if kept else None
        return begun

    @property
    def busy(self) -> bool:
        """Whether a pass waits for its backward."""
        before = self._pass() if self._pass else None
        return before is not None and before.waits

    def _mend(self) -> None:
        """Give back what a pass that broke off still holds."""
        for tape in (tape for tapes in self._tapes.values() for tape in tapes):
            tape.drop()
        if any(slots.held for slots in self._slots):
            self._engine.settle()
            for slots in self._slots:
                slots.reclaim()

    def close(self) -> None:
        self._let_go()
        self._tapes.clear()
        self._slots.clear()


def _let_go(engine: Engine, slab: Slab) -> None:
    engine.settle()
    slab.close()


class Pass:
    """One forward pass and the backward pass that follows it, if one does."""

    def __init__(self, tapes: dict[str, list[Tape]], kept: bool):
        self._tapes, self.kept = tapes, kept
        self.waits = kept  # for its backward pass to begin

    @property
    def gradient(self) -> Tape:
        return self._tapes["gradient"][0]

    def x(self, layer: int) -> Tape:
        """The input of a block, or what the last one puts out. Where nothing is kept, one tape is all of them."""
        return self._tapes["x"][layer] if self.kept and layer < len(self._tapes["x"]) else self.gradient

    def o(self, layer: int) -> Tape:
        return self._tapes["o"][layer]

    def lse(self, layer: int) -> Tape:
        return self._tapes["lse"][layer]

    @property
    def keys(self) -> list[Tape]:
        return self._tapes["keys"]

    @property
    def key_sums(self) -> list[Tape]:
        return self._tapes["key_sums"]
