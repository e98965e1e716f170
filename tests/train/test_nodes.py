"""`ithaca train` on two nodes, which are two launchers on this machine that meet over its loopback."""

import multiprocessing
import os
import random
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from ithaca.config import Config, read_config
from ithaca.train.loop import train
from ithaca.train.processes import Watch, run_ranks, worker
from ithaca.train.run_folder import RunFolder
from ithaca.train.slurm import FIRST_PORT, PORTS
from ithaca.train.stop import SAME_SECONDS, StopRequest
from tests.nursery import SECONDS, Ended, Nursery, ranks_of
from tests.train.conftest import SMALL
from tests.train.test_mistakes import assert_one_sentence

SWEEP = ["plan.recipe=sweep", "mesh.ulysses=2", "mesh.ring=2", "plan.chunk=32", "train.steps=9"]
ENDLESS = "train.steps=1000000"


def free_port() -> int:
    """One of those that SLURM steps are given, so that a job can be named that has it."""
    while True:
        port = FIRST_PORT + random.randrange(PORTS)
        with socket.socket() as trial:
            try:
                trial.bind(("", port))
            except OSError:
                continue
            return port


def words(run: str, model: Path, *sets: str) -> list[str]:
    options = [*SMALL, f"model.source={model}", "model.dtype=float32", *sets]
    return ["train", "--run", run, *(word for item in options for word in ("--set", item))]


def two_nodes(run: str, ranks: int, model: Path, *sets: str) -> list[tuple[list[str], dict[str, str]]]:
    nodes = ["--nodes", "2", "--meet", f"127.0.0.1:{free_port()}", "--ranks", str(ranks)]
    return [(words(run, model, *sets) + nodes, {})] * 2


def slurm(tasks: str, node: int, local: int, port: int) -> dict[str, str]:
    """What srun tells a task of a step on two nodes."""
    counts = [int(count) for count in tasks.split(",")]
    return {
        "SLURM_JOB_ID": str(port - FIRST_PORT),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NODELIST": "localhost,node[07]",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
    }


def losses(path: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["gradient_norm"]) for line in RunFolder(path).read_metrics()]


def wait_for_steps(path: Path, steps: int) -> None:
    until = time.monotonic() + SECONDS
    while len(losses(path)) < steps:
        assert time.monotonic() < until, f"{path} has {len(losses(path))} steps"
        time.sleep(0.02)


@dataclass(frozen=True)
class KillThenStop:
    """Kill the rank of one node and, when the run goes on after that, ask that node to stop."""

    path: Path

    def __call__(self, launchers: list[int]) -> None:
        wait_for_steps(self.path, 5)
        ranks_of(launchers[1])[0].kill()
        wait_for_steps(self.path, len(losses(self.path)) + 3)  # those that are left take one more at most
        os.kill(launchers[1], signal.SIGINT)


@dataclass(frozen=True)
class StopOneAndKillOne:
    """Ask one node of a job to stop, and kill a rank of another job's."""

    folder: Path

    def __call__(self, launchers: list[int]) -> None:
        wait_for_steps(self.folder / "stopped", 1)
        os.kill(launchers[3], signal.SIGINT)
        wait_for_steps(self.folder / "killed", 5)
        ranks_of(launchers[1])[1].kill()


@dataclass(frozen=True)
class StopAtOnce:
    """Ask one node twice."""

    folder: Path

    def __call__(self, launchers: list[int]) -> None:
        wait_for_steps(self.folder / "run", 1)
        ranks_of(launchers[0])[0].suspend()  # else one request would do
        for _ in range(2):
            os.kill(launchers[0], signal.SIGTERM)
            time.sleep(4 * SAME_SECONDS)


def train_some(config: Config, path: Path, steps: int) -> None:
    """Stop after some steps as Ctrl-C does."""
    asked = iter(range(1, steps + 1))
    StopRequest.agreed = lambda _: next(asked) == steps
    train(config, path)


