"""The tapes of a model in memory, as the schedule's cost specifies them.

`Tapes` allocates once for a number of tokens: host tapes of all layers in one slab, disk tapes in one file, device
tapes as tensors, and for each kind of host or disk tape a few slots on the device. A forward pass begins a `Pass`.
After a training pass has begun, no other may begin before its backward pass."""

import gc
import weakref
from collections.abc import Callable, Mapping

import torch

from ithaca.base.owners import HOST, KEYS, TAPES, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.base.tiles import Tiles
from ithaca.schedule.decode_cost import CACHE
from ithaca.schedule.sweep.rebuild import Rebuild, TapeName
from ithaca.tape.disk import Disk, DiskTape
from ithaca.tape.engine import Engine
from ithaca.tape.file import TapeFile
from ithaca.tape.slab import Slab
from ithaca.tape.spec import Stretch, TapeSpec, disk_bytes, staging_pieces, stretch_bytes, whole_blocks
from ithaca.tape.tape import DeviceTape, HostTape, Slots, StandIn, Tape


class Tapes:
    """The tapes for passes over one number of tokens."""

    def __init__(
        self,
        specs: list[TapeSpec],
        rebuilds: Mapping[int, Rebuild],
        tiles: Tiles,
        dtype: torch.dtype,
        engine: Engine,
        say: Callable[[str], None],
        held: int | None = None,
        folders: tuple[str, ...] = (),
    ):
        """`held`: tiles of each host or disk tape that are in memory and stand for all of them; None: all are there.
        `folders`: where the disk's file is made."""
        self.tiles, self._dtype, self._engine, self._rebuilds, self._held = tiles, dtype, engine, rebuilds, held
        self._host_tape = StandIn if held else HostTape
        self._in_slab = ("host", "disk") if held else ("host",)
        hosted = [spec for spec in specs if spec.place in self._in_slab]
        sizes = [self._host_rows(spec.tiles(tiles)) * spec.row for spec in hosted for _ in spec.layers]
        on_disk = 0 if held else disk_bytes(specs, tiles)
        # Before the slab, which takes long: a full disk is an error at once
        file = _open(folders, on_disk, say) if on_disk else None
        staging = staging_pieces(specs, tiles) if file else []
        with owned_by(HOST):
            slab = Slab(sizes + staging, engine.device, say)
        self._close_slab = slab.belong_to(self, engine)
        self._disk = Disk(file, slab.parts[len(sizes) :], engine) if file else None
        self._parts, self._disk_start = iter(slab.parts), 0
        self._slots: dict[str, Slots] = {}
        self._tapes: dict[str, dict[int, Tape]] = {}
        for spec in specs:
            with owned_by(KEYS if spec.option in ("kv", CACHE) else TAPES):
                self._tapes.setdefault(spec.name, {}).update(self._allocate(spec))
        features = next((spec.features for spec in specs if spec.name == "residual"), ())  # x has the same
        self._targets = {
            target: self._x_at(target, features) for rebuild in rebuilds.values() for target in rebuild.targets.values()
        }
        self._pass: weakref.ref[Pass] | None = None

    def _allocate(self, spec: TapeSpec) -> dict[int, Tape]:
        """The tapes of one kind in one place, by layer."""
        tiles, device = spec.tiles(self.tiles), self._engine.device
        dtype = at_least_fp32(self._dtype) if spec.exact else self._dtype
        assert dtype.itemsize == spec.itemsize
        if spec.place == "device":
            shape = tiles.length, *spec.features
            return {layer: DeviceTape(torch.empty(shape, dtype=dtype, device=device), tiles) for layer in spec.layers}
        if spec.name not in self._slots:
            rows = min(tiles.size, tiles.length)
            self._slots[spec.name] = Slots(self._engine, rows, spec.features, dtype, spec.slots)
        slots, found = self._slots[spec.name], {}
        for layer in spec.layers:
            if spec.place in self._in_slab:
                with owned_by(HOST):
                    memory = next(self._parts).view(dtype).view(self._host_rows(tiles), *spec.features)
                found[layer] = self._host_tape(memory, tiles, slots)
            else:
                assert spec.place == "disk"
                assert self._disk is not None
                stretch = Stretch(self._disk_start, whole_blocks(tiles.size * spec.row))
                found[layer] = DiskTape(self._disk, stretch, tiles, slots)
                self._disk_start += stretch_bytes(tiles, spec.row)
        return found

    def _host_rows(self, tiles: Tiles) -> int:
        return tiles.length if self._held is None else self._held * tiles.size

    def _x_at(self, target: TapeName, features: tuple[int, ...]) -> Tape:
        """A tape for a rebuilt x in the memory of another tape."""
        kind, layer = target
        tape = self._tapes[kind][layer]
        if kind == "x":
            return tape
        if isinstance(tape, DeviceTape):
            return DeviceTape(tape.memory, self.tiles, features)
        if isinstance(tape, DiskTape):
            return DiskTape(tape.disk, tape.stretch, self.tiles, self._slots["x"])
        assert isinstance(tape, HostTape)
        return self._host_tape(tape.memory, self.tiles, self._slots["x"], features)

    def begin(self, training: bool) -> "Pass":
        """Begin a forward pass; `training`: a backward pass follows."""
        assert not self.busy
        self._reclaim()
        begun = Pass(self._tapes, self._rebuilds, self._targets, training)
        self._pass = weakref.ref(begun) if training else None
        return begun

    @property
    def busy(self) -> bool:
        """Whether a pass waits for its backward pass."""
        if self._waiting() is not None:
            gc.collect()  # a dropped loss may be alive until Python looks for cycles
        return self._waiting() is not None

    def _waiting(self) -> "Pass | None":
        before = self._pass() if self._pass else None
        return before if before is not None and before.waits else None

    def _reclaim(self) -> None:
        """Take back the tiles and slots of a pass that was interrupted."""
        for tape in (*self._targets.values(), *(tape for tapes in self._tapes.values() for tape in tapes.values())):
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
        self._close_slab()
        self._tapes.clear()
        self._targets.clear()
        self._slots.clear()


