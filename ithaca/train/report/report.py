"""What a run prints while it trains: lines on the terminal and in log.txt.

Rank 0 prints; the other ranks are silent. On a terminal a live line shows step, loss, learning rate, speed, memory and
time left, and in a long step a second line shows its progress (live_line.py). Elsewhere such lines are printed now and
then. log.txt has the lines of some steps (`run.log_every`), metrics.jsonl the metrics of all. If the reader of the
output goes away (`| head`, a closed terminal), the run continues and the log gets the rest.
"""

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ithaca.base.disk import not_a_file, reason, same_file
from ithaca.base.sizes import format_bytes, format_clock, format_number
from ithaca.train.folder.run_folder import writing

SILENT_SECONDS = 60.0  # after which a step, or the progress of a long step, is logged
LONG_STEP = 60.0  # seconds; in so long a step it hardly counts that the first step also compiles


def tell(text: str, stream: IO[str]) -> None:
    """Print a line, unless the reader of the stream has gone."""
    with may_be_gone(stream):
        print(text, file=stream, flush=True)


@contextmanager
def may_be_gone(stream: IO[str] | None) -> Iterator[None]:
    """Allow the body to fail to write to a stream; if it does, redirect the stream to nowhere."""
    try:
        yield
    except (OSError, SystemExit):  # rich raises SystemExit on a broken pipe
        with contextlib.suppress(OSError, AttributeError):  # the stream may have no file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # pyrefly: ignore
            os.close(nowhere)


class Appended:
    """A text file that lines are appended to. If someone deletes or replaces it, a new one begins.

    `lost` is `RunFolder.lost`. If the folder does not belong to the run any more, no new file begins.
    """

    def __init__(self, path: Path, lost: Callable[[], str | None] = lambda: None):
        self.path, self._lost, self._file = path, lost, _open_file(path)

    def add(self, line: str) -> bool:
        """Append a line, or raise OSError. Return whether a new file began."""
        gone = not same_file(self.path, self._file.fileno()) and not self._lost()
        if gone:
            begun, self._file = self._file, _open_file(self.path)
            with contextlib.suppress(OSError):
                begun.close()
        self._file.write(f"{line}\n")
        self._file.flush()
        return gone

    def close(self) -> None:
        self._file.close()


def _open_file(path: Path) -> IO[str]:
    """Open a file to append to. Raise OSError if something else is there."""
    if kind := not_a_file(path):
        raise OSError(errno.EINVAL, f"it is {kind}")
    return path.open("a", encoding="utf-8")


