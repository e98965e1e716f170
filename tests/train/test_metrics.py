"""The numbers that a step reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.train.report.metrics import gpu_peak_flops, step_metrics


def mfu(monkeypatch: pytest.MonkeyPatch, gpu: str) -> float | None:
    """Causal MFU of a step of 2e12 FLOPs in 0.1 seconds on 2 GPUs of this name."""
    properties = SimpleNamespace(name=gpu, total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    grid = SimpleNamespace(size=2, gpu=True)
    model: Any = SimpleNamespace(mesh=grid, spec=SimpleNamespace(flops_per_token=lambda _: 2e9))
    peak = gpu_peak_flops(torch.device("cuda"))
    # A pass without labels is left out, so its tokens are no work
    batches: Any = [SimpleNamespace(total_tokens=1000, attended=1.0, valid_tokens=valid) for valid in (7, 0)]
    found = step_metrics(model, 1, batches, 0.1, peak)
    assert (found["tokens"], found["labels"], found["tokens_per_second_per_rank"]) == (2000, 7, 5000)
    return found["mfu_causal"]


def test_mfu_is_measured_against_the_peak_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mfu(monkeypatch, "NVIDIA H100 80GB HBM3") == pytest.approx(1e13 / 989e12, abs=1e-4)
    assert mfu(monkeypatch, "NVIDIA A100-SXM4-80GB") == pytest.approx(1e13 / 312e12, abs=1e-4)
    assert mfu(monkeypatch, "NVIDIA Quantum 9000") is None
    assert gpu_peak_flops(torch.device("cpu")) is None