def _open(folders: tuple[str, ...], size: int, say: Callable[[str], None]) -> TapeFile:
    file = TapeFile(folders, size)
    if not file.direct:
        named = ", ".join(folders)
        say(f"plan.disk='{named}' is on a file system that reads and writes through the page cache only: slower")
    return file


class Pass:
    """One forward pass and the backward pass that follows it, if one does."""

    def __init__(
        self,
        tapes: Mapping[str, Mapping[int, Tape]],
        rebuilds: Mapping[int, Rebuild],
        targets: Mapping[TapeName, Tape],
        training: bool,
    ):
        self._tapes, self._rebuilds, self._targets, self.training = tapes, rebuilds, targets, training
        self._xs = dict(tapes.get("x", {})) if training else {}
        self.waits = training  # for its backward pass to begin
        self.kv_of: tuple[int, int] | None = None  # the layer and head round whose K and V are on the tapes

    @property
    def residual(self) -> Tape:
        """x between blocks going forward, its gradient going backward."""
        return self._tapes["residual"][0]

    def x(self, layer: int) -> Tape:
        """The input of a block, or the last one's output. Inputs that are not saved share the residual tape."""
        return self._xs.get(layer) or self.residual

    def rebuild(self, layer: int) -> Rebuild | None:
        """How the x of a layer is rebuilt; None if it is on a tape when backward reaches the layer."""
        return self._rebuilds.get(layer)

    def use_rebuilt(self, rebuild: Rebuild) -> None:
        """Make `x` return the tapes that hold rebuilt x."""
        self._xs |= {layer: self._targets[target] for layer, target in rebuild.targets.items()}

    def o_and_lse(self, layer: int) -> tuple[Tape, ...]:
        """o and the log-sum-exp of a layer; nothing if they are not saved."""
        saved = self.training and layer in self._tapes.get("o", {})
        return tuple(self._tapes[name][layer] for name in ("o", "lse")) if saved else ()

    @property
    def between_rounds(self) -> Tape:
        """o of all heads while head rounds complete it, its gradient going backward."""
        return self._tapes["between_rounds"][0]

    @property
    def kv(self) -> list[Tape]:
        return list(self._tapes["kv"].values())

    @property
    def cache(self) -> list[Tape]:
        """K and V of each layer, kept for new tokens."""
        return [tape for _, tape in sorted(self._tapes[CACHE].items())]

    @property
    def kv_gradients(self) -> list[Tape]:
        return list(self._tapes["kv_gradients"].values())
