"""Two `torchrun`, as on two nodes, of two ranks each: ranks die, all restart, and the losses stay the same."""

import socket
from pathlib import Path

import pytest

from ithaca.config import read_config
from ithaca.train.run import train
from tests.nursery import Ended, Nursery
from tests.train.conftest import SMALL
from tests.train.test_nodes import losses, nobody

ROOT = Path(__file__).parents[2]
STEPS, RANKS = 9, 4


def free_place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return f"127.0.0.1:{trial.getsockname()[1]}"


def run_nodes(nursery: Nursery, folder: Path, model: Path, *deaths: str, sets: tuple[str, ...] = ()) -> list[Ended]:
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", free_place()]
    options = [*SMALL, f"train.steps={STEPS}", f"model.source={model}", "model.dtype=float32", *sets]
    words = ["train", "--run", "run", *(word for item in options for word in ("--set", item))]
    program = ["-m", "--", "tests.train.dying", *deaths]
    node = (["torchrun", *meet, "--max-restarts", "3", *program, *words], {"PYTHONPATH": str(ROOT)})
    return nursery.commands(node, node, folder=folder, disturb=nobody)


def check_losses(nursery: Nursery, folder: Path, model: Path, *sets: str) -> None:
    """Those of as many undisturbed ranks."""
    options = [*SMALL, f"train.steps={STEPS}", f"model.source={model}", "model.dtype=float32", *sets]
    for end in nursery.job(train, read_config(None, options), folder / "one", ranks=RANKS):
        assert end.code == 0, end.err
    assert losses(folder / "run") == losses(folder / "one")
    assert len(losses(folder / "one")) == STEPS


def check_named(ends: list[Ended], rank: int) -> None:
    """Each rank that is left names the one that is lost."""
    said = "".join(end.err for end in ends)
    assert said.count(f"rank {rank} of {RANKS} does not answer any more (it has ended or hangs)") == RANKS - 1, said
    assert "Traceback" not in said


def test_a_rank_is_killed(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    ends = run_nodes(nursery, tmp_path, small_model, "3:7:SIGKILL")
    assert [end.code for end in ends] == [0, 0], ends
    check_losses(nursery, tmp_path, small_model)
    check_named(ends, 3)


@pytest.mark.full
@pytest.mark.parametrize("deaths", [("0:7:SIGKILL", "1:9:SIGKILL"), ("0:6:SIGKILL", "3:8:SIGKILL"), ("2:7:SIGSTOP",)])
def test_ranks_of_either_node_die(nursery: Nursery, small_model: Path, tmp_path: Path, deaths: tuple[str, ...]) -> None:
    """Rank 0 among them, one after the other; a rank that is stopped is given up after the timeout."""
    ends = run_nodes(nursery, tmp_path, small_model, *deaths, sets=("run.timeout=8",))
    assert [end.code for end in ends] == [0, 0], ends
    assert len(list(tmp_path.glob("died-*"))) == len(deaths)
    check_losses(nursery, tmp_path, small_model)
    for death in deaths:
        check_named(ends, int(death[0]))


@pytest.mark.full
def test_ranks_that_share_sequences_die(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    sets = ("plan.recipe=sweep", "mesh.ulysses=2", "mesh.ring=2", "plan.chunk=32")
    ends = run_nodes(nursery, tmp_path, small_model, "1:7:SIGKILL", "2:8:SIGKILL", sets=sets)
    assert [end.code for end in ends] == [0, 0], ends
    check_losses(nursery, tmp_path, small_model, *sets)
