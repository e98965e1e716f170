"""Notice a loss that rises far above its start, as after steps with too high a learning rate.

The loss at the start is the mean over the first steps, until they have 4096 labels together; at the lengths that
Ithaca is for, that is the first step, before any update. The loss now is the mean over the latest steps: three, or
more until they have 4096 labels. Both means count each label once, so steps with few labels, whose losses are noise,
cannot decide. A rise of more than 1, which makes the perplexity e times as large, is told once. The run goes on.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from ithaca.config import TrainSection

LABELS, STEPS, RISE = 4096, 3, 1.0


class Mean:
    """The mean loss of some steps, weighted by their labels."""

    def __init__(self) -> None:
        self.steps = deque[tuple[int, float, int]]()  # number, loss, labels
        self.labels, self._sum = 0, 0.0

    def add(self, step: int, loss: float, labels: int) -> None:
        self.steps.append((step, loss, labels))
        self.labels, self._sum = self.labels + labels, self._sum + loss * labels

    def forget(self) -> None:
        """Leave out the oldest steps that are not needed."""
        while len(self.steps) > STEPS and self.labels - self.steps[0][2] >= LABELS:
            _, loss, labels = self.steps.popleft()
            self.labels, self._sum = self.labels - labels, self._sum - loss * labels

    @property
    def value(self) -> float:
        return self._sum / self.labels

    def span(self) -> str:
        first, last = self.steps[0][0], self.steps[-1][0]
        return f"step {first}" if first == last else f"steps {first} to {last}"


class LossWatch:
    """Compares the loss of a run with its start."""

    def __init__(self, options: TrainSection, metrics: Iterable[dict[str, Any]] = ()):
        """`metrics`: of the steps before this start, which has printed the warnings about them."""
        self._options = options
        self._start, self._now, self._told = Mean(), Mean(), False
        for line in metrics:
            self.add(line)

    def add(self, metrics: dict[str, Any]) -> str | None:
        """Take in the metrics of a step. Return a sentence if the loss is far above its start for the first time."""
        step, loss, labels = metrics["step"], metrics.get("loss"), metrics.get("labels", LABELS)
        if self._told or not isinstance(loss, int | float) or not isinstance(labels, int) or labels < 1:
            return None
        if self._start.labels < LABELS:
            self._start.add(step, loss, labels)
            return None
        self._now.add(step, loss, labels)
        self._now.forget()
        if len(self._now.steps) < STEPS or self._now.labels < LABELS or self._now.value - self._start.value <= RISE:
            return None
        self._told = True
        return (
            f"the loss has risen from {self._start.value:.2f} ({self._start.span()}) to {self._now.value:.2f} "
            f"({self._now.span()}): a lower train.learning_rate than {self._options.learning_rate:g}, or a longer "
            f"train.warmup than {self._options.warmup}, may help (--fresh starts again); the run goes on"
        )
