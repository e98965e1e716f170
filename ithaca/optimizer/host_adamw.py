"""AdamW whose moments live in host memory. A step streams them through the device, tile by tile.

    memory   host: both moments of this rank's shards, 8 bytes a parameter in fp32, in one slab
             device: four slots of one tile for each moment, 256 MiB in fp32
    time     each step reads and writes 8 bytes a parameter over the link to the host, in both directions at once.
             Nothing hides these copies: 0.18 s for 1e9 parameters of a rank (H200). They hide the arithmetic

The arithmetic runs on slices, by the same kernel as for moments on the device (update.py), so the bits are the same.
ZeRO-Offload updates on the CPU instead and halves the traffic. It needs its own kernels, gives other bits, and needs
many cores for each GPU. The price: the CPU waits for the end of a step.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ithaca.base.errors import InputError
from ithaca.base.owners import HOST, TAPES, owned_by
from ithaca.base.tiles import Tiles
from ithaca.optimizer.update import Scaling, run_closure, scales_gradients, update
from ithaca.parallel.mesh import host_mesh
from ithaca.parallel.sharding import host_twin
from ithaca.schedule.step_memory import MOMENT_SLOTS, MOMENT_TILE
from ithaca.tape.engine import Engine
from ithaca.tape.slab import Slab, whole_pages
from ithaca.tape.tape import HostTape, Slots

VECTOR = 16  # elements; see HostAdamW
MOMENTS = ("exp_avg", "exp_avg_sq")


def state_bytes(parameters: Iterable[DTensor]) -> int:
    """Return the bytes of host memory that the moments of this rank's shards take."""
    return sum(len(MOMENTS) * whole_pages(parameter.to_local().nbytes) for parameter in parameters)


class HostAdamW(Scaling):
    """torch's AdamW with the same states under the same names. The moments are DTensors over host memory.

    `tile` is in elements and must be a multiple of `VECTOR`: on a CPU, the elements behind the last whole vector of a
    slice are computed without vector instructions, which round differently.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        engine: Engine,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        tile: int = MOMENT_TILE,
    ):
        assert tile % VECTOR == 0
        # AdamW's own defaults, so that the state_dict of both has the same options
        defaults = torch.optim.AdamW([torch.empty(0)], lr=learning_rate, betas=betas, fused=True).defaults
        super().__init__(groups, defaults)
        self._engine = engine
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        dtype, mesh = parameters[0].dtype, host_mesh(parameters[0].device_mesh)
        sizes = [parameter.to_local().nbytes for parameter in parameters for _ in MOMENTS]
        with owned_by(HOST):
            slab = Slab(sizes, engine.device, lambda _: None)  # zeros, like AdamW's moments before its first step
        slab.belong_to(self, engine)
        rows = max(1, min(tile, max(sizes) // dtype.itemsize))
        with owned_by(TAPES):
            self._slots = [Slots(engine, rows, (), dtype, MOMENT_SLOTS) for _ in MOMENTS]
        parts = iter(slab.parts)
        self._tapes: dict[DTensor, list[HostTape]] = {}  # only for shards that have elements
        for parameter in parameters:
            assert parameter.dtype == dtype
            memory = [next(parts).view(dtype) for _ in MOMENTS]
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=engine.device)}
            for name, moment in zip(MOMENTS, memory, strict=True):
                self.state[parameter][name] = host_twin(parameter, moment, mesh)
            if memory[0].numel():
                tiles = Tiles(memory[0].numel(), tile)
                self._tapes[parameter] = [
                    HostTape(moment, tiles, kind) for moment, kind in zip(memory, self._slots, strict=True)
                ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. The moments are back in host memory when this returns."""
        loss = run_closure(closure)
        fused, scale = scales_gradients(self), self.take_scale()
        if not fused:
            self.scale_now(scale)
            scale = None
        updated = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        local = [(parameter, group) for parameter, group in updated if parameter in self._tapes]
        try:
            for number, (parameter, group) in enumerate(local, start=1):
                following = self._tapes[local[number][0]] if number < len(local) else []
                self._update(parameter, group, following, fused, scale)
        except BaseException:
            self._release_slots()
            raise
        for parameter, _ in updated:
            self.state[parameter]["step"] += 1
        self._engine.settle()  # from here on, checkpoints and users may read the moments like any CPU tensor
        return loss

    def _release_slots(self) -> None:
        """Free the slots that a failed step still holds. Parameters that it has updated stay updated."""
        for tape in (tape for tapes in self._tapes.values() for tape in tapes):
            tape.drop()
        self._engine.settle()
        for slots in self._slots:
            slots.reclaim()

    def _update(
        self, parameter: DTensor, group: dict[str, Any], following: list[HostTape], fused: bool, scale: Tensor | None
    ) -> None:
        """Update one parameter, tile by tile. Its last tile overlaps with the first copy of the `following` tapes."""
        assert isinstance(parameter.grad, DTensor)
        weights, gradients = parameter.to_local().detach().view(-1), parameter.grad.to_local().reshape(-1)
        tapes, tiles = self._tapes[parameter], self._tapes[parameter][0].tiles
        for index, rows in enumerate(tiles.slices()):
            moments = [tape.read(index, toward=1) for tape in tapes]
            if index == tiles.count - 1:
                for tape in following:
                    tape.prefetch(0)
            # A copy: torch counts a step with each call, but all tiles of a parameter belong to one step
            count = self.state[parameter]["step"].clone()
            update(
                [weights[rows]], [gradients[rows]], ([moments[0]], [moments[1]]), [count], group, fused, scale
            )  # fmt: skip
            for tape, moment in zip(tapes, moments, strict=True):
                tape.write(index, moment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the states of another AdamW, sharded in the same way, into this one's host memory.

        The other AdamW may be on the host or on the device. torch cannot load this one's states into an AdamW on a
        GPU; a checkpoint moves states either way.
        """
        for group in state_dict["param_groups"]:
            for option in ("amsgrad", "maximize"):
                if group.get(option):
                    raise InputError(f"the state_dict has {option}=True: states in host memory support only False")
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        given = [(parameter, state_dict["state"].get(index, {})) for index, parameter in zip(saved, own, strict=False)]
        for parameter, values in given:
            for name in (name for name in MOMENTS if name in values):
                found, wanted = tuple(values[name].shape), tuple(self.state[parameter][name].shape)
                if found != wanted:
                    raise InputError(f"the state_dict has {name} of shape {found} where the parameter has {wanted}")
        states = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = states
        for parameter, values in given:
            for name, own_value in states[parameter].items():
                # A parameter that never had a gradient has no states yet: zeros
                _local(own_value).copy_(_local(values[name])) if name in values else _local(own_value).zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_tapes"):
            raise InputError(
                "an optimizer with states in host memory takes no further parameters: make a new one with all of them"
            )
        super().add_param_group(param_group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
