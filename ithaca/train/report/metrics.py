"""The metrics of a step, the peak FLOP/s that MFU divides by, and the sentence about an out-of-memory error."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch

from ithaca.assemble import Model
from ithaca.parallel.balance import RingWork, ring_work
from ithaca.parallel.batch import Batch
from ithaca.planner.answer.advice import out_of_memory
from ithaca.planner.hardware import peak_flops
from ithaca.schedule.job import Job
from ithaca.train.report.unlearned import with_labels


def step_metrics(
    model: Model, step: int, batches: list[Batch], seconds: float, peak: float | None, before: int = 0
) -> dict[str, Any]:
    """Return the metrics of a step beside its loss; `peak`: FLOP/s that MFU divides by.

    `step`: its number in its stage, or in a run without stages. `before`: tokens of the stages before it.
    """
    ranks, tokens = model.mesh.size, sum(batch.total_tokens for batch in batches)
    learned = with_labels(batches)
    flops = sum(model.spec.flops_per_token(batch.attended) * batch.total_tokens for batch in learned)
    return {
        "tokens": before + step * tokens,
        "labels": sum(batch.valid_tokens for batch in batches),
        "seconds": round(seconds, 4),
        "tokens_per_second_per_rank": round(sum(batch.total_tokens for batch in learned) / seconds / ranks, 1),
        "mfu_causal": round(flops / seconds / ranks / peak, 4) if peak else None,
        "gpu_bytes": torch.cuda.max_memory_reserved() if model.mesh.gpu else None,
        "host_bytes": psutil.Process().memory_info().rss,
    }


def step_ring_work(model: Model, batches: Sequence[Batch]) -> RingWork | None:
    """Return how the attention work of this rank's sequences spreads over its ring; None without a ring or work."""
    batches = with_labels(batches)
    if model.mesh.ring == 1 or not batches:
        return None
    return sum((ring_work(batch.layout, batch.bounds, model.plan.sweeps) for batch in batches), RingWork([]))


def gpu_peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s that MFU divides by; None on a CPU and for a GPU that no table describes."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return peak_flops(properties.name, properties.total_memory)


def explain_out_of_memory(model: Model, rows: int, tokens: int, error: Exception) -> str:
    """Return what torch could not allocate in passes of `rows` sequences, and which options take less."""
    grid, sequences = model.mesh, math.ceil(rows / model.mesh.data_ranks)
    axes = replace(grid.axes, replicate=1)
    job = Job(spec=model.spec, plan=model.plan, tokens=sequences * tokens, axes=axes)
    first = next((words for words in str(error).split(". ") if "Tried" in words), str(error).split(". ")[0])
    total = torch.cuda.mem_get_info(grid.device)[1]
    return out_of_memory(job, first, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total)
