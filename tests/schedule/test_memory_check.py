"""Which weights the check of a GPU's memory counts beside the tapes."""

import pytest
import torch

from ithaca.base.errors import PlanError
from ithaca.model.source import load_model
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.memory_check import NodeTapes, check_memory
from ithaca.tape.spec import device_bytes


def test_weights_for_rebuilt_x_are_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without gradients rebuilds no x: it fits where its tapes fit."""
    plan = Plan(recipe="sweep", chunk=64, x="host, rebuild*3")
    job = Job(spec=load_model("tiny").spec, plan=plan, tokens=256)
    evaluation = [tape for tape in job.tapes if not tape.training]
    assert job.costs.passing_bytes(job) > 0

    def check(tapes: list, free: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
        for name in ("memory_reserved", "memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)
        check_memory(job, tapes, torch.device("cuda"), NodeTapes(0, 1))

    check(evaluation, device_bytes(evaluation, job.tiles))
    with pytest.raises(PlanError, match="the GPU's free memory is"):
        check(evaluation, device_bytes(evaluation, job.tiles) - 1)
    with pytest.raises(PlanError, match="the GPU's free memory is"):
        check(job.tapes, device_bytes(job.tapes, job.tiles))


@pytest.mark.parametrize("kept", ["host", "device"])
def test_a_refusal_where_no_tape_lies_on_the_gpu(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing is for slots, which no shorter sequence makes smaller."""
    places = {"x": kept, "o": kept, "lse": kept, "residual": kept, "kv": kept}
    job = Job(spec=load_model("tiny").spec, plan=Plan(recipe="sweep", chunk=64, **places), tokens=256)
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 1000))
    wanted = "a smaller plan.chunk or plan.tile may help" if kept == "host" else "=host frees"
    with pytest.raises(PlanError, match=wanted):
        check_memory(job, job.tapes, torch.device("cuda"), NodeTapes(0, 1))
