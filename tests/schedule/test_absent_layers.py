"""What is held for layers that a rehearsal leaves out is what a model of all layers holds beyond one of some."""

from typing import Any

import pytest

from ithaca.base.owners import BLOCKS, GATHERED, GRADIENTS, STATES, TAPES
from ithaca.model.presets import PRESETS
from ithaca.model.spec import read_spec
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import absent_layers

SPEC = read_spec(PRESETS["tiny"])  # 4 layers, in fp32 on a CPU
T, E, Q, HEADS = 96, 256, 256, 8
BLOCK = sum(SPEC.with_layers(count).parameters() * sign for count, sign in ((2, 1), (1, -1)))


def absent(layers: int, **plan: Any) -> dict[str, int]:
    """In fp32, by owner."""
    job, running = (
        Job(spec=spec, plan=Plan(**plan), tokens=T, itemsize=4) for spec in (SPEC, SPEC.with_layers(layers))
    )
    return {owner: size for owner, size in absent_layers(job, running).items() if size}


def test_all_layers_leave_nothing_out() -> None:
    assert absent(4) == {}


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        ({"recipe": "dense"}, {BLOCKS: 2 * T * E * 4}),
        ({"recipe": "dense", "checkpoint": "selective"}, {BLOCKS: 2 * T * (E + Q + HEADS) * 4}),
        ({"recipe": "dense", "zero": 2}, {BLOCKS: 2 * T * E * 4, GATHERED: 2 * BLOCK * 4}),
        ({"recipe": "dense", "optimizer": "host"}, {BLOCKS: 2 * T * E * 4, STATES: 2 * BLOCK * 4}),
        ({"recipe": "sweep"}, {TAPES: 2 * T * HEADS * 4}),
        ({"recipe": "sweep", "x": "device", "zero": 1}, {TAPES: 2 * T * (E + HEADS) * 4, GATHERED: 2 * BLOCK * 4}),
    ],
)
def test_two_of_four(plan: dict[str, Any], kept: dict[str, int]) -> None:
    found = absent(2, **plan)
    states = {STATES: 2 * BLOCK * 12, GRADIENTS: 2 * BLOCK * 4}
    assert found == states | kept


def test_the_last_layers_are_left_out() -> None:
    assert absent(3, recipe="dense", x="host, device")[BLOCKS] == T * E * 4
    assert absent(3, recipe="dense", x="device, host").get(BLOCKS, 0) == 0
