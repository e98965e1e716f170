"""Ranks that do not come to a job, or end while it begins: the others name them after the time they were given."""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ithaca
from ithaca.base.errors import IthacaError, LostRankError
from ithaca.base.torch_private import job_store
from ithaca.cli import main
from ithaca.parallel import hangs, joining
from ithaca.parallel.joining import LONGER
from ithaca.train import run
from tests.nursery import SECONDS, Nursery

WAIT = 6.0  # seconds that ranks wait for one that does not come; long enough for those that do, on any machine


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        return opened.getsockname()[1]


def test_an_attempt_has_torchruns_names(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**job, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    assert joining.read_job().attempt == "2"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert joining.read_job().attempt == "mine/2"


def join_again(rank: int, port: int, attempt: int) -> None:
    """One rank of an attempt at torchrun's store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RUN_ID="mine")
    # Node 0 follows node 1, which has lost a rank, and does not count that as a restart
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt if rank else 0)
    ithaca.mesh(device="cpu", timeout=5 * WAIT)
    seen = job_store().check([f"left{rank}"])
    job_store().set(f"left{rank}", "-")
    found = [None, None]
    dist.all_gather_object(found, attempt)
    print(f"attempt {attempt}, rank {rank}: with {found}, left by another: {seen}", flush=True)
    os._exit(0)


def attempts(port: int, first: int) -> None:
    """Two attempts of a job of two ranks at the same store. In the second, one rank comes when the other waits."""
    for attempt in (0, 1):
        children = []
        for rank in (first, 1 - first):
            child = os.fork()
            if not child:
                join_again(rank, port, attempt)
            children.append(child)
            if attempt:
                time.sleep(3 * joining.POLL_SECONDS)
        for child in children:
            os.waitpid(child, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_second_attempt_does_not_see_the_keys_of_the_first(nursery: Nursery, first: int) -> None:
    """torchrun keeps its store, with the keys of the first attempt: ranks would meet addresses that are gone."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (end,) = nursery.job(attempts, store.port, first)
    assert sorted(end.out.splitlines()) == [
        f"attempt {attempt}, rank {rank}: with [{attempt}, {attempt}], left by another: False"
        for attempt in (0, 1)
        for rank in (0, 1)
    ]


def some_ranks(
    folder: Path, started: tuple[int, ...], world: int, act: Callable[..., Any], args: tuple[Any, ...], store: bool
) -> None:
    """Start some ranks of a job, each as a process, and wait for them. `store`: the launcher has the job's store."""
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if store else None
    port = kept.port if kept else free_port()
    children = []
    for rank in started:
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
        os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {})
        meet(folder, rank, len(started))
        try:
            act(rank, *args)
        except IthacaError as error:
            lost = error.ranks if isinstance(error, LostRankError) else "none"
            print(f"rank {rank}: {type(error).__name__}: {error} {lost}".replace(str(port), "PORT"), flush=True)
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)


def meet(folder: Path, rank: int, count: int) -> None:
    """Wait until all ranks that are started run: from here on they are equally fast."""
    (folder / f"rank{rank}").touch()
    until = time.monotonic() + SECONDS
    while len(list(folder.glob("rank*"))) < count and time.monotonic() < until:
        time.sleep(0.01)


def say(nursery: Nursery, *args: Any) -> list[str]:
    """The lines that the ranks say."""
    (end,) = nursery.job(some_ranks, *args)
    assert end.code == 0, end.err
    assert "Traceback" not in end.err
    return sorted(end.out.splitlines())


def come(rank: int, seconds: float, **axes: int) -> None:  # noqa: ARG001
    ithaca.mesh(device="cpu", timeout=seconds, **axes)


@pytest.mark.parametrize("store", [False, True], ids=["rank 0 has the store", "the launcher has the store"])
def test_a_rank_never_starts(nursery: Nursery, tmp_path: Path, store: bool) -> None:
    said = f"2 of 3 ranks joined the job within 6 s, and rank 2 did not: its own output says why, and {LONGER} [2]"
    assert say(nursery, tmp_path, (0, 1), 3, come, (WAIT,), store) == [
        f"rank 0: LostRankError: {said}",
        f"rank 1: LostRankError: {said}",
    ]


