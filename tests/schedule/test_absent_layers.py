"""What is held for layers that a rehearsal leaves out is what a model of all layers holds beyond one of some."""

from typing import Any

import pytest

from ithaca.base.owners import BLOCKS, GATHERED, GRADIENTS, STATES, TAPES
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.axes import Axes
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
        ({"recipe": "dense", "optimizer": "host"}, {BLOCKS: 2 * T * E * 4, STATES: 2 * BLOCK * 4}),
        ({"recipe": "sweep"}, {TAPES: 2 * T * HEADS * 4}),
        ({"recipe": "sweep", "x": "device"}, {TAPES: 2 * T * (E + HEADS) * 4}),
    ],
)
def test_two_of_four(plan: dict[str, Any], kept: dict[str, int]) -> None:
    found = absent(2, **plan)
    states = {STATES: 2 * BLOCK * 12, GRADIENTS: 2 * BLOCK * 4}
    assert found == states | kept


@pytest.mark.parametrize(("ranks", "itemsize", "copied"), [(1, 2, 2), (1, 4, 0), (2, 2, 2), (2, 4, 4)])
@pytest.mark.parametrize("recipe", ["dense", "sweep"])
def test_copies_of_the_weights(recipe: str, ranks: int, itemsize: int, copied: int) -> None:
    """ZeRO-1 and 2 hold them for the whole step; one rank copies none that have the dtype of the computation."""
    for zero, wanted in ((1, copied), (2, copied), (3, 0)):
        job, running = (
            Job(spec=spec, plan=Plan(recipe=recipe, zero=zero), tokens=T, itemsize=itemsize, axes=Axes(shard=ranks))
            for spec in (SPEC, SPEC.with_layers(2))
        )
        assert absent_layers(job, running)[GATHERED] == 2 * BLOCK * wanted


def test_the_last_layers_are_left_out() -> None:
    assert absent(3, recipe="dense", x="host, device")[BLOCKS] == T * E * 4
    assert absent(3, recipe="dense", x="device, host").get(BLOCKS, 0) == 0
