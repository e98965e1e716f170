"""The launcher restarts a run that fails, and counts failures in a row without progress."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ithaca.base.errors import ConfigError, RunError
from ithaca.config import Config, TrainSection
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks import launch


def start(monkeypatch: pytest.MonkeyPatch, path: Path, attempt: Callable[[int], str | None]) -> list[int]:
    """Launch a run whose attempts end as given; return their numbers."""
    attempts = []

    def once(work: Callable[[], None], count: int, number: int, *_: object) -> str | None:  # noqa: ARG001
        attempts.append(number)
        return attempt(number)

    monkeypatch.setattr(launch, "run_attempt", once)
    launch._start(Config(), 1, path)
    return attempts


def save(path: Path, step: int) -> None:
    (RunFolder(path).checkpoints / f"step-{step:08d}").mkdir(parents=True)


def test_a_new_checkpoint_gives_restarts_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def attempt(number: int) -> str | None:
        if number % 3 == 2:
            save(tmp_path, number)
        return "rank 1 was killed by signal 9" if number < 9 else None

    assert start(monkeypatch, tmp_path, attempt) == list(range(10))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "Rank 1 was killed by signal 9. Restarting from the last checkpoint (1 of 3)"
    assert [line[-7:-6] for line in said] == ["1", "2", "1", "2", "3", "1", "2", "3", "1"]


def test_failures_without_progress_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(tmp_path, 40)  # an old checkpoint is no progress
    with pytest.raises(RunError, match="signal 9, and 3 restarts in a row made no new checkpoint: fix the cause"):
        start(monkeypatch, tmp_path, lambda _: "rank 1 was killed by signal 9")


def test_more_ranks_than_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Config(train=TrainSection(device="cpu"))
    monkeypatch.setattr(launch, "host_budget", lambda: (2_600_000_000, "free memory"))
    assert launch.count_ranks(cpu, 10) == 10
    said = r"^--ranks is 100, which take about 23.3 GiB of host memory, of which 2.42 GiB are free: --ranks 10 works$"
    with pytest.raises(ConfigError, match=said):
        launch.count_ranks(cpu, 100)
    monkeypatch.setattr(launch, "host_budget", lambda: (0, "free memory"))
    assert launch.count_ranks(cpu, 1) == 1


def test_ranks_of_one_node_come_from_nowhere_else() -> None:
    """The store has a socket of the loopback alone."""
    store = launch._open_store()
    found = [item for item in psutil.Process().net_connections() if item.laddr and item.laddr.port == store.port]
    assert {item.laddr.ip for item in found} == {"127.0.0.1"}
    store.set("key", "value")
    assert dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False).get("key") == b"value"


def test_a_store_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise dist.DistStoreError("The client socket has timed out\nwith a trace")

    monkeypatch.setattr(dist, "TCPStore", fail)
    with pytest.raises(RunError, match=r"at 127.0.0.1 \(The client socket has timed out\): allow more open files"):
        launch._open_store()


def test_every_rank_has_a_number_and_all_the_same_store() -> None:
    found = launch._environments(3, 1234, 2)
    assert [(item["RANK"], item["LOCAL_RANK"]) for item in found] == [("0", "0"), ("1", "1"), ("2", "2")]
    for item in found:
        assert (item["WORLD_SIZE"], item["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (item["MASTER_ADDR"], item["MASTER_PORT"]) == ("127.0.0.1", "1234")
        assert item["TORCHELASTIC_RESTART_COUNT"] == "2"
