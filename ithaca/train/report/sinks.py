"""Where the metrics of each step go: metrics.jsonl, TensorBoard, W&B. One that fails does not end the run."""

import contextlib
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from ithaca.base.disk import reason
from ithaca.base.errors import ConfigError
from ithaca.train.folder.run_folder import RunFolder, writing
from ithaca.train.report.report import Appended


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
    """All places that metrics go to. There is one warning if a place fails, and one when it works again."""

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
