"""The log of a step's memory: its peak is the meter's and the prediction's, and every byte has an owner and a line."""

import json
import re
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import ithaca.profile.operations as of
from ithaca.base.owners import ATTENTION, BATCH, BLOCKS, GRADIENTS, HOST, KEYS, TAPES, owned_by
from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.profile import profile
from ithaca.profile.memory_log import PACKAGE, Allocation, Change, MemoryLog
from ithaca.profile.operations import find_operation, held_by_operations
from ithaca.profile.timeline import _on_device, _snapshots, largest_at_peak, make_timeline, peak_bytes
from ithaca.rehearsal.rehearse import loopback_mesh, run_scene
from ithaca.rehearsal.scene import Scene
from ithaca.schedule.step_memory import phases, resident
from tests.nursery import Nursery

SCENES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sweep": ({"recipe": "sweep", "chunk": 128}, {"ulysses": 4}),
    "ulysses": ({"recipe": "ulysses"}, {"ulysses": 4}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
    "tensor": ({"recipe": "tensor"}, {"tensor": 2}),
}


def log_of() -> MemoryLog:
    return MemoryLog(torch.device("cpu"), torch.float32, find_operation)


def profiled(name: str, file: Path) -> None:
    """In a process of its own: the profile of a scene, a meter's peak of the same, and moments of the log."""
    words, axes = SCENES[name]
    scene = Scene(model="tiny", plan=Plan(**words), tokens=512, layers=2, axes=Axes(**axes))
    grid, logs = loopback_mesh(scene.axes), []
    make_part = profile.memory_part

    def keep(log: MemoryLog, peak: dict[str, int], job: Any, marks: Any) -> dict[str, Any]:
        logs.append((log, job))
        return make_part(log, peak, job, marks)

    profile.memory_part = keep  # pyrefly: ignore
    report, _ = profile.profile_scene(scene, grid)
    ((log, job),) = logs
    changes = _on_device(log)
    begins = next(
        index for index, change in enumerate(changes) if log.allocations[change.number].operation == of.BACKWARD
    )
    (held,) = _snapshots(log, changes, [begins])
    wanted = resident(job) + dict(phases(job))["attention of the last block"]
    meter = {owner: size for owner, size in log.peak.items() if size > 0 and owner != HOST}
    metered = run_scene(scene, grid)["memory"]
    file.write_text(
        json.dumps({"report": report, "held": held, "wanted": wanted, "meter": meter, "run_scene": metered})
    )


