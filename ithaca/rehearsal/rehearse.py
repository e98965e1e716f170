"""One rank of a job of many, on the one device that is here: how long its step takes, and who holds its memory.

Model, Plan and optimizer are those of training. Collectives loop back to this process (parallel/loopback.py), and
layers that are left out are held as plain memory. So memory is that of the real rank, and time leaves out the links
between GPUs. Each is measured in a step of its own: time with nothing watching, memory with a meter that counts every
tensor for its owner."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ithaca.assemble import Model, Substitutes, apply
from ithaca.attention.documents import attended_length
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.attention.kernels.seam import Kernel
from ithaca.base.allocator import use_expandable_segments
from ithaca.base.errors import PlanError
from ithaca.base.owners import ALLOCATOR, HOST, KERNELS, owned_by
from ithaca.base.sizes import spell_bytes
from ithaca.model.spec import Spec
from ithaca.optimizer.adamw import make_optimizer
from ithaca.parallel.axes import Axes
from ithaca.parallel.batch import Batch
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import Mesh, mesh
from ithaca.planner.hardware import Gpu, Machine, causal_mfu
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.rehearsal.fake_kernels import FakeKernel, TimedKernel
from ithaca.rehearsal.kernel_bound import Products, attention_seconds, product_seconds, synchronize
from ithaca.rehearsal.memory_meter import Meter, mark_gradients
from ithaca.rehearsal.scene import Scene, held_spec, scene_source, scene_tokens
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.schedule.job import Bytes, Job
from ithaca.schedule.marks import OPTIMIZER, StepMarks
from ithaca.schedule.step_memory import absent_layers, step_memory
from ithaca.tape.devices import count_devices
from ithaca.tape.spec import disk_bytes, host_bytes

TILES_HELD = 2  # tiles of a host tape that stand for all of them
VISITS = 2  # visits at either end of a walk: those between take the same memory, and their number grows as the square


def rehearse(
    scene: Scene,
    device: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    run: Callable[[Scene, Mesh], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run a step of the scene in this process, which can take part in no other job after it; or `run` the scene."""
    grid = loopback_mesh(scene.axes, device)
    try:
        return run(scene, grid) if run else run_scene(scene, grid, say)
    except torch.OutOfMemoryError as problem:
        return out_of_memory(scene, grid, problem)


def out_of_memory(scene: Scene, grid: Mesh, problem: Exception) -> dict[str, Any]:
    """The report of a scene that does not fit."""
    spec = held_spec(scene)
    name, size = scene.plan.kernel, spec.head_size
    kernel = choose_kernel(name, grid.device, torch.bfloat16, size, not scene.memory_only).name
    predicted = step_memory(scene.job(spec, torch.bfloat16, kernel))
    return {
        "model": scene.model,
        "tokens": scene.tokens,
        "fits": False,
        "why": str(problem).split(". ")[0],
        "peak_bytes_predicted": predicted.total,
        "memory_predicted": predicted.parts,
    }


def loopback_mesh(axes: Axes, device: str | None = None) -> Mesh:
    """Make this process rank 0 of a job of which it is the only process, once, with the allocator of training."""
    use_expandable_segments()
    start_loopback(axes.size)
    return mesh(**axes.grid, device=device)  # pyrefly: ignore


def run_scene(
    scene: Scene,
    grid: Mesh,
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[Kernel, Meter], Kernel] = lambda kernel, _: kernel,
) -> dict[str, Any]:
    """Run the scene's steps on the ranks of a job, real or looped back. `watch` may wrap the kernel once more."""
    prepared = prepare_step(scene, grid, Meter, say, watch)
    model, optimizer, batch, meter, clock = (
        prepared.model,
        prepared.optimizer,
        prepared.batch,
        prepared.meter,
        prepared.clock,
    )
    # The first step warms up and is watched, which makes it slower: seven of forty seconds once. The second is timed
    products = Products()
    seconds, peak = {}, {}
    if not scene.once or model.plan.cuda_graph:
        with model.eager(), meter, products if scene.bare else nullcontext():
            seconds = run_step(model, optimizer, batch)
        peak = seen_peak(meter, grid.device)
    if not scene.memory_only:
        steps: list[dict[str, float]] = []
        if model.plan.cuda_graph:  # the clock sees no call of a replay: those of the watched step count
            clock.stop()
            empty_cache(grid.device)  # a training step does not have what the watched step has left
            run_step(model, optimizer, batch)  # captures
        for _ in range(scene.repeats):
            clock.restart()
            with products if scene.bare and scene.once and not steps else nullcontext():
                steps.append(run_step(model, optimizer, batch))
        seconds = {part: median(step[part] for step in steps) for part in steps[0]}
        if model.plan.cuda_graph:
            peak = graph_peak(peak)
    peak = peak or seen_peak(meter, grid.device)
    seconds["attention"] = clock.seconds()  # of the last step
    prepared.held.clear()
    report = _report(scene, prepared.spec, model, peak, {} if scene.memory_only else seconds)
    return report | (_bare(model, clock, products, seconds) if scene.bare else {})


