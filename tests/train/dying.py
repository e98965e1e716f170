"""`ithaca train` whose ranks end or stop themselves, each once: `-m tests.train.dying RANK:STEP:SIGNAL… train …`.

Beside signals: ERROR raises an error, HANG waits for ever.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ithaca.cli import main
from ithaca.train.loop import TrainingRun


def die_in(run: TrainingRun, when: str) -> None:
    rank, step, number = when.split(":")
    if int(rank) == run.mesh.rank and int(step) == run.done + 1:
        note = Path(f"died-{when}")
        if not note.exists():
            note.write_text(str(os.getpid()))
            if number == "ERROR":
                raise RuntimeError("planted")
            if number == "HANG":
                print("Hanging", flush=True)
                threading.Event().wait()
            os.kill(os.getpid(), signal.Signals[number])


def die(deaths: list[str]) -> None:
    whole = TrainingRun._backward

    def part(run: TrainingRun, *args: Any) -> Any:
        for when in deaths:
            die_in(run, when)
        return whole(run, *args)

    TrainingRun._backward = part


if __name__ == "__main__":
    words = sys.argv[1:]
    middle = words.index("train")
    die(words[:middle])
    sys.argv = ["ithaca", *words[middle:]]
    main()
