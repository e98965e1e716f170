"""What `ithaca plan --measure` writes, with made-up figures in place of a GPU's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.attention.kernels.seam import Kernel
from ithaca.planner.hardware import HERE, read_gpus
from ithaca.rehearsal import measure


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, on which kernels reach as many TFLOP/s as their names have letters, times their head size."""
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def rates(kernel: Kernel, head_size: int, *_: Any) -> tuple[float, float]:
        return len(kernel.name) * head_size * 1e12, len(kernel.name) * head_size * 5e11

    monkeypatch.setattr(measure, "attention_rates", rates)
    for name in ("host_rate", "bandwidth", "matmul_rate"):
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
    assert found.host == 1e10
    if missing:
        assert flash4 == own.rates("flash4")
    else:
        assert flash4 is not None
        assert flash4.of(64) == (6 * 64e12, 6 * 32e12)
