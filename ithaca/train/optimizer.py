"""AdamW on shards, where the Plan wants its states, and the learning rate over a run."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ithaca.assemble import Model
from ithaca.base.errors import InputError, PlanError
from ithaca.base.owners import STATES, owned_by
from ithaca.base.sizes import format_bytes
from ithaca.config import TrainSection
from ithaca.parallel.agree import on_this_node, together
from ithaca.tape.budget import host_budget
from ithaca.train.streamed import MOMENTS, StreamedAdamW, state_bytes


@owned_by(STATES)
def make_optimizer(
    model: Model,
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    reserved_bytes: int = 0,
) -> torch.optim.Optimizer:
    """Fused AdamW on this rank's shards, its states where the Plan says, as zeros from the start. Collective.

    Norms and biases do not decay, and parameters that are frozen now are left out. States on the host that do not fit
    there are refused; `spoken_for` are bytes of this node's memory that something else is going to take, such as tapes
    that are not reserved yet (`model.host_bytes`).
    """
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    together(model.mesh.group, lambda: _check_options(learned, learning_rate, betas, weight_decay))
    parted: list[dict[str, Any]] = [
        {"params": [p for p in learned if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in learned if p.dim() == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in parted if group["params"]]
    if model.plan.optimizer == "host":
        _check_memory(model, state_bytes(learned), reserved_bytes)  # pyrefly: ignore
        return together(
            model.mesh.group,
            lambda: StreamedAdamW(groups, model.engine, learning_rate=learning_rate, betas=betas),
        )
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
    for parameter in learned:
        # As AdamW would make them in its first step: a checkpoint can then be read into them at any time
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in MOMENTS},
        }
    return optimizer


def _check_options(learned: list[Any], rate: float, betas: tuple[float, float], decay: float) -> None:
    if not learned:
        raise InputError("every parameter of the model is frozen: an optimizer needs one with requires_grad")
    for name, value in (("learning_rate", rate), ("weight_decay", decay)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value}: a number of 0 or more is needed")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"betas are {betas}: two numbers from 0 to below 1 are needed")


def _check_memory(model: Model, mine: int, reserved_bytes: int) -> None:
    """Refuse, on all ranks, states that one of their nodes has no room for. Collective."""
    needed, ranks = on_this_node(model.mesh.group, mine)
    gpu = model.mesh.device.type == "cuda"
    together(model.mesh.group, lambda: _refuse_states(needed, ranks, reserved_bytes, *host_budget(), gpu))


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


def clip(model: Model, largest: float) -> float:
    """Shrink the gradients to a norm of at most `largest`, over all ranks; gives the norm they had."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def learning_rate(options: TrainSection, step: int) -> float:
    """Linear warm-up; then `cosine` falls at once, `wsd` stays and falls linearly over the last part of the run."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - 1 - options.warmup, 1)  # 1 in the last step
    if options.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    else:
        share = min((1 - done) / options.decay, 1.0) if options.decay else 1.0
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * share)
