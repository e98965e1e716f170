"""The learning rate over a run: linear warm-up, then `cosine` or `wsd` (warm-up, stable, decay)."""

import math

from ithaca.config import TrainSection


def learning_rate(options: TrainSection, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    done = (step - options.warmup) / max(options.steps - 1 - options.warmup, 1)  # 1 in the last step
    if options.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    else:
        share = min((1 - done) / options.decay, 1.0) if options.decay else 1.0
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * share)
