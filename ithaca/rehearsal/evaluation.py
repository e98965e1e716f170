"""An evaluation rehearsed: one rank reads a prompt and decodes a few tokens of several continuations of it.

It is the evaluation of a run that trains: the optimizer's moments are there, and the tapes of training are not, since
tasks free them first (evaluate/long_context.py). Layers that do not run are held as memory, with their part of the K/V
cache.
"""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ithaca.assemble import Model
from ithaca.attention.kernels.choose import choose_kernel
from ithaca.evaluate.tasks import CANDIDATES
from ithaca.parallel.mesh import Mesh
from ithaca.rehearsal.kernel_bound import synchronize
from ithaca.rehearsal.memory_meter import Meter
from ithaca.rehearsal.rehearse import (
    begin_watching,
    describe_scene,
    prepare,
    seen_peak,
)
from ithaca.rehearsal.scene import Scene, held_spec, scene_source, scene_tokens
from ithaca.schedule.decode_cost import absent_in_evaluation, cache_place, evaluation_memory
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

CONTINUATIONS = CANDIDATES + 1  # of each prompt, as a task has them: the candidates and a greedy answer
NEW_TOKENS = 16


def run_evaluation_scene(scene: Scene, grid: Mesh) -> dict[str, Any]:
    """Read prompts of the scene's length and decode, once under a meter and once with a clock; report both."""
    spec = held_spec(scene)
    dtype = scene_source(scene, spec).compute_dtype(grid.device)
    job = scene.job(spec, dtype, choose_kernel(scene.plan.kernel, grid.device, dtype, spec.head_size).name)
    place = cache_place(job)
    prepared = prepare(scene, grid, Meter, partial(absent_in_evaluation, place=place), place)
    model, meter = prepared.model, prepared.meter
    tokens, _, documents = scene_tokens(scene, spec)
    begin_watching(meter, grid.device)
    with meter:
        _decode(model, tokens, documents)
    peak = seen_peak(meter, grid.device)
    seconds = {} if scene.memory_only else _decode(model, tokens, documents)
    prepared.held.clear()
    return describe_scene(scene, spec, model, peak) | _predicted(job, place, model.mesh.gpu) | seconds


def _decode(model: Model, tokens: Tensor, documents: Tensor | None) -> dict[str, float]:
    """Read a prompt in each row and decode. Return the seconds of reading and of one new token."""
    began = time.perf_counter()
    prompts = model.read_prompts(tokens, documents)
    synchronize(model.mesh.device)
    read = time.perf_counter()
    prompts.begin(CONTINUATIONS, NEW_TOKENS)
    feed = torch.zeros(prompts.rows * CONTINUATIONS, dtype=torch.int64, device=model.mesh.device)
    for _ in range(NEW_TOKENS):
        feed = prompts.step(feed).argmax(-1)
    synchronize(model.mesh.device)
    return {"reading_seconds": read - began, "token_seconds": (time.perf_counter() - read) / NEW_TOKENS}


def _predicted(job: Job, place: str, gpu: bool) -> dict[str, Any]:
    """Where the cache lives; the predicted peak by owner, and that of a training step under the same Plan, on a GPU."""
    predicted = evaluation_memory(job, place, CONTINUATIONS, NEW_TOKENS)
    return {
        "cache": place,
        "peak_bytes_predicted": predicted.total if gpu else None,
        "memory_predicted": predicted.parts if gpu else None,
        "host_bytes": predicted.host,
        "disk_bytes": predicted.disk,
        "training_peak_bytes_predicted": step_memory(job).total if gpu else None,
    }
