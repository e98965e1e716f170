"""Checkpoints and export of one rank without FSDP2 (ZeRO-2) are those of one rank with it (ZeRO-3)."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ithaca
from ithaca.config import Config
from ithaca.train.folder.export import export
from tests.nursery import Nursery
from tests.train.test_unlearned import masked, metrics, same, state

PARTS = ((1, 2), (2, 4), (1, 6))  # ranks, and the step that they stop after


@pytest.mark.parametrize("place", ["device", "host"])
def test_resumed_on_two_ranks_and_back(nursery: Nursery, small_config: Config, tmp_path: Path, place: str) -> None:
    options = replace(small_config.train, steps=PARTS[-1][1], micro_batch=2, learning_rate=0.01)
    often = replace(small_config, train=options, run=replace(small_config.run, checkpoint_every=2, keep=99))
    runs = {zero: tmp_path / f"zero {zero}" for zero in (2, 3)}
    for zero, run in runs.items():
        for ranks, _ in PARTS:
            plan = ithaca.Plan(zero=zero if ranks == 1 else 3, optimizer=place)
            for end in nursery.job(masked, replace(often, plan=plan), run, {}, 2, ranks=ranks):
                assert end.code == 0, end.err
        export(run, run / "exported", None)
    found, wanted = runs.values()
    assert [line[0] for line in metrics(found)] == [1, 2, 3, 4, 5, 6]
    assert metrics(found) == metrics(wanted)
    for _, step in PARTS:
        assert same(state(found, step), state(wanted, step))
    exported, twin = (load_file(run / "exported" / "model.safetensors") for run in runs.values())
    assert same(exported, twin)
