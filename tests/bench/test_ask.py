"""A measurement that hangs is ended in time, and one that dies is said."""

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from ithaca.bench import ask, child
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


def test_processes_that_do_not_answer(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(in_turn, tmp_path / "said")[0]
    assert end.code == 0, end.err
    died, hung, failed, refused = (tmp_path / "said").read_text().splitlines()
    assert "ended with code -9 and said nothing" in died
    assert hung in ("ended after 0 s", "ended after 1 s", "ended after 2 s")
    assert failed == "{'error': 'ValueError: too wide'}"
    assert "no-such" in refused