def test_rank_0_never_starts(nursery: Nursery, tmp_path: Path) -> None:
    lines = say(nursery, tmp_path, (1, 2), 3, come, (1.5,), False)
    for rank, line in zip((1, 2), lines, strict=True):
        assert line.startswith(
            f"rank {rank}: LostRankError: rank 0 of 3 did not open the job's store at localhost:PORT within 1.5 s ("
        )
        assert line.endswith(f"): its own output says why, and {LONGER} [0]")


def test_several_ranks_never_start(nursery: Nursery, tmp_path: Path) -> None:
    said = "2 of 5 ranks joined the job within 6 s, and ranks 1, 3 and 4 did not: their own output says why, and "
    said += f"{LONGER} [1, 3, 4]"
    assert say(nursery, tmp_path, (0, 2), 5, come, (WAIT,), True) == [
        f"rank 0: LostRankError: {said}",
        f"rank 2: LostRankError: {said}",
    ]


def test_rank_0_never_starts_where_the_launcher_has_the_store(nursery: Nursery, tmp_path: Path) -> None:
    """No attempt begins without it."""
    said = f"rank 0 of 5 did not join the job within 1.5 s: its own output says why, and {LONGER} [0]"
    assert say(nursery, tmp_path, (1, 3), 5, come, (1.5,), True) == [
        f"rank 1: LostRankError: {said}",
        f"rank 3: LostRankError: {said}",
    ]


def wait_differently(rank: int) -> None:
    come(rank, WAIT if rank == 0 else 2 * SECONDS)


def test_who_gives_up_tells_the_others(nursery: Nursery, tmp_path: Path) -> None:
    """Though the store ends with it."""
    said = f"2 of 3 ranks joined the job within 6 s, and rank 2 did not: its own output says why, and {LONGER} [2]"
    assert say(nursery, tmp_path, (0, 1), 3, wait_differently, (), False) == [
        f"rank 0: LostRankError: {said}",
        f"rank 1: LostRankError: {said}",
    ]


def come_late(rank: int, folder: Path) -> None:
    """Rank 0 waits for the others in vain, and rank 1 comes when it has ended."""
    until = time.monotonic() + SECONDS
    while rank == 1 and not (folder / "ended").exists() and time.monotonic() < until:
        time.sleep(0.05)
    try:
        come(rank, 2 * SECONDS if rank == 1 else 0.5)
    finally:
        (folder / "ended").touch()


def test_a_late_rank_does_not_wait(nursery: Nursery, tmp_path: Path) -> None:
    said = "1 of 3 ranks joined the job within 0.5 s, and ranks 1 and 2 did not: their own output says why, and "
    said += f"{LONGER} [1, 2]"
    assert say(nursery, tmp_path, (0, 1), 3, come_late, (tmp_path,), True) == [
        f"rank 0: LostRankError: {said}",
        f"rank 1: LostRankError: {said}",
    ]


def end_in(rank: int, ending: int, name: str, seconds: float, axes: dict[str, int]) -> None:
    """Come, but end where this function of torch.distributed is called."""
    if rank == ending:
        setattr(dist, name, lambda *_, **__: os._exit(0))
    come(rank, seconds, **axes)


@pytest.mark.parametrize(
    ("ending", "name", "axes"),
    [(2, "init_process_group", {}), (3, "new_group", {"replicate": 2})],
    ids=["signed in", "making groups"],
)
@pytest.mark.parametrize("store", [False, True], ids=["rank 0 has the store", "the launcher has the store"])
def test_a_rank_ends_while_the_job_begins(
    nursery: Nursery, tmp_path: Path, ending: int, name: str, axes: dict[str, int], store: bool
) -> None:
    ranks = tuple(range(ending + 1))
    said = f"rank {ending} of {ending + 1} does not answer any more (it has ended or hangs): its own output says why"
    assert say(nursery, tmp_path, ranks, ending + 1, end_in, (ending, name, WAIT, axes), store) == [
        f"rank {rank}: LostRankError: {said} [{ending}]" for rank in range(ending)
    ]


def end_before_another_gives_up(rank: int) -> None:
    """Rank 0 calls the roll, and rank 1 answers, which waits for rank 2 in the store longer than a roll lasts."""
    hangs.ANSWER_SECONDS = 4.0
    end_in(rank, 2, "init_process_group", 3.0 if rank == 0 else 13.0, {})


