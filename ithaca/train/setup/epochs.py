"""How long a run is: steps, or passes over the data (`train.epochs`)."""

import math
from fractions import Fraction

from ithaca.base.sizes import format_count, format_number
from ithaca.config import TrainSection

STEPS = 16  # of a run that sets neither steps nor epochs


def count_steps(options: TrainSection, rows: int) -> int:
    """Return the steps of train.epochs, rounded up. Exact: 0.1 is a tenth. `rows`: sequences of an epoch."""
    assert options.batch
    return math.ceil(Fraction(repr(options.epochs)) * rows / options.batch)


def describe_epochs(options: TrainSection, tokens: int, rows: int, what: str = "the run") -> str:
    """Return a line about an epoch of `tokens` in `rows` sequences, and the number of epochs that `what` trains."""
    assert options.batch
    assert options.steps
    steps = rows / options.batch
    epochs = options.steps / steps
    return (
        f"Each epoch: {tokens:,} tokens, {format_count(rows, 'sequence')}, {_counted(steps, 'step')}; {what} is "
        f"{_counted(epochs, 'epoch')}"
    )


def _counted(number: float, what: str) -> str:
    """Return '37.5 steps' or '1 step'."""
    shown = format_number(number) if number < 1000 else f"{number:,.0f}"
    return f"{shown} {what if shown == '1' else f'{what}s'}"
