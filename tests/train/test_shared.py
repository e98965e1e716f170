"""A run folder that nodes do not share is refused, on all ranks and before anything is read there."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ithaca.base.errors import ConfigError
from ithaca.config import Config
from ithaca.train.folder import run_folder as run_module
from ithaca.train.folder.run_folder import RunFolder, leave_word, sees_word
from ithaca.train.run import train


def train_on_two_nodes(config: Config, folder: Path, apart: bool) -> None:
    """Two ranks that take themselves for two nodes, with a disk each or with one."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    run_module.SEE_SECONDS = 0.5
    path = folder / f"node{dist.get_rank() if apart else 0}" / "run"
    try:
        train(config, path)
    except ConfigError as error:
        print(error)


def test_ranks_on_two_nodes(nursery, small_config: Config, tmp_path: Path) -> None:
    RunFolder(tmp_path / "node1" / "run").hold().close()  # a lock file alone is not the same one
    for end in nursery.job(train_on_two_nodes, small_config, tmp_path, True, ranks=2):
        assert end.code == 0, end.err
        assert "is not the same on all ranks (rank 1 does not see what rank 0 wrote): --run must lie" in end.out
    assert not RunFolder(tmp_path / "node0" / "run").begun()
    for end in nursery.job(train_on_two_nodes, small_config, tmp_path, False, ranks=2):
        assert end.code == 0, end.err
        assert "not the same" not in end.out
    assert len(RunFolder(tmp_path / "node0" / "run").read_metrics()) == small_config.train.steps


def test_a_word_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "ASK_SECONDS", 0.01)
    run = RunFolder(tmp_path / "run")
    words = []

    def late() -> None:
        time.sleep(0.3)
        with run.hold() as lock:
            words.extend([leave_word(lock), leave_word(lock)])  # the last one stays

    monkeypatch.setattr(run_module.secrets, "token_hex", lambda _: "word")
    thread = threading.Thread(target=late)
    thread.start()
    assert sees_word(run.lock, "word")
    thread.join()
    assert words == ["word", "word"]
    monkeypatch.setattr(run_module, "SEE_SECONDS", 0.05)
    assert not sees_word(run.lock, "another")
