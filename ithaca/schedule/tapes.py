"""The tapes of a model's pass, as memory for the needs of a Plan (needs.py).

`Tapes` takes the memory once for a number of tokens: host tapes of all layers lie in one slab, disk tapes in one file,
device tapes are tensors, and each kind of tape elsewhere has its few slots on the device. A forward pass that will be
followed by backward begins a `Pass`, and no other may begin while that one waits for its backward.
"""

import gc
import weakref
from collections.abc import Callable, Mapping

import torch

from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.schedule.sweep.rebuild import Home, Rebuild
from ithaca.tape.disk import Disk, DiskTape
from ithaca.tape.engine import Engine
from ithaca.tape.file import TapeFile
from ithaca.tape.slab import Slab
from ithaca.tape.spec import STAGED, Stretch, TapeSpec, disk_bytes, staging_bytes, stretch_bytes, whole_blocks
from ithaca.tape.tape import DeviceTape, HostTape, Slots, StandIn, Tape


class Tapes:
    """Memory for passes of one number of tokens."""

    def __init__(
        self,
        asked: list[TapeSpec],
        rebuilds: Mapping[int, Rebuild],
        tiles: Tiles,
        dtype: torch.dtype,
        engine: Engine,
        say: Callable[[str], None],
        held: int | None = None,
        folder: str | None = None,
    ):
        """`held`: tiles of each host or disk tape that are in memory and stand for all of them; None: all are there.
        `folder`: where the disk's file is made."""
        self.tiles, self._engine, self._rebuilds = tiles, engine, rebuilds
        self._host_tape = StandIn if held else HostTape
        in_slab = ("host", "disk") if held else ("host",)
        hosted = [need for need in asked if need.place in in_slab]
        sizes = [_host_rows(need.tiles(tiles), held) * need.row for need in hosted for _ in need.layers]
        on_disk = 0 if held else disk_bytes(asked, tiles)
        # Before the slab, which takes its time: a full disk tells at once
        file = _open(folder, on_disk, say) if on_disk else None
        staging = STAGED * [staging_bytes(asked, tiles) // STAGED] if file else []
        slab = Slab(sizes + staging, engine.device, say)
        self._let_go = slab.belong_to(self, engine)
        self._disk = Disk(file, slab.parts[len(sizes) :], engine) if file else None
        parts, start = iter(slab.parts), 0
        self._slots: dict[str, Slots] = {}
        self._tapes: dict[str, dict[int, Tape]] = {}
        for need in asked:
            cut, tapes = need.tiles(tiles), self._tapes.setdefault(need.name, {})
            kind = at_least_fp32(dtype) if need.exact else dtype
            assert kind.itemsize == need.itemsize
            if need.place == "device":
                for layer in need.layers:
                    memory = torch.empty(cut.length, *need.features, dtype=kind, device=engine.device)
                    tapes[layer] = DeviceTape(memory, cut)
                continue
            if need.name not in self._slots:
                self._slots[need.name] = Slots(engine, min(cut.size, cut.length), need.features, kind, need.slots)
            slots = self._slots[need.name]
            for layer in need.layers:
                if need.place in in_slab:
                    shape = _host_rows(cut, held), *need.features
                    tapes[layer] = self._host_tape(next(parts).view(kind).view(shape), cut, slots)
                else:
                    assert self._disk is not None
                    stretch = Stretch(start, whole_blocks(cut.size * need.row))
                    tapes[layer] = DiskTape(self._disk, stretch, cut, slots)
                    start += stretch_bytes(cut, need.row)
        features = next((need.features for need in asked if need.name == "x"), ())
        self._homes = {
            home: self._x_at(home, features) for rebuild in rebuilds.values() for home in rebuild.homes.values()
        }
        self._pass: weakref.ref[Pass] | None = None

    def _x_at(self, home: Home, features: tuple[int, ...]) -> Tape:
        """A tape for an x in the memory of another."""
        kind, layer = home
        tape = self._tapes[kind][layer]
        if kind == "x":
            return tape
        if isinstance(tape, DeviceTape):
            return DeviceTape(tape.memory, self.tiles, features)
        if isinstance(tape, DiskTape):
            return DiskTape(tape.disk, tape.stretch, self.tiles, self._slots["x"])
        assert isinstance(tape, HostTape)
        return self._host_tape(tape.memory, self.tiles, self._slots["x"], features)

    def begin(self, kept: bool) -> "Pass":
        """Begin a forward pass; `kept` when a backward one follows."""
        assert not self.busy
        self._mend()
        begun = Pass(self._tapes, self._rebuilds, self._homes, kept)
        self._pass = weakref.ref(begun) if kept else None
        return begun

    @property
    def busy(self) -> bool:
        """Whether a pass waits for its backward."""
        if self._waiting() is not None:
            gc.collect()  # a loss that was dropped may be held by its own graph until Python looks for cycles
        return self._waiting() is not None

    def _waiting(self) -> "Pass | None":
        before = self._pass() if self._pass else None
        return before if before is not None and before.waits else None

    def _mend(self) -> None:
        """Give back what a pass that broke off still holds."""
        for tape in (*self._homes.values(), *(tape for tapes in self._tapes.values() for tape in tapes.values())):
            tape.drop()
        if any(slots.held for slots in self._slots.values()):
            self._engine.settle()
            if self._disk:
                self._disk.settle()
            for slots in self._slots.values():
                slots.reclaim()

    def close(self) -> None:
        if self._disk:
            self._disk.close()
        self._let_go()
        self._tapes.clear()
        self._homes.clear()
        self._slots.clear()


def _open(folder: str | None, size: int, say: Callable[[str], None]) -> TapeFile:
    assert folder is not None
    file = TapeFile(folder, size)
    if not file.direct:
        say(f"plan.disk='{folder}' is on a file system that reads and writes through the page cache only: slower")
    return file


def _host_rows(tiles: Tiles, held: int | None) -> int:
    return tiles.length if held is None else held * tiles.size


class Pass:
    """One forward pass and the backward pass that follows it, if one does."""

    def __init__(
        self,
        tapes: Mapping[str, Mapping[int, Tape]],
        rebuilds: Mapping[int, Rebuild],
        homes: Mapping[Home, Tape],
        kept: bool,
    ):
        self._tapes, self._rebuilds, self._homes, self.kept = tapes, rebuilds, homes, kept
        self._xs = dict(tapes.get("x", {})) if kept else {}
        self.waits = kept  # for its backward pass to begin
        self.kv_of_layer: int | None = None  # the layer whose K and V are all there

    @property
    def residual(self) -> Tape:
        return self._tapes["residual"][0]

    def x(self, layer: int) -> Tape:
        """The input of a block, or what the last one puts out. One tape is all of those that are not kept."""
        return self._xs.get(layer) or self.residual

    def rebuild(self, layer: int) -> Rebuild | None:
        """How the x of a layer is made again when its turn comes; None where it is there by then."""
        return self._rebuilds.get(layer)

    def house(self, rebuild: Rebuild) -> None:
        """From now on an x that is made again is found in its home."""
        self._xs |= {layer: self._homes[home] for layer, home in rebuild.homes.items()}

    def attended(self, layer: int) -> tuple[Tape, ...]:
        """o and the log-sum-exp of a layer; nothing where they are not kept."""
        kept = self.kept and layer in self._tapes.get("o", {})
        return tuple(self._tapes[name][layer] for name in ("o", "lse")) if kept else ()

    @property
    def kv(self) -> list[Tape]:
        return list(self._tapes["kv"].values())

    @property
    def kv_gradients(self) -> list[Tape]:
        return list(self._tapes["kv_gradients"].values())
