"""Predictions against what was seen on a GPU, as bench.rehearsals has recorded it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ithaca.model.named import find_config
from ithaca.model.spec import read_spec
from ithaca.planner.hardware import read_gpus
from ithaca.planner.machine import Machine
from ithaca.planner.memory import predict_memory
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan

RESULTS = Path(__file__).parents[2] / "bench" / "results"
GPU = read_gpus(RESULTS / "rates-h200.toml")["H200-141GB"]
POINTS = [
    row
    for kind in ("tuned", "fresh", "memory")
    for row in json.loads((RESULTS / f"rehearsals-{kind}.json").read_text())["results"]
]


@pytest.mark.parametrize("seen", POINTS, ids=lambda seen: seen["point"])
def test_memory(seen: dict[str, Any]) -> None:
    spec, mesh = read_spec(find_config(seen["model"])[0]), seen["mesh"]
    found = predict_memory(spec, Plan(**seen["plan"]), seen["tokens"], **mesh, present=seen["layers"])
    assert found.total == pytest.approx(seen["peak_bytes"], rel=0.05)


@pytest.mark.parametrize("seen", [row for row in POINTS if "seconds" in row], ids=lambda seen: seen["point"])
def test_seconds(seen: dict[str, Any]) -> None:
    """Messages are looped back through the GPU's memory."""
    spec, mesh = read_spec(find_config(seen["model"])[0]).with_layers(seen["layers"]), seen["mesh"]
    machine = Machine(nodes=1, gpus=seen["ranks"], inside=GPU.bandwidth / 2, across=GPU.bandwidth / 2)
    plan, shared = Plan(**seen["plan"]), (mesh["ulysses"], mesh["ring"])
    found = predict_seconds(spec, plan, GPU, machine, seen["tokens"], *shared)
    assert found.step == pytest.approx(seen["seconds"], rel=0.12)
