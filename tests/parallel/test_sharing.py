"""Several ranks on one GPU: refused, unless it is asked for and NCCL can. The GPUs here are made up."""

import os
from typing import Any

import pytest
import torch

from ithaca.base.errors import ConfigError, PlanError
from ithaca.config import Config, RunSection
from ithaca.parallel import mesh, nccl
from ithaca.train.ranks import launch


class Library:
    """A NCCL library of some version, as `ncclGetVersion` gives it: 23004 is 2.30.4."""

    def __init__(self, number: int):
        self._number = number

    def ncclGetVersion(self, target: Any) -> None:
        target._obj.value = self._number


def load(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Load a NCCL; torch was built with another one."""
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: {"libnccl.so.2": Library(number)}[name])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs, NCCL 2.30.4, and rank 3 of the 5 of a node; the devices that were set."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    load(monkeypatch, 23004)
    for variable, value in {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(variable, value)
    for variable in nccl.SHARING:
        monkeypatch.setenv(variable, "")  # so that it is as before after the test
        monkeypatch.delenv(variable)
    return seen


def test_refused(two_gpus: list[int]) -> None:
    with pytest.raises(PlanError, match=r"rank 3 of its node, but the node has 2 GPUs: start 2 ranks, or .*share_gpus"):
        mesh._device(None)
    assert not two_gpus


def test_turns(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 has the second of two GPUs. What users have set for NCCL stays."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "7")
    assert mesh._device("cuda", share=True) == torch.device("cuda", 1)
    assert two_gpus == [1]
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert os.environ["NCCL_MAX_CTAS"] == "7"
    assert mesh._device("cuda") == torch.device("cuda", 1)  # a second mesh of the process need not say it again


def test_as_many_ranks_as_gpus_share_nothing(two_gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    load(monkeypatch, 22705)
    assert mesh._device(None, share=True) == torch.device("cuda", 1)
    assert two_gpus == [1]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


@pytest.mark.usefixtures("two_gpus")
def test_an_older_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, 22705)
    with pytest.raises(
        PlanError, match=r"need NCCL 2\.30 or newer, and this is 2\.27\.5: preload one, .* or start 2 ra"
    ):
        mesh._device(None, share=True)


def test_the_loaded_nccl_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that torch was built with, unless there is no library of that name."""
    load(monkeypatch, 23203)
    assert nccl.nccl_version() == (2, 32, 3)

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nccl.ctypes, "CDLL", absent)
    assert nccl.nccl_version() == (2, 28, 9)


@pytest.mark.usefixtures("two_gpus")
def test_the_launcher() -> None:
    config = Config()
    with pytest.raises(
        ConfigError, match=r"--ranks is 5, but this machine has 2 GPUs: 1 to 2 work, more with run\.share"
    ):
        launch.count_ranks(config, 5)
    assert launch.count_ranks(config, None) == 2
    assert launch.count_ranks(Config(run=RunSection(share_gpus=True)), 5) == 5
