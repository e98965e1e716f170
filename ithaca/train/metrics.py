"""What a step gave, for people and programs: a line in metrics.jsonl, a picture of the loss, a report elsewhere."""

import json
from pathlib import Path
from typing import Any, Protocol

from ithaca.base.errors import ConfigError
from ithaca.train.run_folder import RunFolder


class Sink(Protocol):
    def write(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl, on disk after every step."""

    def __init__(self, folder: RunFolder):
        self._file = folder.metrics.open("a", encoding="utf-8")

    def write(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
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
    def __init__(self, folder: RunFolder):
        try:
            import wandb  # pyrefly: ignore
        except ImportError:
            raise ConfigError("run.report=wandb needs a package: pip install 'ithaca[wandb]'") from None
        self._run = wandb.init(
            project="ithaca", name=folder.path.name, id=folder.path.name, resume="allow", dir=str(folder.path)
        )

    def write(self, metrics: dict[str, Any]) -> None:
        self._run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


REPORTS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_sinks(folder: RunFolder, report: str, first: bool) -> list[Sink]:
    """Where a step's metrics go; from the first rank only."""
    if not first:
        return []
    return [JsonLines(folder), *([REPORTS[report](folder)] if report else [])]


def draw_loss(metrics: list[dict[str, Any]], file: Path) -> None:
    """The loss over steps, each step thin and a running mean of a twentieth of them thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, losses = [line["step"] for line in metrics], [line["loss"] for line in metrics]
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