def test_a_rank_that_waits_answers(nursery: Nursery, tmp_path: Path) -> None:
    said = "rank 2 of 3 does not answer any more (it has ended or hangs): its own output says why [2]"
    assert say(nursery, tmp_path, (0, 1, 2), 3, end_before_another_gives_up, (), True) == [
        f"rank 0: LostRankError: {said}",
        f"rank 1: LostRankError: {said}",
    ]


def leave_the_store(rank: int) -> None:
    """Rank 0 ends when rank 1 has signed in and waits for the last one."""

    def wait(store: dist.Store, _: joining.Job) -> bool:
        return store.check([f"{joining._JOINED}1"]) and os._exit(0)

    if rank == 0:
        joining._all_joined = wait
    come(rank, 2 * SECONDS)


def test_rank_0_ends_while_the_others_join(nursery: Nursery, tmp_path: Path) -> None:
    assert say(nursery, tmp_path, (0, 1), 3, leave_the_store, (), False) == [
        "rank 1: LostRankError: rank 0 of 3, where the job's store is, ended while the ranks joined: "
        "its own output says why [0]"
    ]


def timeouts(rank: int) -> None:
    mesh = ithaca.mesh(device="cpu", timeout=77, replicate=2)
    backends = [group._get_backend(mesh.device) for group in mesh.groups]
    print(rank, [backend.options._timeout.total_seconds() for backend in backends], job_store().timeout, flush=True)
    dist.barrier()


def test_the_timeout_is_that_of_the_start_alone(nursery: Nursery, tmp_path: Path) -> None:
    """Later a rank may read a large model for a long time while the others wait."""
    lines = say(nursery, tmp_path, (0, 1, 2, 3), 4, timeouts, (), False)
    assert lines == [f"{rank} [1800.0, 1800.0, 1800.0] 0:30:00" for rank in range(4)]


def by_hand(rank: int, folder: Path) -> None:
    """`ithaca train` as one rank of a job whose others never come."""
    run.JOIN_SECONDS = 1.5
    os.chdir(folder)
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.argv = ["ithaca", "train", "--run", "run", "--set", "train.device=cpu", "--set", "run.timeout=1"]
    main()


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "1 of 3 ranks joined the job within 1.5 s, and ranks 1 and 2 did not: their own output says why"),
        (1, "rank 0 of 3 did not open the job's store at localhost:"),
    ],
)
def test_a_command_whose_other_ranks_never_come(nursery: Nursery, tmp_path: Path, rank: int, said: str) -> None:
    (end,) = nursery.job(by_hand, rank, tmp_path)
    assert (end.code, end.out) == (1, "")
    (line,) = end.err.splitlines()
    assert line.startswith(f"error: {said}")
    assert line.endswith("; continue from the last checkpoint with ithaca train --run run")
    assert not (tmp_path / "run").exists()


@contextmanager
def in_use() -> Iterator[int]:
    with socket.socket() as opened:
        opened.bind(("", 0))
        opened.listen()
        yield opened.getsockname()[1]


def in_environment(variables: dict[str, str], seconds: float | None) -> None:
    os.environ.update(variables)
    try:
        ithaca.mesh(device="cpu", timeout=seconds)
    except IthacaError as error:
        print(f"{type(error).__name__}: {error}")


def mistake(nursery: Nursery, seconds: float | None = 0.5, **variables: str) -> str:
    (end,) = nursery.job(in_environment, variables, seconds)
    assert end.code == 0, end.err
    return end.out.strip()


def test_mistakes_in_the_environment(nursery: Nursery) -> None:
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert f"PlanError: the environment has RANK=0, as torchrun sets it, but no {name}: unset RANK" in mistake(
            nursery, **{key: value for key, value in whole.items() if key != name}
        )
    assert "MASTER_PORT=70000, which is not a port: 1 to 65535 are" in mistake(
        nursery, **whole | {"MASTER_PORT": "70000"}
    )
    assert "RANK=2 and WORLD_SIZE=2, which is not a rank" in mistake(nursery, **whole | {"RANK": "2"})
    assert "PlanError: timeout must be above 0" in mistake(nursery, seconds=0)
    with in_use() as port:
        found = mistake(nursery, **whole | {"MASTER_PORT": str(port)})
        assert f"RunError: rank 0 cannot open the job's store at localhost:{port} (" in found
        assert found.endswith("): another MASTER_PORT may be free")
