"""Jobs in which one rank goes missing."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ithaca.base.errors import LostRankError
from tests.nursery import SECONDS


def vanish(how: str, pid: Path) -> None:
    """Leave the other ranks alone, in one of three ways; in `pid` they find whom to end, if that is still there."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    pid.write_text(str(os.getpid()))
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + SECONDS
    while how == "hangs" and time.monotonic() < until:
        time.sleep(0.1)


def survive(function: Callable[..., Any], missing: int, pid: Path, *args: Any) -> None:
    """Say whom this rank misses; one of the survivors ends the missing one where it is still."""
    try:
        function(*args)
    except LostRankError as error:
        print(error, error.ranks)
        pid.with_name("noticed").touch()
        if pid.is_file() and dist.get_rank() == (missing + 1) % dist.get_world_size():
            os.kill(int(pid.read_text()), signal.SIGKILL)
        raise SystemExit(7) from None
