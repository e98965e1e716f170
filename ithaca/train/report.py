"""What a run tells: lines on the terminal, log.txt, metrics.jsonl, a picture of the loss, TensorBoard or W&B.

Rank 0 prints; the other ranks are silent. On a terminal one live line shows step, loss, speed, memory and time left;
elsewhere such a line is printed now and then. If the reader of the output goes away (`| head`, a closed terminal), the
run continues and the log gets the rest.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_bytes
from ithaca.train.run_folder import RunFolder


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


class Progress:
    """Prints the lines of a run and writes them to its log. `log` is None on ranks that print nothing."""

    def __init__(self, log: Path | None, first_step: int, steps: int):
        self._log = log.open("a", encoding="utf-8") if log else None
        self._console = Console(quiet=log is None, soft_wrap=True)
        terminal = self._console.is_terminal and log is not None
        self._live = Live(console=self._console, auto_refresh=False) if terminal else None
        self._first, self._steps = first_step, steps
        self._every = max((steps - first_step) // 12, 1)
        self._began = time.perf_counter()
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.start()

    def say(self, text: str) -> None:
        """Print a line and log it."""
        if self._log:
            with may_be_gone(sys.stdout):
                self._console.print(Text(text))
            with contextlib.suppress(OSError):  # a full disk must not stop the run
                print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=self._log, flush=True)

    def live(self, text: str) -> None:
        """Show a line that the next one replaces. Without a terminal, show nothing."""
        if self._live:
            with may_be_gone(sys.stdout):
                self._live.update(Text(text), refresh=True)

    def warn(self, text: str) -> None:
        """Print a warning and log it."""
        self.say(f"warning: {text}")

    def step(self, metrics: dict[str, Any]) -> None:
        """Show the metrics of a step: always on a terminal, elsewhere now and then."""
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
            f"Step {done}/{self._steps}",
            "no labels" if metrics["loss"] is None else f"loss {metrics['loss']:.3f}",
            f"{metrics['tokens_per_second_per_rank']:.0f} tokens/s/rank",
        ]
        if metrics["mfu_causal"] is not None:
            parts.append(f"{100 * metrics['mfu_causal']:.1f} % causal MFU")
        if metrics["gpu_bytes"] is not None:
            parts.append(f"GPU {format_bytes(metrics['gpu_bytes'])}")
        parts.append(f"host {format_bytes(metrics['host_bytes'])}")
        left = (time.perf_counter() - self._began) / (done - self._first) * (self._steps - done)
        parts.append(f"{left // 60:.0f}:{left % 60:02.0f} left")
        return "  ".join(parts)

    def end_live(self) -> None:
        """Leave the live line in place; later lines come below it."""
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
    """A place that the metrics of each step go to."""

    def write(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, flushed after every step."""

    def __init__(self, folder: RunFolder):
        self._file = folder.metrics.open("a", encoding="utf-8")

    def write(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard's event files in the run folder."""

    def __init__(self, folder: RunFolder):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("run.report=tensorboard needs a package: pip install 'ithaca[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder.path / "tensorboard"))

    def write(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named after the run folder."""

    def __init__(self, folder: RunFolder):
        try:
            import wandb  # pyrefly: ignore
        except ImportError:
            raise ConfigError("run.report=wandb needs a package: pip install 'ithaca[wandb]'") from None
        self._run = wandb.init(
            project="ithaca", name=folder.path.name, id=folder.path.name, resume="allow", dir=str(folder.path)
        )

    def write(self, metrics: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


REPORTS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_sinks(folder: RunFolder, report: str, first: bool) -> list[Sink]:
    """Open the places that metrics go to; none on ranks other than the first."""
    if not first:
        return []
    return [JsonLines(folder), *([REPORTS[report](folder)] if report else [])]


def draw_loss(metrics: list[dict[str, Any]], file: Path) -> None:
    """Draw the loss of each step as a thin line and a running mean over a twentieth of the steps as a thick one.

    Steps without a label have no loss and are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [line for line in metrics if line.get("loss") is not None]
    steps, losses = [line["step"] for line in drawn], [line["loss"] for line in drawn]
    width = max(len(losses) // 20, 1)
    means = [sum(losses[max(i - width + 1, 0) : i + 1]) / min(i + 1, width) for i in range(len(losses))]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(steps, losses, color="#9db8d2", linewidth=1)
    axes.plot(steps, means, color="#1f4e79", linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, format="png")
    pyplot.close(figure)
    partial.rename(file)
