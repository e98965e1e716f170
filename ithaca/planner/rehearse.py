"""One rank of a job of many, on the one device that is there: how long its step takes, and who holds its memory.

The model, its Plan and its optimizer are those of training; the ranks that are absent are looped back (looped.py), the
layers that are left out are held as ballast. So memory is that of the real rank, and time is without links between
GPUs. Each is measured in a step of its own: time with nothing watching, memory with a meter that asks for every tensor
who made it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ithaca.assemble import Model, apply
from ithaca.errors import PlanError
from ithaca.model.named import find_config
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Spec, read_spec
from ithaca.parallel.batch import Batch
from ithaca.parallel.looped import start_looped
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.planner.ballast import absent_bytes, hold, tapes_of
from ithaca.planner.kernels import Timed, Weightless
from ithaca.planner.meter import HOST, Meter
from ithaca.plans.needs import host_bytes, layout_of, tiles_of
from ithaca.plans.plan import Plan
from ithaca.train.optimizer import make_optimizer

PEAK_FLOPS = 989e12  # Hopper's dense bf16, the base of causal MFU
TILES_HELD = 2  # of a host tape, where they stand for all


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is rehearsed: rank 0 of shard × ring × ulysses."""

    model: str
    plan: Plan
    tokens: int
    ulysses: int = 1
    ring: int = 1
    shard: int = 1
    layers: int | None = None  # of the model's, the first ones; None: all
    cap: int | None = None  # bytes of the device that may be used
    memory_only: bool = False  # everything but the arithmetic of attention, and two tiles of each host tape
    once: bool = False  # time the one step whose memory is watched, where kernels are long enough to hide that

    @property
    def ranks(self) -> int:
        return self.shard * self.ring * self.ulysses


def rehearse(scene: Scene, device: str | None = None, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run a step of the scene in this process, which can take part in no other job after it."""
    start_looped(scene.ranks)
    return play(scene, mesh(ulysses=scene.ulysses, ring=scene.ring, shard=scene.shard, device=device), say)


def play(scene: Scene, grid: Mesh, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The same on ranks of any job, whether they are there or looped back."""
    spec = read_spec(find_config(scene.model)[0])
    if scene.cap is not None:
        _cap(grid.device, scene.cap)
    source = _source(scene, spec)
    meter = Meter(grid.device)
    with meter.running():
        model = apply(source, scene.plan, grid)
        clock = Timed(model.kernel, grid.device)
        model.kernel = Weightless(model.kernel) if scene.memory_only else clock
        model.tiles_held = TILES_HELD if scene.memory_only else None
        optimizer = make_optimizer(model, learning_rate=0.0)
        ballast = hold(absent_bytes(model, spec, scene.tokens), grid.device)
        model.reserve(scene.shard, scene.tokens, say)
        batch = model.shard(*_tokens(scene, spec))
    # The first step warms up and is watched, which takes longer; the second is timed, if there is one
    _synchronize(grid.device)
    if grid.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    meter.restart()
    with meter.running():
        seconds = _step(model, optimizer, batch)
    peak = _peaks(meter, grid.device)
    if not (scene.once or scene.memory_only):
        clock.restart()
        seconds = _step(model, optimizer, batch)
    seconds["attention"] = clock.seconds()
    del ballast
    return _report(scene, spec, model, peak, {} if scene.memory_only else seconds)


def _source(scene: Scene, spec: Spec) -> ModelSource:
    layers = spec.layers if scene.layers is None else scene.layers
    if not 1 <= layers <= spec.layers:
        raise PlanError(
            f"--layers {layers} cannot be rehearsed: the model has {spec.layers}, so 1 to {spec.layers} can"
        )
    some = spec.with_layers(layers)
    return ModelSource(some, {}, RandomWeights(some, 0), "auto", None)


def _tokens(scene: Scene, spec: Spec) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, spec.vocab, (scene.shard, scene.tokens), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


def _step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch) -> dict[str, float]:
    """Seconds of its parts."""
    seconds, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        _synchronize(model.mesh.device)
        now = time.perf_counter()
        seconds[name], began = now - began, now

    loss = model(batch)
    lap("forward")
    loss.backward()
    lap("backward")
    optimizer.step()
    optimizer.zero_grad()
    lap("optimizer")
    return seconds


def _peaks(meter: Meter, device: torch.device) -> dict[str, int]:
    """Bytes by owner when they were most; what kernels take for themselves, and what the allocator keeps beside."""
    found = {owner: size for owner, size in meter.peak.most_common() if size > 0 and owner != HOST}
    if device.type != "cuda":
        return found
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return found | {"within kernels": allocated - sum(found.values()), "allocator": reserved - allocated}


def _report(scene: Scene, spec: Spec, model: Model, peak: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    plan, grid = model.plan, model.mesh
    layout = layout_of(plan, scene.tokens, scene.ulysses, scene.ring, shorten=True)
    host = host_bytes(tapes_of(model, spec), tiles_of(plan, layout), gpu=True)
    return {
        "model": scene.model,
        "tokens": scene.tokens,
        "ranks": scene.ranks,
        "mesh": {"shard": scene.shard, "ring": scene.ring, "ulysses": scene.ulysses},
        "layers": model.spec.layers,
        "model_layers": spec.layers,
        "recipe": plan.recipe,
        "plan": {name: value for name, value in vars(plan).items() if value is not None},
        "device": grid.device.type,
        "peak_bytes": sum(peak.values()),
        "peak_bytes_allocated": sum(peak.values()) - peak.get("allocator", 0),
        "memory": peak,
        "host_bytes": host,
    } | (_speed(scene, model, seconds) if seconds else {})


def _speed(scene: Scene, model: Model, seconds: dict[str, float]) -> dict[str, float]:
    """Of the layers that were rehearsed, with embedding, loss and optimizer."""
    step = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
    rate = scene.tokens / step / (scene.ring * scene.ulysses)
    return {
        "seconds": step,
        **{f"{part}_seconds": taken for part, taken in seconds.items()},
        "tokens_per_second_per_gpu": rate,
        "mfu_causal": rate * model.spec.flops_per_token(scene.tokens) / PEAK_FLOPS,
    }


def _cap(device: torch.device, cap: int) -> None:
    if device.type != "cuda":
        raise PlanError(f"--cap {cap} is for a GPU, and there is none here: leave it out")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
