"""What a run tells: lines on the terminal, log.txt, metrics.jsonl, a picture of the loss, TensorBoard or W&B.

Rank 0 prints; the other ranks are silent. On a terminal a live line shows step, loss, learning rate, speed, memory and
time left, and in a long step a second line shows where it is (live_line.py). Elsewhere such lines are printed now and
then. log.txt has the lines of some steps (`run.log_every`), metrics.jsonl the metrics of all. If the reader of the
output goes away (`| head`, a closed terminal), the run continues and the log gets the rest.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ithaca.base.disk import not_a_file, reason, same_file
from ithaca.base.errors import ConfigError, RunError
from ithaca.base.shell import continue_command, quoted
from ithaca.base.sizes import format_bytes, format_clock, format_count, format_number
from ithaca.train.run_folder import VALIDATION, RunFolder, partial_name, writing

SILENT_SECONDS = 60.0  # after which a step is logged, and a long one says where it is


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

    `lost`, as of the run folder, says if the folder is not the run's any more: then nothing is made in it.
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
        self._placed_at = self._began  # when a step ended or the log was told where one is
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
        """Log a line. A log that cannot be written does not stop the run, and is told once."""
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
        self.step_seconds = (now - self._began) / (done - self._first)
        if metrics.get("validation_loss") is not None:
            self._validation = metrics["validation_loss"]
        self._step_line = self._line(metrics)
        self.live(self._step_line)
        if self._is_logged(done, now):
            self._logged_at = now
            self._log_line(self._step_line)

    def _is_logged(self, done: int, now: float) -> bool:
        """Return whether a step gets a line in the log: the first and the last, and every so many."""
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
        """Show no live line any more, and leave what is there. A signal's handler may call this."""
        self._live = None

    def place(self, text: str) -> None:
        """Show where a long step is, below the line of the last step; without a terminal and in the log, sparsely."""
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
        parts.append(f"{format_clock(self.step_seconds * (self.steps - done))} left")
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


