"""One rank of a job of many, on the one device that is there: how long its step takes, and who holds its memory.

The model, its Plan and its optimizer are those of training; the ranks that are absent are looped back (looped.py), the
layers that are left out are held as ballast. So memory is that of the real rank, and time is without links between
GPUs. Each is measured in a step of its own: time with nothing watching, memory with a meter that asks for every tensor
who made it.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaca.assemble import Model, apply
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.errors import PlanError
from ithaca.base.owners import ALLOCATOR, HOST, KERNELS
from ithaca.model.config_json import find_config
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import PEAK_FLOPS, Spec, read_spec
from ithaca.optimizer.adamw import make_optimizer
from ithaca.parallel.batch import Batch
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.planner.hardware import nearest, read_gpus
from ithaca.planner.machine import Machine
from ithaca.planner.memory import predict_memory
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import disk_bytes, host_bytes, layout_of, tiles_of
from ithaca.rehearsal.ballast import absent_bytes, hold, tapes_of
from ithaca.rehearsal.fake_kernels import Timed, Weightless, few_visits
from ithaca.rehearsal.kernel_bound import Products, attention_seconds, product_seconds, synchronize
from ithaca.rehearsal.memory_owners import Meter

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
    hardware: Path | None = None  # a file of GPUs, whose rates predictions use
    bare: bool = False  # time its kernels and products alone as well

    @property
    def ranks(self) -> int:
        return self.shard * self.ring * self.ulysses


def rehearse(scene: Scene, device: str | None = None, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run a step of the scene in this process, which can take part in no other job after it."""
    use_expandable_segments()  # as training does
    start_loopback(scene.ranks)
    grid = mesh(ulysses=scene.ulysses, ring=scene.ring, shard=scene.shard, device=device)
    try:
        return play(scene, grid, say)
    except torch.OutOfMemoryError as problem:
        spec = read_spec(find_config(scene.model)[0])
        axes = scene.ulysses, scene.ring, scene.shard
        predicted = predict_memory(spec, scene.plan, scene.tokens, *axes, present=scene.layers)
        return {
            "model": scene.model,
            "tokens": scene.tokens,
            "fits": False,
            "why": str(problem).split(". ")[0],
            "peak_bytes_predicted": predicted.total,
            "memory_predicted": predicted.parts,
        }


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
        model.allocate(scene.shard, scene.tokens, say)
        batch = model.shard(*_tokens(scene, spec))
    # The first step warms up and is watched, which takes longer: seven seconds of forty were seen. The second is timed
    synchronize(grid.device)
    if grid.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    meter.restart()
    products = Products()
    beside = products if scene.bare else few_visits() if scene.memory_only else nullcontext()
    with meter.running(), beside:
        seconds = _step(model, optimizer, batch)
    peak = _peaks(meter, grid.device)
    if not scene.memory_only:
        clock.restart()
        seconds = _step(model, optimizer, batch)
    seconds["attention"] = clock.seconds()
    del ballast
    report = _report(scene, spec, model, peak, {} if scene.memory_only else seconds)
    return report | (_bare(model, clock, products, seconds) if scene.bare else {})


def _bare(model: Model, clock: Timed, products: Products, seconds: dict[str, float]) -> dict[str, float]:
    """The same kernels and products by themselves, and how much longer the step took."""
    device, dtype = model.mesh.device, model.dtype
    attention = attention_seconds(clock.seen, clock.kernel, dtype, device)
    bare = sum(attention.values()) + product_seconds(products.seen, device)
    return {
        "bare_seconds": bare,
        "bare_attention_forward_seconds": attention["forward"],
        "bare_attention_backward_seconds": attention["backward"],
        "over_bare": (seconds["forward"] + seconds["backward"]) / bare,
    }


def _source(scene: Scene, spec: Spec) -> ModelSource:
    layers = spec.layers if scene.layers is None else scene.layers
    if not 1 <= layers <= spec.layers:
        raise PlanError(
            f"--layers {layers} cannot be rehearsed: the model has {spec.layers}, so 1 to {spec.layers} can"
        )
    scene.plan.placement(spec.layers)  # a list that the whole model has no use for is no matter of --layers
    if layers < (named := scene.plan.named_layers):
        raise PlanError(
            f"--layers {layers} cannot be rehearsed: plan.x or plan.o names {named} layers one by one, so "
            f"{named} to {spec.layers} can"
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
        synchronize(model.mesh.device)
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
    return found | {KERNELS: allocated - sum(found.values()), ALLOCATOR: reserved - allocated}


def _report(scene: Scene, spec: Spec, model: Model, peak: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    plan, grid = model.plan, model.mesh
    layout = layout_of(plan, scene.tokens, scene.ulysses, scene.ring, shorten=True)
    tapes, tiles = tapes_of(model, spec), tiles_of(plan, layout)
    predicted = predict_memory(
        spec, plan, scene.tokens, scene.ulysses, scene.ring, scene.shard, present=model.spec.layers
    )
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
        "peak_bytes_allocated": sum(peak.values()) - peak.get(ALLOCATOR, 0),
        "peak_bytes_predicted": predicted.total if grid.device.type == "cuda" else None,
        "memory": peak,
        "memory_predicted": predicted.parts if grid.device.type == "cuda" else None,
        "host_bytes": host_bytes(tapes, tiles, gpu=True),
        "disk_bytes": disk_bytes(tapes, tiles),
        "fits": True,  # else it would not have come this far
    } | (_speed(scene, model, seconds) if seconds else {})


def _predicted_seconds(scene: Scene, model: Model) -> float | None:
    """Without links between GPUs, which are looped back through this one's memory; None without a GPU that is known."""
    if model.mesh.device.type != "cuda":
        return None
    properties, known = torch.cuda.get_device_properties(model.mesh.device), read_gpus(scene.hardware)
    try:
        gpu = nearest(properties.name, properties.total_memory, known)
    except PlanError:
        return None
    # Each on a node of its own: as here, none shares a disk
    machine = Machine(nodes=scene.ranks, gpus=1, inside=gpu.bandwidth / 2, across=gpu.bandwidth / 2)
    return predict_seconds(model.spec, model.plan, gpu, machine, scene.tokens, scene.ulysses, scene.ring).step


def _speed(scene: Scene, model: Model, seconds: dict[str, float]) -> dict[str, float | None]:
    """Of the layers that were rehearsed, with embedding, loss and optimizer."""
    step = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
    rate = scene.tokens / step / (scene.ring * scene.ulysses)
    return {
        "seconds": step,
        "seconds_predicted": _predicted_seconds(scene, model),
        **{f"{part}_seconds": taken for part, taken in seconds.items()},
        "tokens_per_second_per_gpu": rate,
        "mfu_causal": rate * model.spec.flops_per_token(scene.tokens) / PEAK_FLOPS,
    }


def _cap(device: torch.device, cap: int) -> None:
    if device.type != "cuda":
        raise PlanError(f"--cap {cap / 1e9:g}GB is for a GPU, and there is none here: leave it out")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), device)
