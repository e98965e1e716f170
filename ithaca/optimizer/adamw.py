"""AdamW over this rank's shards, with its moments where the Plan puts them, and the clipping of gradients."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ithaca.base.errors import InputError, PlanError, shown
from ithaca.base.misuse import describe, refuse_keywords
from ithaca.base.owners import STATES, owned_by
from ithaca.base.sizes import format_bytes
from ithaca.base.torch_private import local_tensor, step_without_hooks
from ithaca.model.decoder import Decoder
from ithaca.optimizer.host_adamw import MOMENTS, HostAdamW, state_bytes
from ithaca.optimizer.update import Scaling, gradient_norm, run_closure, scales_gradients, update
from ithaca.parallel.agree import on_this_node, together
from ithaca.parallel.mesh import Mesh
from ithaca.parallel.sharding import shards
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.plans.plan import Plan
from ithaca.tape.budget import host_budget
from ithaca.tape.engine import Engine

CLIP_EPS = 1e-6  # torch's, added to the norm


class Sharded(Protocol):
    """The parts of a model that an optimizer needs; `ithaca.Model` has them."""

    plan: Plan
    mesh: Mesh
    engine: Engine
    decoder: Decoder
    part: TensorPart

    def parameters(self) -> Iterable[Any]: ...


@refuse_keywords(InputError, lr="learning_rate is its name here", params="the model itself is given, first")
@owned_by(STATES)
def make_optimizer(
    model: Sharded,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    reserved_bytes: int = 0,
    spoken_for: int | None = None,
) -> torch.optim.Optimizer:
    """Return a fused AdamW for this rank's shards. Collective.

    The moments exist from the start, as zeros, on the GPU or in host memory (`plan.optimizer`). Norms and biases do not
    decay. Parameters that are frozen now are left out.

    Moments that do not fit in host memory raise a PlanError. `reserved_bytes` is memory of this node that something
    else will take later, such as tapes that are not allocated yet (`model.host_bytes`). `spoken_for` is its old name.
    """
    if spoken_for is not None:
        # Two more than usual: `owned_by` and `refuse_keywords` are the callers
        warnings.warn("make_optimizer(spoken_for=…) is now reserved_bytes=…: the old name still works", stacklevel=4)
        if reserved_bytes:
            raise InputError(
                f"reserved_bytes={reserved_bytes} and spoken_for={spoken_for} are one option, which was renamed: keep "
                "reserved_bytes"
            )
        reserved_bytes = spoken_for
    if not all(hasattr(model, name) for name in ("plan", "mesh", "engine")):
        raise InputError(f"{describe(model)} was given, but make_optimizer takes the model that ithaca.apply returns")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    together(model.mesh.group, lambda: _check_options(trained, learning_rate, betas, weight_decay))
    both: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in both if group["params"]]
    if model.plan.optimizer == "host":
        _check_memory(model.mesh, state_bytes(trained), reserved_bytes)
        return together(
            model.mesh.group,
            lambda: HostAdamW(groups, model.engine, learning_rate=learning_rate, betas=betas),
        )
    optimizer = AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    for parameter in trained:
        # As AdamW makes them in its first step. A checkpoint can then be read into them at any time
        optimizer.state[parameter] = _new_state(parameter)
    return optimizer


def _new_state(parameter: DTensor) -> dict[str, Tensor]:
    moments = {name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32, device=parameter.device), **moments}


def _check_options(trained: list[Any], rate: float, betas: tuple[float, float], decay: float) -> None:
    if not trained:
        raise InputError("every parameter of the model is frozen: an optimizer needs one with requires_grad")
    for name, value in (("learning_rate", rate), ("weight_decay", decay)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise InputError(f"{name} is {shown(value)}: a number of 0 or more is needed")
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"betas are {betas}: two numbers from 0 to below 1 are needed")


def _check_memory(mesh: Mesh, own_bytes: int, reserved_bytes: int) -> None:
    """Raise a PlanError on all ranks if one node lacks host memory for the moments of its ranks. Collective."""
    needed, ranks = on_this_node(mesh.group, own_bytes)
    gpu = mesh.device.type == "cuda"
    together(mesh.group, lambda: _refuse_states(needed, ranks, reserved_bytes, *host_budget(), gpu))


def _refuse_states(needed: int, ranks: int, reserved_bytes: int, free: int, reason: str, gpu: bool) -> None:
    missing = needed + reserved_bytes - free
    if missing <= 0:
        return
    text = f"optimizer states on the host (plan.optimizer=host) need {format_bytes(needed)}"
    text += f" for the {ranks} ranks of this node" if ranks > 1 else ""
    text += f", beside {format_bytes(reserved_bytes)} of tapes" if reserved_bytes else ""
    text += f", and {reason} is {format_bytes(free)}: {format_bytes(missing)} are missing; "
    ways = ["plan.optimizer=device keeps them on the GPU"] if gpu else []
    if needed < free:
        ways.append(f"tapes of at most {format_bytes(free - needed)}, for fewer tokens, leave room")
    raise PlanError(text + (", or ".join(ways) or "a smaller model or more nodes would fit"))


def clip(model: Sharded, largest: float, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Scale the gradients down to a norm of at most `largest`, over all ranks. Return the norm before that.

    A 0-dim tensor: a number would make the host wait for the GPU.

    If an optimizer of `make_optimizer` can, its next step scales the gradients while it reads them, which saves a pass
        over memory. Until then they are not scaled.
    """
    if isinstance(optimizer, Scaling) and scales_gradients(optimizer):
        norm, before = _norm(model, fused=True), optimizer.pending_scale()
        norm = norm if before is None else norm * before  # clipped twice, as if the first time had scaled them
        scale = (largest / (norm + CLIP_EPS)).clamp(max=1.0)
        optimizer.scale_later(scale if before is None else scale * before)
        return norm
    if model.mesh.tensor > 1:
        norm = _norm(model, fused=False)
        scale = (largest / (norm + CLIP_EPS)).clamp(max=1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                local_tensor(parameter.grad).mul_(scale)
        return norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _norm(model: Sharded, fused: bool) -> Tensor:
    """The norm of all gradients over all ranks. A weight that several tensor ranks hold counts once."""
    counted: dict[int, list[DTensor]] = {}  # parameters by the number of tensor ranks that hold the same part
    for name, parameter in shards(model.decoder):
        if parameter.grad is not None:
            counted.setdefault(len(model.part.sharers(name)) or 1, []).append(parameter)
    return gradient_norm(counted, model.mesh.tensor_group, fused)


class AdamW(Scaling, torch.optim.AdamW):
    """torch's AdamW with the same states. On a GPU, in fp32, it updates by a kernel of our own (update.py)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        scale = self.take_scale()
        # torch's GradScaler leaves it to a fused AdamW to divide gradients, and to skip steps with infinite ones
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if scaled or not scales_gradients(self):
            self.scale_now(scale)
            step_without_hooks(torch.optim.AdamW)(self)
            return loss
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                states = [self._state_for_kernel(parameter) for parameter in trained]
                first, second = ([local_tensor(state[name]) for state in states] for name in MOMENTS)
                weights, gradients = map(local_tensor, trained), (local_tensor(p.grad) for p in trained)
                steps = [state["step"] for state in states]
                update([*weights], [*gradients], (first, second), steps, group, True, scale)
                increment_version(trained)  # autograd does not see the kernel change them
        return loss

    def _state_for_kernel(self, parameter: DTensor) -> dict[str, Any]:
        """The states of a parameter, its step on its device. A state_dict of another AdamW may lack these."""
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        state["step"] = state["step"].to(parameter.device, torch.float32)
        return state
