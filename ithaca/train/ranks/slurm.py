"""`srun ithaca train …`: what SLURM's environment says of the step that this process is a task of.

Only a step of several tasks counts. Batch scripts and `salloc` shells have variables of the job, SLURM_NTASKS
and even SLURM_PROCID among them, but none of a step; the shell of `srun --pty` may have those of a step, but no other
task runs its commands. Ranks are numbered by node and by task within it, not by SLURM_PROCID, so that those of a node
follow each other however tasks were dealt out, and rank 0 is on the step's first host.

Variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from ithaca.base.errors import ConfigError

# Below the ports that systems give away for outgoing connections
FIRST_PORT, PORTS = 20000, 10000


@dataclass(frozen=True)
class Step:
    """A SLURM step, seen from one of its tasks."""

    hosts: tuple[str, ...]
    tasks: tuple[int, ...]  # of each host
    node: int  # which of them this is
    local: int  # this task's number on its node
    port: int

    @property
    def one_per_node(self) -> bool:
        """Whether each task has a node for itself."""
        return all(count == 1 for count in self.tasks)

    def environment(self) -> dict[str, str]:
        """The environment variables that torchrun would have set for this task as a rank."""
        return {
            "RANK": str(sum(self.tasks[: self.node]) + self.local),
            "WORLD_SIZE": str(sum(self.tasks)),
            "LOCAL_RANK": str(self.local),
            "LOCAL_WORLD_SIZE": str(self.tasks[self.node]),
            "MASTER_ADDR": self.hosts[0],
            "MASTER_PORT": str(self.port),
        }


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step that this process is a task of; None without a step, or if the step has one task."""
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PTY_PORT" in environ:
        return None
    try:
        return _read_step(environ) if int(environ["SLURM_STEP_NUM_TASKS"]) > 1 else None
    except (KeyError, ValueError) as problem:
        raise ConfigError(
            f"SLURM says that this is one of {environ['SLURM_STEP_NUM_TASKS']} tasks, but its variables cannot "
            f"be read ({type(problem).__name__}: {problem}): unset SLURM_STEP_NUM_TASKS to train on this node alone"
        ) from None


def _read_step(environ: Mapping[str, str]) -> Step:
    job, step = int(environ.get("SLURM_JOB_ID", 0)), int(environ.get("SLURM_STEP_ID", 0))
    return Step(
        hosts=tuple(read_hosts(environ["SLURM_STEP_NODELIST"])),
        tasks=tuple(read_counts(environ["SLURM_STEP_TASKS_PER_NODE"])),
        node=int(environ["SLURM_NODEID"]),
        local=int(environ["SLURM_LOCALID"]),
        port=FIRST_PORT + (job + 1009 * step) % PORTS,  # steps of a job may run at the same time
    )


def read_hosts(text: str) -> list[str]:
    """'gpu[003-004,7]-ib,x1' as gpu003-ib, gpu004-ib, gpu7-ib, x1."""
    hosts = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", entry)  # every other part stood in brackets
        choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
        hosts += ["".join(chosen) for chosen in product(*choices)]
    return hosts


def _numbers(text: str) -> list[str]:
    """'003-004,7' as 003, 004, 7."""
    numbers = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def read_counts(text: str) -> list[int]:
    """'8(x2),4' as 8, 8, 4."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