AnyMeter = TypeVar("AnyMeter", bound=Meter)


@dataclass(frozen=True)
class Prepared(Generic[AnyMeter]):
    """A model with its optimizer on the device. The meter has seen all of it."""

    spec: Spec  # of the model whose memory is held
    model: Model
    optimizer: torch.optim.Optimizer
    meter: AnyMeter
    clock: TimedKernel
    held: list[Tensor]  # memory in place of layers that do not run


@dataclass(frozen=True)
class PreparedStep(Prepared[AnyMeter]):
    """A scene that is ready for its steps: with tapes and a batch."""

    batch: Batch


def prepare_step(
    scene: Scene,
    grid: Mesh,
    make_meter: Callable[[torch.device, torch.dtype], AnyMeter],
    say: Callable[[str], None] = lambda _: None,
    watch: Callable[[Kernel, AnyMeter], Kernel] = lambda kernel, _: kernel,
) -> PreparedStep[AnyMeter]:
    """Put the model, its optimizer, its tapes and a batch onto the device, under a meter."""
    prepared = prepare(scene, grid, make_meter, absent_layers, watch=watch)
    model, meter = prepared.model, prepared.meter
    with meter:
        model.allocate(scene.axes.shard, scene.tokens, say)
        batch = model.shard(*scene_tokens(scene, model.spec))
    begin_watching(meter, grid.device)
    return PreparedStep(**vars(prepared), batch=batch)


def begin_watching(meter: Meter, device: torch.device) -> None:
    """Look for a new peak from here on."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    meter.restart()


def prepare(
    scene: Scene,
    grid: Mesh,
    make_meter: Callable[[torch.device, torch.dtype], AnyMeter],
    absent: Callable[[Job, Job], Bytes],
    cache_place: str | None = None,
    watch: Callable[[Kernel, AnyMeter], Kernel] = lambda kernel, _: kernel,
) -> Prepared[AnyMeter]:
    """Put the model and its optimizer onto the device, and hold what `absent` says of layers that do not run."""
    spec = held_spec(scene)
    if scene.cap is not None:
        _cap(grid.device, scene.cap)
    source = scene_source(scene, spec)
    meter = make_meter(grid.device, source.compute_dtype(grid.device))
    timed: list[TimedKernel] = []

    def wrap(kernel: Kernel) -> Kernel:
        timed.append(TimedKernel(kernel, grid.device))
        return watch(FakeKernel(kernel) if scene.memory_only else timed[0], meter)

    with meter:
        less = (TILES_HELD, VISITS) if scene.memory_only else (None, None)
        substitutes = Substitutes(wrap, not scene.memory_only, *less, cache_place)
        model = apply(source, scene.plan.first_layers(source.spec.layers), grid, substitutes)
        mark_gradients(model.decoder)
        optimizer = make_optimizer(model, learning_rate=0.0)
        held = _hold_absent(scene, spec, model, absent)
    return Prepared(spec, model, optimizer, meter, timed[0], held)


def _hold_absent(scene: Scene, spec: Spec, model: Model, absent_bytes: Callable[[Job, Job], Bytes]) -> list[Tensor]:
    """Allocate the memory that a rank holds all the time for layers that do not run."""
    absent = spec.layers - model.spec.layers
    if absent == 0:
        return []
    job, running = (scene.job(which, model.dtype, model.kernel.name) for which in (spec, model.spec))
    tensors = []
    for owner, size in absent_bytes(job, running).items():
        with owned_by(owner):
            tensors.append(torch.empty(size, dtype=torch.uint8, device=model.mesh.device))
    return tensors


def _bare(model: Model, clock: TimedKernel, products: Products, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of the step's kernels and products alone, and how much longer the step took."""
    device, dtype = model.mesh.device, model.dtype
    attention = attention_seconds(clock.seen, clock.kernel, dtype, device)
    bare = sum(attention.values()) + product_seconds(products.seen, device)
    return {
        "bare_seconds": bare,
        "bare_attention_forward_seconds": attention["forward"],
        "bare_attention_backward_seconds": attention["backward"],
        "over_bare": (seconds["forward"] + seconds["backward"]) / bare,
    }


def run_step(
    model: Model, optimizer: torch.optim.Optimizer, batch: Batch, marks: StepMarks | None = None
) -> dict[str, float]:
    """Run a step and return the seconds of its parts; `marks` collects its progress."""
    seconds, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        synchronize(model.mesh.device)
        now = time.perf_counter()
        seconds[name], began = now - began, now

    loss = model(batch) if marks is None else model(batch, marks=marks)
    lap("forward")
    loss.backward()
    lap("backward")
    if marks:
        marks.mark(OPTIMIZER)
    optimizer.step()
    optimizer.zero_grad()
    lap("optimizer")
    return seconds