class Progress:
    """Prints the lines of a run and writes them to its log. `log` is None on ranks that print nothing."""

    def __init__(
        self,
        log: Path | None,
        first_step: int,
        steps: int,
        lost: Callable[[], str | None] = lambda: None,
        log_every: int | None = None,
    ):
        with writing(log or Path()):
            self._log = Appended(log, lost) if log else None
        self._log_works = True
        self._console = Console(quiet=log is None, soft_wrap=True)
        terminal = self._console.is_terminal and log is not None
        self._live = Live(console=self._console, auto_refresh=False) if terminal else None
        self._first, self.steps = first_step, steps
        self._log_every = log_every
        self._began = self._logged_at = time.perf_counter()
        self._placed_at = self._began  # when a step ended, or the progress of a step was logged
        self._warm: tuple[int, float] | None = None  # the first step of this start that ended, and when
        self.step_seconds: float | None = None  # the mean of this start; None before the first step has ended
        self._step_line = ""
        self._validation: float | None = None  # the last validation loss
        self._lock = threading.RLock()  # the live line has a thread of its own; a signal's handler may print as well
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.start()

    def say(self, text: str) -> None:
        """Print a line and log it."""
        if self._log:
            self.show(text)
            self._write_log(text)

    def _write_log(self, text: str) -> None:
        """Log a line. A log that cannot be written does not stop the run; there is one warning."""
        assert self._log
        try:
            with self._lock:
                began = self._log.add(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
            self._log_works = True
        except OSError as problem:
            if self._log_works:
                why = reason(problem, self._log.path)
                tell(f"warning: '{self._log.path}' could not be written ({why}); training continues", sys.stdout)
            self._log_works = False
            return
        if began:
            self.warn(f"'{self._log.path}' was deleted or replaced: a new one begins here")

    def live(self, text: str) -> None:
        """Show a line that the next one replaces. Without a terminal, show nothing."""
        with self._lock:
            if self._live:
                with may_be_gone(sys.stdout):
                    self._live.update(Text(text), refresh=True)

    def warn(self, text: str) -> None:
        """Print a warning and log it."""
        self.say(f"warning: {text}")

    def step(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of a step: always on a terminal, elsewhere if it is logged."""
        done, now = metrics["step"], time.perf_counter()
        self._placed_at = now
        if not self._log:
            return
        self._time_step(done - self._first, now)
        if metrics.get("validation_loss") is not None:
            self._validation = metrics["validation_loss"]
        self._step_line = self._line(metrics)
        self.live(self._step_line)
        if self._is_logged(done, now):
            self._logged_at = now
            self._log_line(self._step_line)

    def _time_step(self, done: int, now: float) -> None:
        """Update `step_seconds`. The first step also compiles and allocates, so later ones count in its place."""
        if self._warm is None:
            self._warm, self.step_seconds = (done, now), (now - self._began) / done
        else:
            first, ended = self._warm
            self.step_seconds = (now - ended) / (done - first)

    def _is_logged(self, done: int, now: float) -> bool:
        """Return whether a step gets a line in the log: the first, the last, and some between."""
        if done in (self._first + 1, self.steps):
            return True
        if self._log_every:
            return done % self._log_every == 0
        twelfth = max((self.steps - self._first) // 12, 1)
        return (done - self._first) % twelfth == 0 or now - self._logged_at >= SILENT_SECONDS

    def _log_line(self, text: str) -> None:
        """Log a line; print it too where no live line shows it."""
        self._write_log(text)
        if not self._live:
            tell(text, sys.stdout)

    def show(self, text: str) -> None:
        """Print a line above the live line."""
        with self._lock, may_be_gone(sys.stdout):
            self._console.print(Text(text))

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def silence(self) -> None:
        """Stop updating the live line, and leave it on the terminal. A signal's handler may call this."""
        self._live = None

    def place(self, text: str) -> None:
        """Show the progress of a long step below the line of the last step; log it, or print it elsewhere, sparsely."""
        if not self._log:
            return
        self.live(f"{self._step_line}\n{text}".lstrip())
        if (now := time.perf_counter()) - self._placed_at >= SILENT_SECONDS:
            self._placed_at = now
            self._log_line(text)

    def _line(self, metrics: dict[str, Any]) -> str:
        done = metrics["step"]
        parts = [
            f"Step {done}/{self.steps}",
            "no labels" if metrics["loss"] is None else f"loss {metrics['loss']:.3f}",
        ]
        if self._validation is not None:
            parts.append(f"validation {self._validation:.3f}")
        if metrics["gradient_norm"] is not None:
            parts.append(f"grad norm {format_number(metrics['gradient_norm'])}")
        parts.append(f"lr {metrics['learning_rate']:.3g}")
        parts.append(f"{metrics['tokens_per_second_per_rank']:.0f} tokens/s/rank")
        if metrics["mfu_causal"] is not None:
            parts.append(f"{100 * metrics['mfu_causal']:.1f} % causal MFU")
        if metrics["gpu_bytes"] is not None:
            parts.append(f"GPU {format_bytes(metrics['gpu_bytes'])}")
        parts.append(f"host {format_bytes(metrics['host_bytes'])}")
        assert self.step_seconds is not None
        left, is_first = f"{format_clock(self.step_seconds * (self.steps - done))} left", done == self._first + 1
        if not is_first or done == self.steps:
            parts.append(left)
        elif self.step_seconds >= LONG_STEP:
            parts.append(f"about {left}")
        return "  ".join(parts)

    def end_live(self) -> None:
        """Leave the live line in place; later lines come below it."""
        with self._lock:
            if self._live:
                with may_be_gone(sys.stdout):
                    self._live.stop()
                self._live = None

    def close(self) -> None:
        self.end_live()
        if self._log:
            with contextlib.suppress(OSError):
                self._log.close()