@pytest.fixture(scope="module", params=SCENES)
def found(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("profile") / "found.json"
    end = nursery.job(profiled, request.param, file)[0]
    assert end.code == 0, end.err
    return json.loads(file.read_text()) | {"name": request.param}


def test_the_peak_is_the_meters(found: dict[str, Any]) -> None:
    report, line = found["report"], found["report"]["timeline"]
    assert report["memory"] == found["meter"] == found["run_scene"]
    peak = {owner: sizes[line["peak"]] for owner, sizes in line["owners"].items() if sizes[line["peak"]]}
    assert peak == report["memory"]
    totals = [sum(sizes) for sizes in zip(*line["owners"].values(), strict=True)]
    assert max(totals) == totals[line["peak"]] == report["peak_bytes"]
    assert line["seconds"] == sorted(line["seconds"])
    assert len(line["seconds"]) <= 2000


def test_owners_are_the_predictions(found: dict[str, Any]) -> None:
    """When the last block's attention begins to go backward: all that does not hang on a CPU's kernels."""
    held, wanted, report = Counter(found["held"]), Counter(found["wanted"]), found["report"]
    for owner in (KEYS, TAPES, BATCH, GRADIENTS):
        assert held[owner] == wanted[owner], owner
    assert report["memory_predicted"].keys() >= {"states", "blocks", "gradients"}
    assert "allocator" not in report["memory_predicted"]  # of which this CPU has none
    at_peak, predicted = report["memory"], report["memory_predicted"]
    for owner in (KEYS, TAPES, BATCH):
        assert at_peak.get(owner, 0) == predicted.get(owner, 0), owner


def test_operations_hold_what_is_predicted(found: dict[str, Any]) -> None:
    rows = {row["operation"]: row for row in found["report"]["operations"]}
    wanted = {of.PROJECTION, of.FORWARD, of.BACKWARD, of.MLP, of.POST_BACKWARD, of.OF_LOSS, of.HEAD_GRADIENT, of.SUMS}
    assert wanted <= rows.keys()
    assert (of.EXCHANGING in rows) == (found["name"] != "dense")
    assert rows[of.PROJECTION]["published"] == 3
    assert rows[of.BACKWARD]["published"] == 8
    for row in rows.values():
        assert 0 < row["made_bytes"] <= row["bytes"]
        assert row["hidden_states"] == row["bytes"] / found["report"]["hidden_state_bytes"]
    # A CPU's kernels take other workspace, and its MLP is not fused
    for name in (of.BACKWARD, of.POST_BACKWARD):
        assert rows[name]["bytes"] == pytest.approx(rows[name]["predicted_bytes"], rel=0.5)
    assert rows[of.HEAD_GRADIENT]["bytes"] == pytest.approx(rows[of.HEAD_GRADIENT]["predicted_bytes"], rel=0.01)


def test_the_largest_tensors_have_a_line(found: dict[str, Any]) -> None:
    rows = found["report"]["largest"]
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    assert sum(row["bytes"] for row in rows) <= found["report"]["peak_bytes"]
    for row in rows:
        assert row["places"], row
        for place in row["places"]:
            name, line, function = re.fullmatch(r"([\w/]+\.py):(\d+) ([\w<>]+)", place).groups()  # pyrefly: ignore
            assert int(line) <= len(Path(PACKAGE, name).read_text().splitlines())
            assert function
    sums = next(row for row in rows if row["operation"] == of.SUMS)
    assert sums["places"][0].startswith("model/linear.py:")
    assert sums["owner"] == BLOCKS


def test_a_log_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors that overlap: the peak has both, and the host's are left out. A second passes at every change."""
    log, seconds = log_of(), count(1.0)
    monkeypatch.setattr(log, "now_seconds", lambda: next(seconds))
    with log, owned_by(TAPES):
        before = torch.empty(100)
    log.restart()
    with log:
        with owned_by(HOST):
            host = torch.empty(9999)
        with owned_by(ATTENTION):
            q = torch.empty(50, 2)
        with owned_by(BLOCKS):
            x = torch.empty(300)
        del q
    del x, host  # after the step: no moment of it
    assert peak_bytes(log) == {BLOCKS: 1200, TAPES: 400, ATTENTION: 400}
    line = make_timeline(log, 10)
    assert line.owners == {BLOCKS: [0, 0, 1200, 1200], TAPES: [400] * 4, ATTENTION: [0, 400, 400, 0]}
    assert line.peak == 2
    assert [(row["owner"], row["shape"]) for row in largest_at_peak(log)] == [
        (BLOCKS, [300]),
        (TAPES, [100]),
        (ATTENTION, [50, 2]),
    ]
    assert before.nbytes == 400


def test_thinning_keeps_the_peak() -> None:
    """Of ten thousand changes a hundred points stay; a needle of one change is among them."""
    log = log_of()
    log.allocations = [Allocation((1,), "float32", (), None, False)] * 10001
    sizes = [1 if number % 2 == 0 else -1 for number in range(10000)]
    sizes[5432], sizes[5433] = 1000, -1000
    log.changes = [Change(number / 1e4, number, BLOCKS, size) for number, size in enumerate(sizes)]
    line = make_timeline(log, 100)
    assert len(line.seconds) <= 100
    assert (line.owners[BLOCKS][line.peak], line.seconds[line.peak]) == (1000, 0.5432)
    assert line.owners[BLOCKS][0] == line.owners[BLOCKS][-1] == 0


def test_an_operations_peak_by_hand() -> None:
    """What others hold counts as alive; sums of weights and what was there before do not."""
    log = log_of()
    log.allocations = [
        Allocation((1,), "float32", (), of.SUMS, False),
        Allocation((1,), "float32", (), of.PROJECTION, False),
        Allocation((1,), "float32", (), of.BACKWARD, False),
        Allocation((1,), "float32", (), of.BACKWARD, True),
        Allocation((1,), "float32", (), of.BACKWARD, False),
    ]
    moves = [(0, 500), (1, 30), (2, 8), (3, 999), (1, -30), (4, 9)]
    log.changes = [Change(float(at), number, BLOCKS, size) for at, (number, size) in enumerate(moves)]
    held = {each.operation: (each.alive, each.made) for each in held_by_operations(log)}
    assert held == {of.SUMS: (500, 500), of.PROJECTION: (30, 30), of.BACKWARD: (38, 8)}


def test_the_chart_keeps_the_most_of_each_stretch() -> None:
    """Bytes that go up and down within each stretch stay at their top."""
    log = log_of()
    log.allocations = [Allocation((1,), "float32", (), None, False)]
    sizes = [5, -5] * 500
    log.changes = [Change(number / 1e3, 0, BLOCKS, size) for number, size in enumerate(sizes)]
    line = make_timeline(log, 50)
    assert line.owners[BLOCKS][1:-1] == [5] * (len(line.seconds) - 2)
    assert 40 <= len(line.seconds) <= 50
