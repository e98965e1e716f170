"""A rehearsal under `plan.cuda_graph`: which steps are watched, which are timed, and whose peak is told."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.base.owners import ALLOCATOR, KERNELS
from ithaca.plans.plan import Plan
from ithaca.rehearsal import rehearse
from ithaca.rehearsal.fake_kernels import TimedKernel
from ithaca.rehearsal.scene import Scene
from ithaca.schedule.job import ONE_RANK
from tests.graphs import graphs_on_a_cpu, noting
from tests.nursery import Nursery

RESERVED = 10**9
LAYERS = 2
GRAPH = Plan(recipe="dense", zero=2, checkpoint="none", cuda_graph=True)
SCENE = Scene(model="tiny", plan=GRAPH, tokens=128, layers=LAYERS, documents=(0, 32, 128), repeats=3)


def run_scene(changes: dict[str, Any], file: Path) -> None:
    """In a process of its own: the same scene launched one by one, and replayed."""
    graphs_on_a_cpu()
    said, now = list[str](), 0

    def reserved() -> int:
        said.append("reserved")
        return RESERVED

    def tick(_: object) -> int:
        nonlocal now
        now += 1 + len(said)  # a call of attention takes a second in the first step, and longer ones later
        return now

    torch.cuda.empty_cache = lambda: said.append("empty cache")
    torch.cuda.reset_peak_memory_stats = lambda: said.append("new peak")  # pyrefly: ignore
    torch.cuda.max_memory_reserved = reserved  # pyrefly: ignore
    TimedKernel._now = tick
    rehearse.run_step = noting(rehearse.run_step, said)
    grid, scene = rehearse.loopback_mesh(ONE_RANK), replace(SCENE, **changes)
    eager = rehearse.run_scene(replace(scene, plan=replace(GRAPH, cuda_graph=None)), grid)
    said.clear()
    file.write_text(json.dumps([eager, rehearse.run_scene(scene, grid), said]))


def played(nursery: Nursery, folder: Path, **changes: Any) -> Any:
    end = nursery.job(run_scene, changes, folder / "found.json")[0]
    assert end.code == 0, end.err
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("once", [False, True])
def test_replays_are_timed_and_the_peak_is_that_of_the_capture(nursery: Nursery, tmp_path: Path, once: bool) -> None:
    """A replay allocates nothing that a meter sees, so a step without a graph is watched also if steps are long."""
    eager, found, said = played(nursery, tmp_path, once=once)
    watched = ["eager, metered", "empty cache", "new peak"]
    assert said == [*watched, "replay 1", "replay 2", "replay 3", "replay 4", "reserved"]
    assert found["seconds"] == 3 * 4  # the median of steps 3, 4 and 5, in three parts each
    assert found["attention_seconds"] == 2 * LAYERS  # the calls of the watched step alone
    assert found["peak_bytes"] == RESERVED
    owners = {owner: size for owner, size in found["memory"].items() if owner != ALLOCATOR}
    assert owners
    assert found["memory"][ALLOCATOR] == RESERVED - sum(owners.values())
    if not once:  # else nothing has watched the other one
        assert owners == eager["memory"]


def test_memory_alone_is_that_of_the_watched_step(nursery: Nursery, tmp_path: Path) -> None:
    eager, found, said = played(nursery, tmp_path, memory_only=True)
    assert said == ["eager, metered"]
    assert found["memory"] == eager["memory"]
    assert "seconds" not in found


def test_what_the_allocator_kept_of_the_watched_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 100)
    watched = {"blocks": 40, KERNELS: 20, ALLOCATOR: 30}
    assert rehearse.graph_peak(watched) == {"blocks": 40, KERNELS: 20, ALLOCATOR: 40}
