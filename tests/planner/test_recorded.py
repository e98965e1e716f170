"""Predictions against what was seen on a GPU, as bench.rehearsals has recorded it."""

import json
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.owners import GRADIENTS
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.hardware import read_gpus
from ithaca.planner.machine import Machine
from ithaca.planner.memory import predict_memory
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan

RESULTS = Path(__file__).parents[2] / "bench" / "results"
GPU = read_gpus(RESULTS / "rates-h200.toml")["H200-141GB"]
POINTS = [
    row
    for kind in ("tuned", "fresh", "race", "long", "memory")
    for row in json.loads((RESULTS / f"rehearsals-{kind}.json").read_text())["results"]
]


@pytest.mark.parametrize("seen", POINTS, ids=lambda seen: seen["point"])
def test_memory(seen: dict[str, Any]) -> None:
    spec, mesh = read_spec(find_config(seen["model"])[0]), seen["mesh"]
    found = predict_memory(spec, Plan(**seen["plan"]), seen["tokens"], **mesh, present=seen["layers"])
    assert found.total == pytest.approx(seen["peak_bytes"], rel=0.05)


def test_gradients_at_the_end_of_a_tied_model() -> None:
    """A block's are still being reduced when the embedding's is added to the head's."""
    names = {"3B sweep, o recomputed, 256K of 8", "1B sweep 128K of 4", "3B sweep 1M of 8"}
    for seen in (row for row in POINTS if row["point"] in names):
        spec = read_spec(find_config(seen["model"])[0])
        found = predict_memory(spec, Plan(**seen["plan"]), seen["tokens"], **seen["mesh"], present=seen["layers"])
        assert (spec.tied, found.moment) == (True, "the embedding's gradient")
        assert found.parts[GRADIENTS] == pytest.approx(seen["memory"][GRADIENTS], rel=0.01)


@pytest.mark.parametrize("seen", [row for row in POINTS if "seconds" in row], ids=lambda seen: seen["point"])
def test_seconds(seen: dict[str, Any]) -> None:
    """Messages are looped back through the GPU's memory."""
    spec, mesh = read_spec(find_config(seen["model"])[0]).with_layers(seen["layers"]), seen["mesh"]
    machine = Machine(nodes=seen["ranks"], gpus=1, inside=GPU.bandwidth / 2, across=GPU.bandwidth / 2)
    plan, shared = Plan(**seen["plan"]), (mesh["ulysses"], mesh["ring"])
    found = predict_seconds(spec, plan, GPU, machine, seen["tokens"], *shared)
    assert found.step == pytest.approx(seen["seconds"], rel=0.12)
