"""Processes that encode: results in order, errors as they were raised, and an end when a process is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ithaca.base.errors import DataError, RunError
from ithaca.data.preparation.partial import Partial
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
from ithaca.data.preparation.workers import Workers
from ithaca.data.reader import open_tokens


def _slow_when_even(number: int) -> tuple[int, int]:
    time.sleep(0.02 * (number % 2 == 0))
    return number * number, os.getpid()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_come_in_order(count: int) -> None:
    with Workers(_slow_when_even, count) as workers:
        found = list(workers.map(range(20), here=lambda number: number == 7))
    assert [(task, result) for task, (result, _) in found] == [(number, number**2) for number in range(20)]
    processes = {process for _, (_, process) in found}
    assert (os.getpid() in processes, len(processes) <= count + 1) == (True, True)  # the seventh was worked on here
    assert count == 0 or len(processes) > 1
    assert not [child for child in psutil.Process().children() if child.pid in processes]


def _odd_only(number: int) -> int:
    if number % 2 == 0:
        raise DataError(f"{number} is even")
    return number


def test_an_error_comes_at_its_place() -> None:
    with Workers(_odd_only, 2) as workers:
        results = workers.map([1, 3, 5, 4, 7], here=lambda _: False)
        assert [next(results) for _ in range(3)] == [(1, 1), (3, 3), (5, 5)]
        with pytest.raises(DataError, match=r"^4 is even$"):
            next(results)


def test_an_error_of_the_tasks_comes_behind_the_results_before_it() -> None:
    def tasks():
        yield from (1, 3)
        raise DataError("no third")

    with Workers(_odd_only, 2) as workers:
        results = workers.map(tasks(), here=lambda _: False)
        assert [next(results), next(results)] == [(1, 1), (3, 3)]
        with pytest.raises(DataError, match="no third"):
            next(results)


def _die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_process_is_one_sentence() -> None:
    with Workers(_die, 2) as workers:
        results = workers.map(range(9), here=lambda _: False)
        assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
        sentence = (
            r"a process that prepares data has ended \(exit code -9; .* run the same command again, which continues"
        )
        with pytest.raises(RunError, match=sentence):
            next(results)


_PROGRAM = """
import sys, time
from pathlib import Path
from ithaca.data.preparation import tasks
from ithaca.data.preparation.prepare import prepare
from ithaca.data.preparation.tokenizer import load_tokenizer
source, out, tokenizer = map(Path, sys.argv[1:])
work = tasks.Job._encode_group
tasks.Job._encode_group = lambda self, items: (time.sleep(0.02), work(self, items))[1]
try:
    prepare([source], out, load_tokenizer(tokenizer), journal_seconds=0, group_bytes=1, workers=2)
except Exception as problem:
    sys.exit(str(problem))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"the sea {number}"}) for number in range(400)))
    return path


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_killed_and_continued_to_the_same_bytes(source: Path, tmp_path: Path, bpe: Path, victim: str) -> None:
    prepare([source], tmp_path / "wanted", load_tokenizer(bpe))
    out, journal = tmp_path / "out", tmp_path / "out.partial.journal"
    command = [sys.executable, "-c", _PROGRAM, str(source), str(out), str(bpe)]
    job = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    _until(lambda: journal.exists() and json.loads(journal.read_text())["documents"] > 20)
    workers = psutil.Process(job.pid).children()
    assert len(workers) == 2
    (workers[0] if victim == "worker" else psutil.Process(job.pid)).kill()
    _, errors = job.communicate(timeout=60)
    assert not out.exists()
    if victim == "worker":
        assert errors.startswith("a process that prepares data has ended (exit code -9;")
    _until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    prepare([source], out, load_tokenizer(bpe))
    assert out.read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_part_by_the_rules_of_an_older_version_is_not_continued(
    source: Path, tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents have no special tokens of the post-processor."""
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "finish", lambda *_: sys.exit("stopped"))
        with pytest.raises(SystemExit):
            prepare([source], tmp_path / "out", load_tokenizer(bpe))
    journal = tmp_path / "out.partial.journal"
    content = json.loads(journal.read_text())
    for name in ("version", "bad", "first_bad", "forced"):  # which older journals do not have
        del content[name]
    journal.write_text(json.dumps(content))
    prepare([source], tmp_path / "out", load_tokenizer(bpe))
    said = f"Starting '{tmp_path}/out' again: the part on disk was made by the rules of another version of Ithaca\n"
    assert capsys.readouterr().out == said
    assert open_tokens(tmp_path / "out").documents == 400
