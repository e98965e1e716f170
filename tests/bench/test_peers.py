"""Sides that are measured in turn have the same weights: transformers here, DeepSpeed's pieces by a stand-in."""

import math
from pathlib import Path

import pytest

from ithaca.bench import peer_sides
from ithaca.bench.peer_names import ITHACA_PLANNED, ITHACA_SWEEP, LIGER, PACKAGES, PLAIN, TILED, WITH_ALST
from ithaca.bench.report import make_report
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from tests.bench.test_commands import answer, measured, only
from tests.nursery import Nursery

# DeepSpeed's tiled MLP and loss as its documentation describes them, without its memory savings
STAND_IN = """
import torch

class TiledMLP:
    @staticmethod
    def apply(fn, module, x, shards, parameters):
        assert len(parameters) == 3
        return torch.cat([fn(module, part) for part in x.chunk(shards, dim=-2)], dim=-2)

class TiledFusedLogitsLoss:
    @staticmethod
    def apply(fn, module, x, y, mask, shards, parameters, reduction):
        assert mask is None and reduction == "sum" and shards >= 1 and x.shape[:2] == y.shape
        parts = zip(x.flatten(0, 1).chunk(shards), y.flatten(0, 1).chunk(shards))
        return sum(fn(module, *part) for part in parts)
"""


def test_sides_in_turn(nursery: Nursery, tmp_path: Path) -> None:
    place = tmp_path / "packages" / "deepspeed" / "runtime" / "sequence_parallel"
    place.mkdir(parents=True)
    for folder in (place, place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    (place / "ulysses_sp.py").write_text(STAND_IN)
    words = ["peers", "tiny", "--tokens", "600", "--rounds", "2", "--path", "packages"]
    rows = measured(nursery, tmp_path, *words, *only("round 1", f"round 2: {ITHACA_SWEEP}"))
    assert [*rows] == [*(f"600 round 1: {side}" for side in PACKAGES), f"600 round 2: {ITHACA_SWEEP}"]
    found = {side: answer(rows[f"600 round 1: {side}"]) for side in PACKAGES}
    assert [side for side in PACKAGES if found[side]["ran"]] == [PLAIN, WITH_ALST, ITHACA_SWEEP]
    for side in (WITH_ALST, ITHACA_SWEEP):
        assert found[side]["first_loss"] == pytest.approx(found[PLAIN]["first_loss"], abs=1e-5)
        assert found[side]["seconds"] > 0
    assert found[PLAIN]["bytes_held"] == found[ITHACA_SWEEP]["bytes_held"]  # fp32 on a CPU
    for side in (LIGER, TILED):
        assert found[side]["why"].startswith("not run: ")
        assert found[side]["why"].endswith("pip install liger-kernel") or "need a GPU" in found[side]["why"]
    assert found[ITHACA_PLANNED]["why"] == "not run: the planner plans for GPUs"
    assert not rows[f"600 round 1: {LIGER}"].done  # tried again when the package is there
    page = make_report(tmp_path / "out")["results.md"]
    assert f"| 600 | {PLAIN} | " in page
    assert "not run: " in page


def test_a_side_whose_first_loss_is_wrong_has_no_time() -> None:
    spec = read_spec(PRESETS["tiny"])
    expected = math.log(spec.vocab) + spec.hidden * 0.02**2 / 2
    assert peer_sides._check_loss(expected + 0.2, spec) == expected + 0.2
    with pytest.raises(AssertionError, match="was expected of random weights"):
        peer_sides._check_loss(expected + 0.4, spec)