def test_two_nodes(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Both launchers go round once and end well, and the losses are those of two undisturbed ranks on one node."""
    disturb = KillThenStop(tmp_path / "run")
    for end in nursery.commands(*two_nodes("run", 1, small_model, ENDLESS), folder=tmp_path, disturb=disturb):
        check_went_round(end)
    found = losses(tmp_path / "run")
    assert len(found) >= 8
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(found):08d}").exists()
    config = read_config(None, [*SMALL, f"model.source={small_model}", "model.dtype=float32", ENDLESS])
    for end in nursery.job(train_some, config, tmp_path / "one", len(found), ranks=2):
        assert end.code == 0, end.err
    assert losses(tmp_path / "one") == found


def check_went_round(end: Ended) -> None:
    assert end.code == 0, end.err
    assert "Traceback" not in end.err
    assert f"was killed by signal 9 on {socket.gethostname()}. Restarting" in end.err
    assert "(1 of 3)" in end.err
    assert "(2 of 3)" not in end.err


@pytest.mark.full
def test_two_nodes_of_two_ranks_and_two_of_one(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """A job whose rank is killed, and one that is stopped, at the same time: processes take long to start."""
    commands = [
        *two_nodes("killed", 2, small_model, *SWEEP),
        *two_nodes("stopped", 1, small_model, ENDLESS),
    ]
    ends = nursery.commands(*commands, folder=tmp_path, disturb=StopOneAndKillOne(tmp_path))
    check_killed(nursery, small_model, tmp_path, ends[:2])
    check_stopped(tmp_path, ends[2:])


def check_killed(nursery: Nursery, model: Path, folder: Path, ends: list[Ended]) -> None:
    """Both launchers have gone round once, and the losses are those of four undisturbed ranks on one node."""
    for end in ends:
        check_went_round(end)
    config = read_config(None, [*SMALL, f"model.source={model}", "model.dtype=float32", *SWEEP])
    for end in nursery.job(train, config, folder / "one", ranks=4):
        assert end.code == 0, end.err
    assert losses(folder / "killed") == losses(folder / "one")
    assert len(losses(folder / "one")) == 9


def check_stopped(folder: Path, ends: list[Ended]) -> None:
    """One launcher was asked; the run has saved, and ended well on both nodes."""
    assert [end.code for end in ends] == [0, 0], ends
    assert "Stopped after step" in ends[0].out + ends[1].out
    assert not any("Traceback" in end.err for end in ends)
    assert RunFolder(folder / "stopped").has_checkpoints()


@pytest.mark.full
def test_two_nodes_stopped_at_once(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """The node that was not asked is told why."""
    commands = two_nodes("run", 1, small_model, ENDLESS, "run.checkpoint_every=0")
    asked, other = nursery.commands(*commands, folder=tmp_path, disturb=StopAtOnce(tmp_path))
    assert asked.code == 130, asked
    assert other.code == 1, other
    assert f"error: the run was stopped on {socket.gethostname()}" in other.err
    assert "Traceback" not in asked.err + other.err
    assert not RunFolder(tmp_path / "run").has_checkpoints()


def lonely(port: int) -> dict[str, str]:
    """The environment of a launcher's only rank."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def ask_too_early(config: Config, path: Path) -> None:
    """To stop, before there is a rank that could be told."""
    with Watch() as watch:
        os.kill(os.getpid(), signal.SIGTERM)
        while not watch.asked:
            time.sleep(0.01)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        assert run_ranks(config, path, [lonely(store.port)], watch, lambda: False) is None


@pytest.mark.full
def test_a_request_to_stop_that_comes_before_the_ranks(nursery, small_config: Config, tmp_path: Path) -> None:
    endless = replace(small_config, train=replace(small_config.train, steps=1000000))
    (end,) = nursery.job(ask_too_early, endless, tmp_path / "run")
    assert end.code == 0, end.err
    assert "Stopped after step 1." in end.out


def die_early(config: Config, path: Path) -> None:
    """As a launcher, whose store goes with it, while its rank is still on its way."""
    spawn = multiprocessing.get_context("spawn")
    _, pipe = spawn.Pipe(duplex=False)
    rank = spawn.Process(target=worker, args=(config, path, lonely(free_port()), pipe))
    rank.start()
    print(rank.pid, flush=True)
    os._exit(0)


@pytest.mark.full
def test_no_rank_outlives_a_launcher_that_dies_early(nursery, small_config: Config, tmp_path: Path) -> None:
    (end,) = nursery.job(die_early, small_config, tmp_path)
    _, alive = psutil.wait_procs([psutil.Process(int(end.out))], timeout=SECONDS)
    for rank in alive:
        rank.kill()
    assert not alive


def nobody(_: list[int]) -> None: ...


def test_a_task_of_srun_for_each_rank(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    port = free_port()
    tasks = [
        (words("run", small_model, "train.steps=5"), slurm("2,1", *place, port)) for place in ((0, 0), (0, 1), (1, 0))
    ]
    for end in nursery.commands(*tasks, folder=tmp_path, disturb=nobody):
        assert end.code == 0, end.err
    config = read_config(None, [*SMALL, f"model.source={small_model}", "model.dtype=float32", "train.steps=5"])
    nursery.job(train, config, tmp_path / "one", ranks=3)
    assert len(losses(tmp_path / "one")) == 5
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


@pytest.mark.full
def test_a_task_of_srun_for_each_node(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Each starts a rank, which meets a mistake."""
    wrong = [*words("wrong", small_model, "mesh.ulysses=2", "plan.recipe=dense"), "--ranks", "1"]
    port = free_port()
    tasks = [(wrong, slurm("1,1", node, 0, port)) for node in (0, 1)]
    for end in nursery.commands(*tasks, folder=tmp_path, disturb=nobody):
        assert end.code == 2
        assert_one_sentence(end)
        assert "recipe 'dense' has no context parallelism" in end.err
    assert not RunFolder(tmp_path / "wrong").begun()


TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "20001"}

REFUSED: dict[str, tuple[list[str], dict[str, str]]] = {
    "--meet is missing": (["--nodes", "2", "--run", "run"], {}),
    "--run is missing": (["--nodes", "2", "--meet", "localhost"], {}),
    "--fresh cannot be given with --nodes 2": (["--nodes", "2", "--meet", "localhost", "--run", "run", "--fresh"], {}),
    "--nodes is 0: 1 or more": (["--nodes", "0"], {}),
    "--meet localhost is for several nodes, but --nodes is not given": (["--meet", "localhost"], {}),
    "--meet localhost is for several nodes, but --nodes is 1": (["--nodes", "1", "--meet", "localhost"], {}),
    "names port 'x'": (["--nodes", "2", "--meet", "localhost:x", "--run", "run"], {}),
    "is not known here": (["--nodes", "2", "--meet", "node.invalid", "--run", "run"], {}),
    "--nodes 2 cannot be given under torchrun": (["--nodes", "2"], {**TORCHRUN, "RANK": "0"}),
    "the environment has RANK=0, as torchrun sets it, but no WORLD_SIZE": ([], {"RANK": "0"}),
    "the environment has RANK=2 and WORLD_SIZE=2": ([], {**TORCHRUN, "RANK": "2"}),
    "--ranks 2 cannot be given under srun, which started 3": (["--ranks", "2"], slurm("2,1", 0, 0, 20001)),
    "--run is missing: under srun": ([], slurm("2,1", 0, 0, 20001)),
    "--run is missing: name the run folder, on a disk that all 2": ([], slurm("1,1", 0, 0, 20001)),
}


def test_options_that_cannot_be(nursery: Nursery, tmp_path: Path) -> None:
    commands = [(["train", *more], environ) for more, environ in REFUSED.values()]
    ends = nursery.commands(*commands, folder=tmp_path, disturb=nobody)
    for sentence, end in zip(REFUSED, ends, strict=True):
        assert end.code == 2, end
        assert_one_sentence(end)
        assert sentence in end.err
    assert not list(tmp_path.iterdir())
