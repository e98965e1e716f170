"""Progress of a preparation: a bar on a terminal, a line every ten seconds elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text as RichText

from ithaca.base.sizes import format_bytes, format_seconds

_EVERY = 10.0  # seconds between lines


def say(console: Console, line: str) -> None:
    """Print a line as it is: rich would take some paths for markup."""
    console.print(RichText(line), soft_wrap=True)


class Meter:
    """Shows the bytes read, of all bytes, the rate, the time left, and the tokens made of them."""

    def __init__(self, console: Console, total: int, done: int):
        self._console, self._total, self._first = console, total, done
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
            self._task = self._bar.add_task("0 tokens", total=total, completed=done)

    def __enter__(self) -> "Meter":
        self._began = self._last = time.monotonic()
        if self._bar:
            self._bar.start()
        return self

    def show(self, done: int, tokens: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, description=f"{tokens:,} tokens")
        elif time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            speed = (done - self._first) / (self._last - self._began)
            line = f"{100 * done / max(self._total, 1):.0f} % of {format_bytes(self._total)}, {format_bytes(speed)}/s"
            left = f", {format_seconds((self._total - done) / speed)} left" if speed > 0 else ""
            say(self._console, f"{line}{left}, {tokens:,} tokens")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
