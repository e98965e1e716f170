"""The learning rate over a run: linear warm-up, then `cosine` or `wsd` (warm-up, stable, decay); and its defaults.

A model with weights gets 1e-5, as is usual for the fine-tuning of all weights. A preset, which has random weights, gets

    3e-4 · (8e9 / parameters)^(1/3), at most 3e-3, rounded to two digits

The law was fitted to peak rates that are recalled from the Llama 3 report (8B 3e-4; 70B 1.5e-4, by the law 1.5e-4;
405B 8e-5, by the law 8.1e-5) and from SmolLM (1.7B: 5e-4, on it; 135M and 360M: 3e-3, above it: 135M gets 1.2e-3). They
were not looked up again, and no rate was tried above `tiny`, which has always had the largest. Given up: the rate does
not depend on the tokens of a step, though a small batch wants a smaller one.
"""

import math

from ithaca.base.sizes import format_count
from ithaca.config import TrainSection
from ithaca.train.setup.stages import Span

WITH_WEIGHTS = 1e-5
ANCHOR_RATE, ANCHOR_PARAMETERS, LARGEST = 3e-4, 8e9, 3e-3
# Options of [train] that the rate of a step depends on
RATE_OPTIONS = {"steps", "learning_rate", "schedule", "warmup", "decay", "final_rate"}


def is_settled(options: TrainSection) -> bool:
    """Return whether all options that `learning_rate` needs are set, as they are in a run that has started."""
    return None not in (options.learning_rate, options.warmup, options.steps)


def default_rate(parameters: int, random_weights: bool) -> float:
    """Return the highest learning rate of a run that sets none."""
    if not random_weights:
        return WITH_WEIGHTS
    return float(f"{min(ANCHOR_RATE * (ANCHOR_PARAMETERS / parameters) ** (1 / 3), LARGEST):.1e}")


def learning_rate(options: TrainSection, step: int) -> float:
    """Return the learning rate of a step, counted from 0. The options are settled: none of them is None."""
    highest, warmup, steps = options.learning_rate, options.warmup, options.steps
    assert highest is not None
    assert warmup is not None
    assert steps is not None
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(steps - 1 - warmup, 1)  # 1 in the last step
    if options.schedule == "cosine":
        share = 0.5 + 0.5 * math.cos(math.pi * done)
    else:
        share = min((1 - done) / options.decay, 1.0) if options.decay else 1.0
    return highest * (options.final_rate + (1 - options.final_rate) * share)


def describe_rate(options: TrainSection, parameters: int, random_weights: bool, span: Span) -> str:
    """Return one line about the rate of a run, or of a stage: the highest and why, warm-up, schedule, the last."""
    highest, warmup, steps = options.learning_rate, options.warmup, options.steps
    assert highest is not None
    assert warmup is not None
    assert steps is not None
    why = "set by train.learning_rate" if span.count == 1 else f"learning_rate of stage {span.number + 1}"
    if highest == default_rate(parameters, random_weights):
        why = f"the default for {f'{parameters / 1e6:.1f}M random' if random_weights else 'trained'} weights"
    rises = f"a warm-up of {format_count(warmup, 'step')}" if warmup else "no warm-up"
    falls = f", then {options.schedule}" if warmup < steps else ""
    last = learning_rate(options, steps - 1)
    return f"Learning rate: at most {highest:g} ({why}); {rises}{falls}; {last:g} in step {span.last}"


def warn_of_warmup(options: TrainSection, span: Span) -> str | None:
    """Return a warning if the rate does not reach its highest. A run may get more steps later, so it is no error."""
    warmup, steps = options.warmup, options.steps
    assert warmup is not None
    assert steps is not None
    if warmup <= steps:
        return None
    of_run = f"train.warmup {warmup} is longer than train.steps {steps}"
    of_stage = f"warmup {warmup} of stage {span.number + 1} is longer than its steps {steps}"
    ends = f"the rate ends at {learning_rate(options, steps - 1):g}"
    return f"{of_run if span.count == 1 else of_stage}: {ends}"
