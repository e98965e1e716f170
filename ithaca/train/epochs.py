"""How long a run is: steps, or passes over the data (`train.epochs`)."""

import math
from fractions import Fraction

from ithaca.base.sizes import format_count, format_number
from ithaca.config import TrainSection
from ithaca.data.reader import TokenFile
from ithaca.data.sample import rows_per_epoch

STEPS = 16  # of a run that sets neither steps nor epochs


def count_steps(options: TrainSection, data: TokenFile) -> int:
    """Return the steps of train.epochs, rounded up. Exact: 0.1 is a tenth."""
    assert options.batch
    assert options.tokens
    return math.ceil(Fraction(repr(options.epochs)) * rows_per_epoch(data, options.tokens) / options.batch)


def describe_epochs(options: TrainSection, data: TokenFile) -> str:
    """Return a line about the length of an epoch and of the run."""
    assert options.batch
    assert options.tokens
    assert options.steps
    rows = rows_per_epoch(data, options.tokens)
    steps = rows / options.batch
    epochs = options.steps / steps
    return (
        f"Each epoch: {data.tokens:,} tokens, {format_count(rows, 'sequence')}, {_counted(steps, 'step')}; the run is "
        f"{_counted(epochs, 'epoch')}"
    )


def _counted(number: float, what: str) -> str:
    """Return '37.5 steps' or '1 step'."""
    shown = format_number(number) if number < 1000 else f"{number:,.0f}"
    return f"{shown} {what if shown == '1' else f'{what}s'}"
