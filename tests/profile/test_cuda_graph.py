"""A profile under `plan.cuda_graph`: memory is that of a step without a graph, times and lanes are of replays."""

import json
from dataclasses import replace
from pathlib import Path

from ithaca.profile import profile
from ithaca.rehearsal.rehearse import loopback_mesh
from ithaca.schedule.job import ONE_RANK
from tests.graphs import graphs_on_a_cpu, noting
from tests.nursery import Nursery
from tests.rehearsal.test_cuda_graph import GRAPH, LAYERS, SCENE


def profile_both(file: Path) -> None:
    """In a process of its own: the same scene launched one by one, and replayed."""
    graphs_on_a_cpu()
    said = list[str]()
    profile.run_step = noting(profile.run_step, said)
    grid = loopback_mesh(ONE_RANK)
    eager, _ = profile.profile_scene(replace(SCENE, plan=replace(GRAPH, cuda_graph=None)), grid)
    said.clear()
    found, _ = profile.profile_scene(SCENE, grid)
    file.write_text(json.dumps([eager, found, said]))


def test_what_is_watched_and_what_is_timed(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(profile_both, tmp_path / "found.json")[0]
    assert end.code == 0, end.err
    eager, found, said = json.loads((tmp_path / "found.json").read_text())
    assert said == ["eager, metered", "replay 1", "replay 2", "replay 3, profiled"]
    steps = ("seconds_with_memory_log", "seconds", "seconds_with_profiler")
    assert [found[name] for name in steps] == [3 * 1, 3 * 3, 3 * 4]  # the second step captures and is not told
    assert found["memory"] == eager["memory"]
    assert [each["phase"] for each in found["phases"]] == [each["phase"] for each in eager["phases"]]
    assert {each["layer"] for each in found["phases"]} == {None, *range(LAYERS)}
    assert found["plan"]["cuda_graph"] is True