class Sink(Protocol):
    """A place that the metrics of each step go to. `write` may raise OSError, or return a warning."""

    def write(self, metrics: dict[str, Any]) -> str | None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, flushed after every step."""

    def __init__(self, folder: RunFolder):
        with writing(folder.metrics):
            self._file = Appended(folder.metrics, folder.lost)

    def write(self, metrics: dict[str, Any]) -> str | None:
        if self._file.add(json.dumps(metrics)):
            return f"'{self._file.path}' was deleted or replaced: a new one begins with step {metrics['step']}"
        return None

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard's event files in the run folder."""

    def __init__(self, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        place = folder.path / "tensorboard"
        with writing(place):
            self._writer = SummaryWriter(str(place))

    def write(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named after the run folder."""

    def __init__(self, folder: RunFolder):
        import wandb  # pyrefly: ignore

        self._run = wandb.init(
            project="ithaca", name=folder.path.name, id=folder.path.name, resume="allow", dir=str(folder.path)
        )

    def write(self, metrics: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


REPORTS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # what each imports


def check_report(report: str) -> None:
    """Raise an error if a place that metrics go to needs a package that is missing."""
    try:
        if report:
            import_module(PACKAGES[report])
    except ImportError:
        raise ConfigError(f"run.report={report} needs a package: pip install 'ithaca[{report}]'") from None


class Sinks:
    """All places that metrics go to. One that fails is told once, and once more when it works again."""

    def __init__(self, sinks: list[Sink], folder: RunFolder, warn: Callable[[str], None]):
        self._sinks, self._failing, self._folder, self._warn = sinks, list[Sink](), folder, warn

    def write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step. A place that fails does not stop the run."""
        for sink in self._sinks:
            try:
                warning = sink.write(metrics)
            except OSError as problem:
                self._fails(sink, metrics["step"], problem)
                continue
            if sink in self._failing:
                self._failing.remove(sink)
                self._warn(f"metrics are written again from step {metrics['step']} on")
            if warning:
                self._warn(warning)

    def _fails(self, sink: Sink, step: int, problem: OSError) -> None:
        if sink not in self._failing:
            self._failing.append(sink)
            why = reason(problem, self._folder.path)
            self._warn(f"the metrics of step {step} could not be written ({why}); training continues")

    def close(self) -> None:
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                sink.close()


def open_sinks(folder: RunFolder, report: str, first: bool, warn: Callable[[str], None]) -> Sinks:
    """Open the places that metrics go to; none on ranks other than the first."""
    if not first:
        return Sinks([], folder, warn)
    return Sinks([JsonLines(folder), *([REPORTS[report](folder)] if report else [])], folder, warn)


def tell_conclusion(folder: RunFolder, progress: Progress, done: int, saved: int, stopped: bool) -> None:
    """Draw the loss and say how the run ended. Raise an error if its files were taken away or cannot be written."""
    progress.end_live()
    complete = f"the checkpoint of step {saved} is complete"
    if lost := folder.lost():
        raise RunError(f"{lost}, but {complete}")
    metrics, problem = list[dict[str, Any]](), None
    try:
        metrics = folder.read_metrics()
    except OSError as error:
        problem = f"'{folder.metrics}' cannot be read ({error.strerror})"
    else:
        if len(metrics) < done:
            progress.warn(f"'{folder.metrics}' has the metrics of {len(metrics)} of {format_count(done, 'step')}")
    try:
        if metrics:
            draw_loss(metrics, folder.picture, folder.read_validations())
    except OSError as error:
        problem = f"'{folder.picture}' could not be written ({reason(error, folder.path)})"
    if stopped:
        progress.say(f"Stopped after step {done}. Continue with: {continue_command(folder.path)}")
    else:
        progress.say("\n".join(_summary(folder, metrics, done)))
    if kind := not_a_file(folder.log):
        problem = problem or f"the log '{folder.log}' could not be written (it is {kind})"
    if problem:
        raise RunError(f"{problem}, but {complete}")


def stopped_at_once(folder: RunFolder, done: int) -> str:
    """Return what a second Ctrl-C did and what is left of the run after `done` steps."""
    finished = f"Step {done} was the last to finish" if done else "The first step was not finished"
    if saved := folder.last_checkpoint():
        kept = f"the checkpoint of step {saved} is kept: {continue_command(folder.path)} continues from there"
    elif folder.begun():
        kept = f"there is no checkpoint yet: {continue_command(folder.path)} starts again from the beginning"
    else:
        kept = "nothing was saved"
    return f"Stopped at once. {finished}; {kept}."


def _summary(folder: RunFolder, metrics: list[dict[str, Any]], done: int) -> Iterator[str]:
    losses = [loss for _, loss in _losses(metrics)]
    learned = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "no loss"
    yield f"Done: {learned} over {format_count(done, 'step')}"
    yield f"  run folder   {folder.path}"
    if os.path.isfile(folder.picture):
        yield f"  loss curve   {folder.picture}"
    yield f"  next         ithaca export {quoted(folder.path)} {quoted(Path(f'{folder.path}-model'))}"


def _losses(metrics: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the steps that have a loss, and their losses."""
    return [(line["step"], line["loss"]) for line in metrics if isinstance(line.get("loss"), int | float)]


def draw_loss(metrics: list[dict[str, Any]], file: Path, validations: Sequence[dict[str, Any]] = ()) -> None:
    """Draw the loss of each step as a thin line and a running mean over a twentieth of the steps as a thick one.

    Steps without a label have no loss and are left out. Validation losses are points.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = [step for step, _ in _losses(metrics)], [loss for _, loss in _losses(metrics)]
    width = max(len(losses) // 20, 1)
    means = [sum(losses[max(i - width + 1, 0) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(steps, losses, color="#9db8d2", linewidth=1)
    axes.plot(steps, means, color="#1f4e79", linewidth=2)
    if validations:
        points = [(line["step"], line[VALIDATION]) for line in validations]
        axes.plot(*zip(*points, strict=True), color="#c0504d", marker="o", markersize=4, label="validation")
        axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    partial = partial_name(file)
    try:
        figure.savefig(partial, format="png")
        partial.rename(file)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)