def seen_peak(meter: Meter, device: torch.device) -> dict[str, int]:
    """Bytes by owner at the peak; what kernels take for themselves, and what the allocator keeps beside."""
    found = {owner: size for owner, size in meter.peak.most_common() if size > 0 and owner != HOST}
    return with_allocator(found, device)


def with_allocator(found: dict[str, int], device: torch.device) -> dict[str, int]:
    """Add what a GPU's allocator has counted beside the tensors that a meter saw."""
    if device.type != "cuda":
        return found
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return found | {KERNELS: allocated - sum(found.values()), ALLOCATOR: reserved - allocated}


def empty_cache(device: torch.device) -> None:
    """Give back memory that nothing uses, and look for a new peak from here on."""
    synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def graph_peak(watched: dict[str, int]) -> dict[str, int]:
    """The peak of captured passes, by the owners of the same pass without a graph: a graph's memory has no owners.

    The allocator gets what the graph takes beyond that.
    """
    owned = {owner: size for owner, size in watched.items() if owner != ALLOCATOR}
    return owned | {ALLOCATOR: torch.cuda.max_memory_reserved() - sum(owned.values())}


def _report(scene: Scene, spec: Spec, model: Model, peak: dict[str, int], seconds: dict[str, float]) -> dict[str, Any]:
    job = scene.job(spec, model.dtype, model.kernel.name)
    predicted = step_memory(job) if model.mesh.gpu else None
    return (
        describe_scene(scene, spec, model, peak)
        | {
            "peak_bytes_predicted": predicted.total if predicted else None,
            "memory_predicted": predicted.parts if predicted else None,
            "host_bytes": host_bytes(job.tapes, job.tiles, gpu=True),
            "disk_bytes": disk_bytes(job.tapes, job.tiles),
        }
        | (_speed(scene, model, seconds) if seconds else {})
    )


def describe_scene(scene: Scene, spec: Spec, model: Model, peak: dict[str, int]) -> dict[str, Any]:
    """The report's entries about the scene, its device, and the bytes at its peak by owner."""
    grid, axes, places = model.mesh, scene.axes, {name: getattr(scene.plan, name) for name in ("x", "o")}
    plan = vars(model.plan) | {name: words for name, words in places.items() if words}  # of all layers
    return {
        "model": scene.model,
        "tokens": scene.tokens,
        "ranks": axes.size,
        "mesh": axes.grid,
        "layers": model.spec.layers,
        "model_layers": spec.layers,
        "recipe": scene.plan.recipe,
        "plan": {name: value for name, value in plan.items() if value is not None},
        "kernel": model.kernel.name,
        "documents": len(scene.documents) - 1 if scene.documents else 1,
        "device": grid.device.type,
        "peak_bytes": sum(peak.values()),
        "peak_bytes_allocated": sum(peak.values()) - peak.get(ALLOCATOR, 0),
        "memory": peak,
        "fits": True,  # else it would not have come this far
    }


def predicted_seconds(scene: Scene, model: Model, gpu: Gpu) -> Seconds:
    """Seconds by part. Messages loop back through this GPU's memory, and no other rank shares its disk."""
    job, link = scene.job(model.spec, model.dtype, model.kernel.name), gpu.bandwidth / 2
    machine, disks = Machine(nodes=scene.axes.size, gpus=1, inside=link, across=link), count_devices(job.plan.folders)
    return predict_seconds(job, gpu, machine, max(disks, 1))


def _speed(scene: Scene, model: Model, seconds: dict[str, float]) -> dict[str, float | None]:
    """Speed of the layers that were rehearsed, with embedding, loss and optimizer."""
    step = seconds["forward"] + seconds["backward"] + seconds["optimizer"]
    rate = scene.tokens / step / scene.axes.context
    gpu = known_gpu(model.mesh.device, scene.hardware)
    attended = attended_length(scene.documents) if scene.documents else scene.tokens
    return {
        "seconds": step,
        "seconds_predicted": predicted_seconds(scene, model, gpu).step if gpu else None,
        **{f"{part}_seconds": taken for part, taken in seconds.items()},
        "tokens_per_second_per_gpu": rate,
        "mfu_causal": causal_mfu(model.spec, attended, rate, gpu.flops) if gpu else None,
    }


def _cap(device: torch.device, cap: int) -> None:
    if device.type != "cuda":
        raise PlanError(f"--cap {spell_bytes(cap)} is for a GPU, and there is none here: leave it out")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), device)
