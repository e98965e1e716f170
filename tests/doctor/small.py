"""Sizes that take no time, and the command with them, for tests: no figure of theirs is looked at."""

import os
import sys
from pathlib import Path

from ithaca.cli import main
from ithaca.doctor import devices, exam
from ithaca.doctor.exam import Sizes
from ithaca.rehearsal import measure
from ithaca.rehearsal.measure import Effort
from tests.nursery import fork_ranks

FREE = 32 * 2**30  # bytes of this node
SIZES = Sizes(
    effort=Effort(compute_seconds=0, copy_seconds=0, tokens=8, hidden=16, mlp=24, chunk=128, copied=2**10),
    messages=(4096, 65536),
    repeats=2,
    disk=2**20,
    step_tokens=256,
)


def doctor(folder: Path, *words: str) -> None:
    """`ithaca doctor …` in a process of its own, whose ranks are forked."""
    exam.CPU_QUICK = exam.CPU_SIZES = SIZES  # pyrefly: ignore
    # A GPU gets half of a rank's share: on a machine whose memory other programs have taken, no model would fit
    devices.host_budget = lambda: (FREE, "free memory")
    measure.SMALL["num_hidden_layers"] = 2
    fork_ranks()
    os.chdir(folder)
    sys.argv = ["ithaca", "doctor", "--device", "cpu", *words]
    main()
