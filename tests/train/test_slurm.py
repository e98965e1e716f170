"""What a task of a SLURM step reads from its environment, and who is no such task."""

import pytest

from ithaca.base.errors import ConfigError
from ithaca.train.ranks.slurm import read_counts, read_hosts, read_step

# What a batch script of two nodes with 8 tasks each finds, and an `salloc` shell as well
JOB = {
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_NODELIST": "gpu[003-004]",
    "SLURM_NTASKS": "16",
    "SLURM_NPROCS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}

STEP = {
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("gpu[003-004,7],x1", ["gpu003", "gpu004", "gpu7", "x1"]),
        ("x1,gpu[098-101]", ["x1", "gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[08-10]-ib.site.org", [f"r{r}n{n}-ib.site.org" for r in (1, 2) for n in ("08", "09", "10")]),
        ("a[1,3]b,c-d[5]", ["a1b", "a3b", "c-d5"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert read_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("8(x2)", [8, 8]), ("8(x2),4,2(x3)", [8, 8, 4, 2, 2, 2]), ("2,1", [2, 1])]
)
def test_task_counts(text: str, counts: list[int]) -> None:
    assert read_counts(text) == counts


@pytest.mark.parametrize(
    "environ",
    [
        {},
        JOB,
        {**JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # an interactive step's shell
        {**STEP, "SLURM_PTY_PORT": "41225"},  # srun --ntasks=16 --pty bash: the other tasks have ended
    ],
)
def test_no_step_of_several_tasks(environ: dict[str, str]) -> None:
    assert read_step(environ) is None


def test_a_step_that_cannot_be_read() -> None:
    for name, value in (("SLURM_NODEID", None), ("SLURM_STEP_TASKS_PER_NODE", None), ("SLURM_LOCALID", "x")):
        environ = {**STEP, name: value} if value else {key: text for key, text in STEP.items() if key != name}
        with pytest.raises(ConfigError, match=r"one of 16 tasks, but its variables .*: unset SLURM_STEP_NUM_TASKS"):
            read_step(environ)
    with pytest.raises(ConfigError, match=r"one of many tasks, but its variables .*: unset SLURM_STEP_NUM_TASKS"):
        read_step({**STEP, "SLURM_STEP_NUM_TASKS": "many"})


def test_a_task_for_each_gpu() -> None:
    step = read_step({**STEP, "SLURM_NODEID": "1", "SLURM_LOCALID": "3", "SLURM_PROCID": "11"})
    assert step
    assert not step.one_per_node
    assert step.environment() == {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "20505",
    }


def test_ranks_of_a_node_follow_each_other_however_tasks_were_dealt_out() -> None:
    """Cyclic distribution: tasks 0, 2, 3 on the first node, 1 on the second."""
    places = {"0": ("0", "0"), "1": ("1", "0"), "2": ("0", "1"), "3": ("0", "2")}
    counts = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "3,1"}
    ranks = {}
    for task, (node, local) in places.items():
        step = read_step({**STEP, **counts, "SLURM_PROCID": task, "SLURM_NODEID": node, "SLURM_LOCALID": local})
        assert step
        ranks[task] = int(step.environment()["RANK"])
    assert ranks == {"0": 0, "2": 1, "3": 2, "1": 3}


def test_a_task_for_each_node() -> None:
    step = read_step({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    assert step
    assert step.one_per_node
    assert step.hosts == ("gpu003", "gpu004")


def test_steps_of_a_job_meet_at_different_ports() -> None:
    steps = [read_step({**STEP, "SLURM_STEP_ID": str(number)}) for number in range(20)]
    assert len({step.port for step in steps if step}) == 20
    assert all(20000 <= step.port < 30000 for step in steps if step)
