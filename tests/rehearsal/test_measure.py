"""What `ithaca plan --measure` writes, with made-up figures in place of a GPU's."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.attention.kernels.seam import Kernel
from ithaca.model.families import read_spec
from ithaca.planner.hardware import HERE, read_gpus
from ithaca.plans.plan import Plan
from ithaca.rehearsal import measure
from ithaca.schedule.job import Job


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, on which kernels reach as many TFLOP/s as their names have letters, times their head size."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def rates(kernel: Kernel, head_size: int, *_: Any) -> tuple[float, float]:
        return len(kernel.name) * head_size * 1e12, len(kernel.name) * head_size * 5e11

    monkeypatch.setattr(measure, "attention_rates", rates)
    for name in ("host_rate", "bandwidth", "matmul_rate", "launch_rate"):
        monkeypatch.setattr(measure, name, lambda _: 1e10)


@pytest.mark.parametrize("missing", [None, "flash4"])
def test_the_file_has_every_kernel_that_runs(
    gpu: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    missing: str | None,
) -> None:
    def make(name: str) -> Any:
        return SimpleNamespace(name=name, refuses=lambda *_: "it is not here" if name == missing else None)

    monkeypatch.setattr(measure, "make_kernel", make)
    file = tmp_path / "rates.toml"
    assert measure.measure_here(file) == "H200-141GB"
    found, own = read_gpus(file)["H200-141GB"], read_gpus()["H200-141GB"]
    cudnn, flash4 = found.rates("cudnn+flash"), found.rates("flash4")
    assert cudnn is not None
    assert (cudnn.of(128), cudnn.of(64)) == ((11 * 128e12, 11 * 64e12), (11 * 64e12, 11 * 32e12))
    assert found.sources["attention.cudnn+flash.backward_64"] == found.sources["host"] == HERE
    assert found.host == found.launches == 1e10
    if missing:
        assert flash4 == own.rates("flash4")
    else:
        assert flash4 is not None
        assert flash4.of(64) == (6 * 64e12, 6 * 32e12)


def test_the_host_is_measured_by_steps_of_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many operations as the planner counts for them, over the seconds of a step."""
    monkeypatch.setattr(measure, "SMALL", measure.SMALL | {"num_hidden_layers": 2})
    steps = []

    def seconds(work: Callable[[], object], *_: Any) -> float:
        work()
        steps.append(work)
        return 0.25

    monkeypatch.setattr(measure, "fastest_seconds", seconds)
    spec = read_spec(measure.SMALL)
    job = Job(spec=spec, plan=Plan(checkpoint="none", zero=2), tokens=measure.SMALL_TOKENS)
    work = job.costs.work(job)
    assert measure.launch_rate(torch.device("cpu")) == pytest.approx(4 * (work.launches + work.python))
    assert len(steps) == 1
