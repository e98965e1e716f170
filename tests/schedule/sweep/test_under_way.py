"""What chunks that wait for messages hold while another one attends, against what the sweep's cost says of it."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.kernels.seam import Kernel
from ithaca.base.owners import ATTENTION, EXCHANGE
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.axes import Axes
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import mesh
from ithaca.plans.plan import Plan
from ithaca.rehearsal import rehearse
from ithaca.rehearsal.fake_kernels import FakeKernel
from ithaca.rehearsal.memory_meter import Meter
from ithaca.schedule.job import Job
from tests.nursery import Nursery

TOKENS, CHUNK, AXES = 2048, 128, Axes(ulysses=4)
FULL = 5  # chunks after which as many are under way as can be
PLANS = {
    "saved": Plan(recipe="sweep", chunk=CHUNK),
    "recomputed": Plan(recipe="sweep", chunk=CHUNK, o="recompute"),
}


def watch(plan: Plan, file: Path) -> None:
    """Rehearse in a process of its own; write what was held whenever a chunk of the last layer began to attend back."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # a virtual CPU may announce instructions that it does not have
    seen: list[Counter[str]] = []

    class Watching(FakeKernel):
        def __init__(self, kernel: Kernel, meter: Meter):
            super().__init__(kernel)
            self._meter = meter

        def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            if args[6].causal:  # its own tile comes first
                seen.append(Counter(self._meter.now))
            return super().backward(*args)

    start_loopback(AXES.size)
    scene = rehearse.Scene(
        model="tiny", plan=plan, tokens=TOKENS, layers=1, memory_only=True, axes=AXES, dtype="bfloat16"
    )
    rehearse.run_scene(scene, mesh(ulysses=AXES.ulysses), watch=Watching)
    dist.destroy_process_group()
    file.write_text(json.dumps(seen))


@pytest.mark.parametrize("name", PLANS)
def test_what_is_under_way(nursery: Nursery, tmp_path: Path, name: str) -> None:
    end = nursery.job(watch, PLANS[name], tmp_path / "seen.json")[0]
    assert end.code == 0, end.err
    seen = json.loads((tmp_path / "seen.json").read_text())
    job = Job(spec=read_spec(PRESETS["tiny"]), plan=PLANS[name], tokens=TOKENS, axes=AXES)
    assert len(seen) == job.chunks
    # Kernels have made nothing of this chunk yet. The log-sum-exps of three chunks are too little to be counted
    lses = 3 * job.own_lse() if name == "recomputed" else 0
    for held in seen[FULL:-FULL]:
        assert held[EXCHANGE] + held.get(ATTENTION, 0) - lses == job.costs.peaks(job)["attention"][EXCHANGE]
