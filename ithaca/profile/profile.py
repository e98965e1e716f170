"""A profile of one rank of a job: memory over time by owner, lanes, hidden states per operation, beside the prediction.

first step     the memory log watches it; it also warms up
second step    nothing watches: its seconds are the step's
third step     torch's profiler records lanes and trace
"""

import platform
from dataclasses import asdict
from typing import Any

import torch

from ithaca import __version__
from ithaca.assemble import Model
from ithaca.base.owners import ALLOCATOR, KERNELS
from ithaca.parallel.mesh import Mesh
from ithaca.planner.seconds import Seconds
from ithaca.profile.lanes import COMPUTE, DISK, EXCHANGE, HOST, Lanes, describe_lanes
from ithaca.profile.memory_log import MemoryLog
from ithaca.profile.operations import find_operation, multipliers
from ithaca.profile.record import Phases, Recording, record_lanes
from ithaca.profile.spans import thinned
from ithaca.profile.timeline import largest_at_peak, make_timeline, peak_bytes
from ithaca.rehearsal.rehearse import (
    loopback_mesh,
    predicted_seconds,
    prepare_step,
    run_step,
    with_allocator,
)
from ithaca.rehearsal.scene import Scene
from ithaca.rehearsal.this_gpu import known_gpu
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

BARS = 1500  # of a lane in the picture, at most
ON_GPU_ALONE = (KERNELS, ALLOCATOR)  # owners that a CPU does not have


def profile_scene(scene: Scene, grid: Mesh | None = None) -> tuple[dict[str, Any], Recording]:
    """Run the steps of a scene, by default looped back; return the profile and the trace."""
    grid = grid or loopback_mesh(scene.axes)
    prepared = prepare_step(scene, grid, lambda device, dtype: MemoryLog(device, dtype, find_operation))
    model, step = prepared.model, (prepared.model, prepared.optimizer, prepared.batch)
    log, phases = prepared.meter, Phases(prepared.meter.now_seconds)
    with model.eager(), log:
        watched = sum(run_step(*step, marks=phases).values())
    peak = with_allocator(peak_bytes(log), grid.device)
    prepared.clock.stop()
    if model.plan.cuda_graph:
        run_step(*step)  # captures
    seconds = run_step(*step)
    with record_lanes(grid.device, model.engine) as recording:
        profiled = sum(run_step(*step).values())
    job = scene.job(prepared.spec, model.dtype, model.kernel.name)
    gpu = known_gpu(grid.device, scene.hardware)
    predicted = predicted_seconds(scene, model, gpu) if gpu else None
    report = {
        **describe_model(model),
        "model": scene.model,
        "tokens": scene.tokens,
        "ranks": scene.axes.size,
        "mesh": scene.axes.grid,
        "layers": model.spec.layers,
        "model_layers": prepared.spec.layers,
        "documents": len(scene.documents) - 1 if scene.documents else 1,
        "looped_back": True,
        **memory_part(log, peak, job, phases),
        "seconds": sum(seconds.values()),
        **{f"{part}_seconds": taken for part, taken in seconds.items()},
        "seconds_predicted": predicted.step if predicted else None,
        "seconds_with_memory_log": watched,
        "seconds_with_profiler": profiled,
        **lanes_part(recording.lanes, predicted),
    }
    prepared.held.clear()
    return report, recording


def describe_model(model: Model) -> dict[str, Any]:
    """The profile's entries about the versions, the device and the model."""
    device = model.mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "ithaca": __version__,
        "torch": torch.__version__,
        "device": device.type,
        "device_name": name,
        "recipe": model.plan.recipe,
        "plan": {name: value for name, value in vars(model.plan).items() if value is not None},
        "kernel": model.kernel.name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def memory_part(log: MemoryLog, peak: dict[str, int], job: Job, phases: Phases) -> dict[str, Any]:
    """The profile's entries from the memory log. On a CPU nothing is predicted for owners that only a GPU has."""
    predicted = step_memory(job)
    parts = {
        owner: size for owner, size in predicted.parts.items() if KERNELS in peak or owner not in ON_GPU_ALONE
    }  # fmt: skip
    return {
        "peak_bytes": sum(peak.values()),
        "peak_bytes_predicted": sum(parts.values()),
        "peak_phase_predicted": predicted.phase,
        "memory": peak,
        "memory_predicted": parts,
        "hidden_state_bytes": job.hidden(job.block_tokens),
        "hidden_state_tokens": job.block_tokens,
        "local_tokens": job.layout.local,
        "operations": multipliers(log, job),
        "largest": largest_at_peak(log),
        "timeline": asdict(make_timeline(log)),
        "phases": phases.found,
    }


def lanes_part(lanes: Lanes, predicted: Seconds | None) -> dict[str, Any]:
    """The profile's entries from the trace."""
    described = describe_lanes(lanes)
    if predicted:
        described[COMPUTE]["predicted_seconds"] = predicted.computing
        described[EXCHANGE]["predicted_seconds"] = predicted.exchange + predicted.weights
        described[HOST]["predicted_seconds"] = predicted.copies - predicted.disk
        described[DISK]["predicted_seconds"] = predicted.disk
    began = lanes.step[0]
    bars = {
        lane: [
            [round((start - began) / 1e6, 7), round((end - began) / 1e6, 7)]
            for start, end in thinned(lanes.spans(lane), BARS)
        ]
        for lane in lanes.work
    }
    return {"lanes_seconds": lanes.seconds, "lanes": described, "bars": bars}
