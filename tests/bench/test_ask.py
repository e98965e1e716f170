"""A measurement that hangs is ended in time, and one that dies is said."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ithaca.base.errors import RunError
from ithaca.bench import ask, child
from ithaca.planner.hardware import RUNTIME
from ithaca.rehearsal.scene import Scene
from tests.nursery import Nursery


def die(_: Any, __: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_: Any, __: Any) -> None:
    time.sleep(600)


def break_down(_: Any) -> dict[str, Any]:
    raise ValueError("too wide\nby far")


def in_turn(file: Path) -> None:
    """In a process of its own, with torch: children that die, hang and fail."""
    ask.context = lambda: multiprocessing.get_context("fork")
    said = []
    serve = child.serve
    child.serve = die
    said.append(str(ask.run_child({"kind": "machine"})))
    child.serve = hang
    began = time.monotonic()
    try:
        ask.run_child({"kind": "machine"}, 0.5)
    except ask.TimeIsUp:
        said.append(f"ended after {time.monotonic() - began:.0f} s")
    child.serve = serve
    child.KINDS["memory"] = break_down
    said.append(str(ask.run_child({"kind": "memory"})))
    said.append(str(ask.run_child({"kind": "memory", "model": "no-such"} | {"kind": "machine"})))
    file.write_text("\n".join(said))


@pytest.mark.parametrize(
    ("taken", "counts", "tried"),
    [
        ([5.3], 5.3, 1),  # two layers take less than two steps of one
        ([6.57, 5.3], 5.3, 2),
        ([5.61, 5.3], 5.3, 2),  # the second layer would take 2.87 s
        ([6.57, 6.6, 6.5, 5.3], 6.5, 3),
    ],
)
def test_a_disturbed_step_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, taken: list[float], counts: float, tried: int
) -> None:
    left = {1: iter([9.0, 2.74]), 2: iter(taken)}  # the first step of one layer warms up

    def run_scene(scene: Scene, _: Any) -> dict[str, Any]:
        assert scene.tokens == 512
        seconds = next(left[scene.layers])  # pyrefly: ignore
        return {"layers": scene.layers, "seconds": seconds, "peak_bytes": 1, "fits": True}

    monkeypatch.setattr(child, "run_scene", run_scene)
    monkeypatch.setattr(child, "loopback_mesh", lambda axes: SimpleNamespace(axes=axes, gpu=False))
    request = {"kind": "time", "model": "tiny", "plan": {"recipe": "ulysses"}, "axes": {"ulysses": 2}, "tokens": 512}
    found = child.time(request | {"layers": 2, "cap": 2**30, "hold": False})
    assert found["seconds"] == counts
    assert found["seconds_tried"] == taken[:tried]
    assert found["fewer_seconds"] == 2.74


def test_processes_that_do_not_answer(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(in_turn, tmp_path / "said")[0]
    assert end.code == 0, end.err
    died, hung, failed, refused = (tmp_path / "said").read_text().splitlines()
    assert "ended with code -9 and said nothing" in died
    assert hung in ("ended after 0 s", "ended after 1 s", "ended after 2 s")
    assert failed == "{'error': 'ValueError: too wide'}"
    assert "no-such" in refused


@pytest.mark.parametrize(("others", "refused"), [(0, False), (60, False), (62, True)])
def test_memory_of_other_programs_is_no_answer(monkeypatch: pytest.MonkeyPatch, others: int, refused: bool) -> None:
    """On a GPU of 141 GB under a cap of 80 GB, a row fails by itself only if the others leave that much."""
    free = 141 * 10**9 - others * 10**9 - 70 * 10**9 - RUNTIME
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 141 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70 * 10**9)
    if not refused:
        child._check_shared(torch.device("cuda"), 80 * 10**9)
        return
    with pytest.raises(RunError, match=r"other programs hold 62.0 GB .* cap of 80 GB: stop them, or give --cap 79GB"):
        child._check_shared(torch.device("cuda"), 80 * 10**9)
