"""How a rank ends, and how it tells torchrun: the error's sentence, and a signal if a restart cannot help.

torchrun's report at its end quotes a rank's error file. But no exit code tells it that a restart cannot help: its agent
restarts after every code but 0, as often as --max-restarts says (torch 2.13, SimpleElasticAgent._invoke_run).
So the first rank of a node that meets a user's mistake asks its torchrun to end, by SIGTERM. Without restarts left, and
under another parent than torchrun, the rank only ends.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil

from ithaca.train.report.report import tell

RESTARTS, MOST = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # <attempt's folder>/<local rank>/error.json


def leave(text: str) -> NoReturn:
    """End this rank, from any thread, so that its launcher can restart the job."""
    tell(text, sys.stderr)
    report_error(text)
    exit_now(1)


def exit_now(code: int) -> NoReturn:
    """Exit at once. During Python's own shutdown, a gloo thread that calls into Python would abort the process."""
    for stream in (sys.stdout, sys.stderr):
        if stream:  # None if it was closed from the start
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


def report_error(sentence: str) -> None:
    """Write the sentence into the error file that torchrun gave this rank, if it did."""
    if file := os.environ.get(ERROR_FILE):
        told = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(told))


def end_torchrun() -> bool:
    """Ask this rank's torchrun to end instead of restarting. Return whether this rank sent the signal."""
    if not (os.environ.get(ERROR_FILE) and _restarts_left()):
        return False
    parent = os.getppid()
    try:
        if not is_torchrun(psutil.Process(parent).cmdline()):
            return False
        (Path(os.environ[ERROR_FILE]).parents[1] / "mistake").touch(exist_ok=False)  # a second signal would do harm
        os.kill(parent, signal.SIGTERM)
    except (OSError, psutil.Error):
        return False
    return True


def _restarts_left() -> bool:
    counts = os.environ.get(RESTARTS, ""), os.environ.get(MOST, "")
    return all(count.isdigit() for count in counts) and int(counts[0]) < int(counts[1])


def is_torchrun(words: list[str]) -> bool:
    """Whether a process with these words is torchrun's agent, and no shell or container's init."""
    return any(Path(word).name == "torchrun" or word == "torch.distributed.run" for word in words[:3])
