"""A rehearsed rank takes the memory that a real one does, and says who holds it."""

import json
from pathlib import Path
from typing import Any

import pytest

import ithaca
from ithaca.planner.rehearse import Scene, play
from tests.nursery import Nursery

SCENES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sweep": ({"recipe": "sweep", "chunk": 512, "tile": 100}, {"ulysses": 2, "ring": 2}),
    "sweep-device": ({"recipe": "sweep", "chunk": 512, "x": "device", "o": "device"}, {"ulysses": 4}),
    "untied": ({"recipe": "untied", "tile": 100}, {"ulysses": 4}),
    "hybrid": ({"recipe": "hybrid"}, {"ulysses": 2, "ring": 2}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
}


def real(name: str) -> dict[str, int]:
    """What a rank of four, which are all there, holds when it holds most."""
    plan, axes = SCENES[name]
    scene = Scene(model="tiny", plan=ithaca.Plan(**plan), tokens=2048, layers=2, **axes)
    return play(scene, ithaca.mesh(**axes))["memory"]


def rehearsed(nursery: Nursery, folder: Path, name: str, *words: str) -> dict[str, Any]:
    plan, axes = SCENES[name]
    options = {f"plan.{key}": value for key, value in plan.items()} | {
        f"mesh.{key}": size for key, size in axes.items()
    }
    sets = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    end = nursery.command(
        "rehearse", "tiny", "--ranks", "4", "--tokens", "2048", "--layers", "2", "--json", *sets, *words, folder=folder
    )
    assert end.code == 0, end.err
    return json.loads(end.out)


@pytest.mark.parametrize("name", SCENES)
def test_memory_is_that_of_a_real_rank(ranks, nursery: Nursery, tmp_path: Path, name: str) -> None:
    found, wanted = rehearsed(nursery, tmp_path, name), ranks(4).run(real, name)[0]
    assert found["peak_bytes"] == sum(found["memory"].values())
    assert found["seconds"] > found["attention_seconds"] > 0
    # gloo's threads let go of a message a moment after it has arrived
    assert found["memory"].pop("exchange", 0) == pytest.approx(wanted.pop("exchange", 0), rel=0.15)
    assert found["memory"] == wanted


def test_memory_only(nursery: Nursery, tmp_path: Path) -> None:
    """The same, but for attention; and a length whose host tapes this machine could not hold."""
    words = ["--set", "plan.kernel=naive"]
    whole, short = (rehearsed(nursery, tmp_path, "sweep", *words, *more) for more in ((), ("--memory-only",)))
    assert "seconds" not in short
    for owner in ("states", "K and V", "tapes", "gathered weights"):
        assert short["memory"][owner] == whole["memory"][owner]
    assert short["host_bytes"] == whole["host_bytes"]
