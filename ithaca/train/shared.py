"""Whether all nodes have the same run folder: rank 0 leaves a word in its lock file, and the others look for it there.

Ranks on one node cannot disagree, and are not asked.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import IO

from ithaca.errors import ConfigError
from ithaca.parallel.agree import from_first, without
from ithaca.parallel.mesh import Mesh
from ithaca.train.run import RunFolder

SEE_SECONDS = 30.0  # network file systems may remember for so long that a file was not there
ASK_SECONDS = 0.2


def check_shared(run: RunFolder, lock: IO[str] | None, grid: Mesh) -> None:
    """Refuse, on all ranks, a run folder that one of them does not share with rank 0, which holds its lock."""
    if not grid.several_nodes:
        return
    word = from_first(grid.group, lambda: leave_word(lock) if lock else "")
    if blind := without(grid.group, sees_word(run.lock, word)):
        raise ConfigError(
            f"the run folder '{run.path}' is not the same on all ranks (rank {blind[0]} does not see what rank 0 "
            "wrote): --run must lie on a disk that all nodes share"
        )


def leave_word(lock: IO[str]) -> str:
    word = secrets.token_hex(8)
    lock.truncate(0)
    lock.write(word)
    lock.flush()
    os.fsync(lock.fileno())
    return word


def sees_word(file: Path, word: str) -> bool:
    """Whether the word is there, or comes within `SEE_SECONDS`."""
    until = time.monotonic() + SEE_SECONDS
    while True:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            os.listdir(file.parent)  # which has a network file system ask anew
            if file.read_text(encoding="utf-8") == word:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(ASK_SECONDS)
