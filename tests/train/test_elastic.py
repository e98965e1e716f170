"""What torchrun learns of a rank that ends with an error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ithaca.train.ranks import elastic


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A rank of torchrun with restarts left, whose signals are only noted."""
    (tmp_path / "attempt_1" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_1" / "0" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["python", "/env/bin/torchrun", "--nnodes", "2"])
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda parent, number: sent.append(number) if parent == os.getppid() else None)
    return sent


def test_the_first_rank_of_a_node_ends_its_torchrun(rank: list[int]) -> None:
    assert elastic.end_torchrun()
    assert not elastic.end_torchrun()
    assert rank == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHELASTIC_RESTART_COUNT", "3"),  # torchrun ends by itself, and its report has the sentence
        ("TORCHELASTIC_MAX_RESTARTS", "many"),
        ("TORCHELASTIC_ERROR_FILE", ""),
        ("TORCHELASTIC_ERROR_FILE", "/nonexistent/1/0/error.json"),
    ],
)
def test_no_torchrun_to_end(rank: list[int], monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not elastic.end_torchrun()
    elastic.report_error("a sentence")
    assert rank == []


@pytest.mark.parametrize(
    ("words", "is_one"),
    [
        (["/env/bin/python", "/env/bin/torchrun", "--nnodes", "2"], True),
        (["python", "-m", "torch.distributed.run", "--nnodes", "2"], True),
        (["torchrun"], True),
        (["/bin/bash", "train.sh"], False),
        (["/sbin/init"], False),
        (["python", "start.py", "--with", "torchrun"], False),
        ([], False),
    ],
)
def test_who_is_torchrun(words: list[str], is_one: bool) -> None:
    assert elastic.is_torchrun(words) == is_one


def test_the_error_file(rank: list[int]) -> None:  # noqa: ARG001
    elastic.report_error("the disk is full")
    told = json.loads(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text())["message"]
    assert told["message"] == "the disk is full"
    assert int(told["extraInfo"]["timestamp"]) > 0


def torchrun(folder: Path, restarts: int) -> subprocess.CompletedProcess:
    """A mistake under a real torchrun, with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    mistake = ["-m", "--", "ithaca", "train", "--run", "run", "--set", "train.stpes=3"]
    return subprocess.run([*command, *mistake], cwd=folder, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.full
def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    end = torchrun(tmp_path, 3)
    assert end.returncode == 1
    assert 1 <= end.stderr.count("error: 'train.stpes' is not an option") <= 2, end.stderr
    assert "death signal, shutting down workers" in end.stderr


@pytest.mark.full
def test_torchruns_report_has_the_sentence(tmp_path: Path) -> None:
    end = torchrun(tmp_path, 0)
    assert end.returncode == 1
    report = end.stderr.partition("Root Cause")[2]
    assert "'train.stpes' is not an option" in report
    assert "exitcode  : 2" in report
