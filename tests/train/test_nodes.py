"""`ithaca train` on several nodes: torchrun's and srun's processes on this machine, over its loopback."""

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ithaca.cli import main
from ithaca.config import Config, read_config
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.ranks import launch
from ithaca.train.ranks.processes import Watch, run_ranks, worker
from ithaca.train.ranks.slurm import FIRST_PORT, PORTS, Step
from ithaca.train.run import train
from tests.nursery import SECONDS, Ended, Nursery
from tests.train.conftest import SMALL
from tests.train.test_mistakes import assert_one_sentence


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
        assert run_ranks(partial(train, config, path, launched=True), [lonely(store.port)], watch) is None


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
    rank = spawn.Process(target=worker, args=(partial(train, config, path, launched=True), lonely(free_port()), pipe))
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


def srun(nursery: Nursery, model: Path, folder: Path, *deaths: str, starts: int = 0) -> list[Ended]:
    """A step of three tasks on two nodes, of a job that SLURM has started again so many times."""
    port, tasks = free_port(), ((0, 0), (0, 1), (1, 0))
    command = ["-m", "tests.train.dying", *deaths, *words("run", model, "train.steps=9")]
    again = {"SLURM_RESTART_COUNT": str(starts)} if starts else {}
    return nursery.commands(
        *((command, slurm("2,1", *place, port) | again) for place in tasks), folder=folder, disturb=nobody
    )


def test_a_job_of_slurm_that_is_requeued(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """SIGTERM before the time limit, then a rank that is killed, then to the end: the losses of an undisturbed run."""
    ends = srun(nursery, small_model, tmp_path, *(f"{rank}:3:SIGTERM" for rank in range(3)))
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert "Stopped after step 3." in ends[0].out
    ends = srun(nursery, small_model, tmp_path, "1:6:SIGKILL", starts=1)
    assert all(end.code for end in ends), ends
    for end in (ends[0], ends[2]):
        assert "error: rank 1 of 3 does not answer any more (it has ended or hangs)" in end.err
        assert "continue from the last checkpoint with ithaca train --run run" in end.err
    ends = srun(nursery, small_model, tmp_path, starts=2)
    assert [end.code for end in ends] == [0, 0, 0], ends
    assert "Continuing from the checkpoint of step" in ends[0].out
    config = read_config(None, [*SMALL, f"model.source={small_model}", "model.dtype=float32", "train.steps=9"])
    nursery.job(train, config, tmp_path / "one", ranks=3)
    assert len(losses(tmp_path / "one")) == 9
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


def in_srun(gpus: int, folder: Path) -> None:
    """A task of a step with one task on each of two nodes, on a node with some GPUs."""
    torch.cuda.device_count = lambda: gpus
    os.chdir(folder)
    os.environ.update(slurm("1,1", 0, 0, 20001))
    sys.argv = ["ithaca", "train", "--run", "run", "--set", "train.steps=2"]  # the first run is for CPUs
    main()


def test_a_task_of_srun_for_each_node(nursery: Nursery, tmp_path: Path) -> None:
    """One task cannot use eight GPUs; torchrun can start the ranks."""
    (end,) = nursery.job(in_srun, 8, tmp_path)
    assert end.code == 2, end
    assert_one_sentence(end)
    assert "srun started 1 task on each of 2 nodes, but this node has 8 GPUs" in end.err
    assert "as srun --ntasks-per-node=8, or" in end.err
    assert "as srun torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint localhost:" in end.err


def test_a_task_of_srun_for_each_node_of_one_gpu() -> None:
    for gpus, device in ((1, "auto"), (0, "auto"), (8, "cpu")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            step = Step(hosts=("a", "b"), tasks=(1, 1), node=0, local=0, port=20001)
            launch._check_tasks(step, Config(train=replace(Config().train, device=device)))


TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "20001"}

LINE = "start on each node torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint"

REFUSED: dict[str, tuple[list[str], dict[str, str]]] = {
    f"--nodes 2 is not an option any more: {LINE} node0:29500 --max-restarts 3": (["--nodes", "2", "--run", "run"], {}),
    f"--nodes 2 --meet 'localhost:4321' is not an option any more: {LINE} localhost:4321": (
        ["--nodes", "2", "--meet", "localhost:4321", "--run", "run"],
        {},
    ),
    f"--meet 'localhost' is not an option any more: {LINE} localhost": (["--meet", "localhost"], {}),
    f"--meet 'a b' is not an option any more: {LINE} node0:29500": (["--meet", "a b"], {}),
    "--nodes 1 is the default: leave it out": (["--nodes", "1"], {}),
    "--nodes 4 is not an option any more: start on each node torchrun --nnodes 4": (
        ["--nodes", "4"],
        {**TORCHRUN, "RANK": "0"},
    ),
    "the environment has RANK=0, as torchrun sets it, but no WORLD_SIZE": ([], {"RANK": "0"}),
    "the environment has RANK=2 and WORLD_SIZE=2": ([], {**TORCHRUN, "RANK": "2"}),
    "--ranks 2 cannot be given under torchrun, which started 2": (["--ranks", "2"], {**TORCHRUN, "RANK": "0"}),
    "--fresh cannot be given under torchrun": (
        ["--run", "run", "--fresh", "--set", "train.steps=1"],
        {**TORCHRUN, "RANK": "0"},
    ),
    "--ranks 2 cannot be given under srun, which started 3": (["--ranks", "2"], slurm("2,1", 0, 0, 20001)),
    "--run is missing: under srun": ([], slurm("2,1", 0, 0, 20001)),
}


def test_options_that_cannot_be(nursery: Nursery, tmp_path: Path) -> None:
    commands = [(["train", *more], environ) for more, environ in REFUSED.values()]
    ends = nursery.commands(*commands, folder=tmp_path, disturb=nobody)
    for sentence, end in zip(REFUSED, ends, strict=True):
        assert end.code == 2, end
        assert_one_sentence(end)
        assert sentence in end.err
    assert not list(tmp_path.iterdir())
