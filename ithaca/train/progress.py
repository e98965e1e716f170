"""One live line: step, loss, speed, memory, time left. Where no terminal watches, a line now and then instead.

Rank 0 speaks, the others are silent; all that is said goes into the run's log as well. Where whoever watched has gone
(`| head`, a terminal that was closed), the run goes on in silence, and the log gets the rest.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ithaca.base.sizes import format_bytes


def tell(text: str, stream: IO[str]) -> None:
    """A line to whoever is still there to read it."""
    with may_be_gone(stream):
        print(text, file=stream, flush=True)


@contextmanager
def may_be_gone(stream: IO[str] | None) -> Iterator[None]:
    """Write to a stream in the body; where it takes nothing any more, it leads nowhere from then on."""
    try:
        yield
    except (OSError, SystemExit):  # rich ends the program where it meets a broken pipe
        with contextlib.suppress(OSError, AttributeError):  # it may be no file of the system
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # pyrefly: ignore
            os.close(nowhere)


class Progress:
    """Shows a run as it goes. `file` is the log; None on ranks that say nothing."""

    def __init__(self, file: Path | None, first: int, steps: int):
        self._log = file.open("a", encoding="utf-8") if file else None
        self._console = Console(quiet=file is None, soft_wrap=True)
        terminal = self._console.is_terminal and file is not None
        self._live = Live(console=self._console, auto_refresh=False) if terminal else None
        self._first, self._steps = first, steps
        self._every = max((steps - first) // 12, 1)
        self._began = time.perf_counter()
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._log:
            with may_be_gone(sys.stdout):
                self._console.print(Text(text))
            with contextlib.suppress(OSError):  # a full disk takes the log, not the run
                print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=self._log, flush=True)

    def live(self, text: str) -> None:
        """A line that the next one replaces; where no terminal watches, none."""
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.update(Text(text), refresh=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def step(self, metrics: dict[str, Any]) -> None:
        """The live line, or one of the lines now and then."""
        done = metrics["step"]
        if not self._log:
            return
        if self._live:
            self.live(self._line(metrics))
        elif (done - self._first) % self._every == 0 or done in (self._first + 1, self._steps):
            tell(self._line(metrics), sys.stdout)

    def _line(self, metrics: dict[str, Any]) -> str:
        done = metrics["step"]
        parts = [
            f"step {done}/{self._steps}",
            f"loss {metrics['loss']:.3f}",
            f"{metrics['tokens_per_second_per_rank']:.0f} tokens/s/rank",
        ]
        if metrics["mfu_causal"] is not None:
            parts.append(f"{100 * metrics['mfu_causal']:.1f} % causal MFU")
            parts.append(f"GPU {format_bytes(metrics['gpu_bytes'])}")
        parts.append(f"host {format_bytes(metrics['host_bytes'])}")
        left = (time.perf_counter() - self._began) / (done - self._first) * (self._steps - done)
        parts.append(f"{left // 60:.0f}:{left % 60:02.0f} left")
        return "  ".join(parts)

    def end_live(self) -> None:
        """Leave the live line where it is; what is said from now on comes below."""
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.stop()
            self._live = None

    def close(self) -> None:
        self.end_live()
        if self._log:
            with contextlib.suppress(OSError):
                self._log.close()
