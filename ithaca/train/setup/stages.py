"""The stages of a run: what each of them is, and which one a step belongs to.

A stage is trained as a run of its own length would be: with its own sequences, drawn anew from its own seed, its own
rate from its first step on, and its own Plan. It begins as a resumed run does, from the checkpoint at the end of the
stage before. So a run that is killed in any stage, or between two, continues with the same numbers.

The folder's model/config.json is that of the model before any stage; the rope of a checkpoint follows from the
configuration that its manifest records (`checkpoint_model`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_tokens
from ithaca.config import Config, Stage, parse_config
from ithaca.config.warmup import default_warmup
from ithaca.model.source import ModelSource, describe_model, extend_model

SEEDS = 1_000_003  # between the seeds of two stages


class OtherStage(Exception):
    """The newest checkpoint was damaged, and the one before it is of another stage, which has to be opened."""


@dataclass(frozen=True)
class Span:
    """The steps of a stage, or of a run without stages."""

    first: int  # steps that were done before it
    last: int  # steps that are done after it
    total: int  # of the run
    number: int = 0  # of the stage, from 0 on
    count: int = 1  # of stages
    tokens_before: int = 0  # that earlier stages have trained on

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def describe(self, config: Config) -> str:
        """Return a line about the stage."""
        tokens = format_tokens(config.train.tokens or 0)
        return f"Stage {self.number + 1} of {self.count}: {tokens} tokens, steps {self.first + 1} to {self.last}"


def resolve_stages(config: Config, record: Config | None, find_rate: Callable[[], float]) -> Config:
    """Return the configuration with every stage complete, but for a Plan that the planner will choose.

    Batches stay open as well if the first stage has none: its default follows from the mesh (`settle_batches`).

    Options that a stage leaves open follow from the options of the run and from the first stage. In a run that
        continues, all but rate and batch come from its record, because its [plan] and [model] are those of one stage.
        `find_rate` gives the default learning rate.
    """
    stages, options = config.train.stages, config.train
    if not stages:
        return config
    given = Stage(tokens=2, steps=1, learning_rate=options.learning_rate)
    filled = [_filled(stages[0], replace(given, batch=options.batch)), *(_filled(stage, given) for stage in stages[1:])]
    if record and record.train.stages and len(record.train.stages) == len(stages):
        filled = [_filled(stage, old) for stage, old in zip(filled, record.train.stages, strict=True)]
    else:
        rate = options.learning_rate or find_rate()
        run = replace(given, learning_rate=rate, rope=config.model.rope, plan=config.plan)
        filled = [_filled(stage, run) for stage in filled]
    complete = [
        replace(stage, warmup=default_warmup(stage.steps) if stage.warmup is None else stage.warmup) for stage in filled
    ]
    config = replace(config, train=replace(config.train, stages=tuple(complete)))
    return settle_batches(config, complete[0].batch) if complete[0].batch else config


def settle_batches(config: Config, batch: int) -> Config:
    """Return the configuration with the batch of every stage; `batch`: of the first one, if it is open."""
    if not config.train.stages:
        return config
    first = replace(config.train.stages[0], batch=config.train.stages[0].batch or batch)
    stages = [
        replace(stage, batch=stage.batch or _same_tokens(number, stage, first))
        for number, stage in enumerate(config.train.stages, start=1)
    ]
    return replace(config, train=replace(config.train, stages=tuple(stages)))


def _filled(stage: Stage, other: Stage) -> Stage:
    """Return a stage with its open options taken from another."""
    names = "batch", "micro_batch", "learning_rate", "rope", "plan"
    open_options = {name: getattr(other, name) for name in names if not getattr(stage, name)}
    return replace(stage, warmup=other.warmup if stage.warmup is None else stage.warmup, **open_options)


def _same_tokens(number: int, stage: Stage, first: Stage) -> int:
    """Return the batch that gives a step as many tokens as one of the first stage has."""
    assert first.batch
    tokens = first.batch * first.tokens
    if tokens % stage.tokens:
        needed = -(-tokens // stage.tokens)
        fitting = stage.tokens // math.gcd(first.tokens, stage.tokens)
        raise ConfigError(
            f"a step of the first stage has {tokens} tokens, which sequences of {stage.tokens} do not divide: set "
            f"batch in stage {number}, as batch={needed}, or batch={-(-first.batch // fitting) * fitting} in the first"
        )
    return tokens // stage.tokens


def span_of(config: Config, done: int) -> Span:
    """Return the stage that comes after this many steps; after all of them, the last one."""
    stages = config.train.stages
    if not stages:
        assert config.train.steps is not None
        return Span(0, config.train.steps, config.train.steps)
    ends = [*accumulate(stage.steps for stage in stages)]
    number = next((number for number, end in enumerate(ends) if done < end), len(ends) - 1)
    before = sum(stage.steps * stage.tokens * (stage.batch or 0) for stage in stages[:number])
    return Span(ends[number] - stages[number].steps, ends[number], ends[-1], number, len(ends), before)


def stage_config(config: Config, done: int) -> Config:
    """Return the configuration of the stage that comes after this many steps, as if it were a run of its own."""
    stages = config.train.stages
    if not stages:
        return config
    stage = stages[span_of(config, done).number]
    train = replace(
        config.train,
        tokens=stage.tokens,
        steps=stage.steps,
        epochs=None,
        batch=stage.batch,
        micro_batch=stage.micro_batch,
        learning_rate=stage.learning_rate,
        warmup=stage.warmup,
    )
    return replace(config, train=train, plan=stage.plan, model=replace(config.model, rope=stage.rope))


def trained_length(config: Config, done: int) -> int | None:
    """Return the longest context that a run has been trained at after this many steps; None if its record has none."""
    stages = config.train.stages
    if not stages:
        return config.train.tokens
    return max(stage.tokens for stage in stages[: span_of(config, max(done - 1, 0)).number + 1])


def stage_seed(seed: int, span: Span) -> int:
    """Return the seed of a stage's sequences."""
    return seed + SEEDS * span.number


def checkpoint_model(folder: Path, manifest: dict[str, Any], dtype: str = "auto") -> ModelSource:
    """Return the model of a checkpoint, whose weights it will fill: with the rope of its stage, if it has stages.

    `folder`: the run folder's description of the model. `manifest`: that of the checkpoint, as far as it can be read.
    """
    source = describe_model(folder, dtype)
    record = parse_config(manifest["config"]) if "config" in manifest else None
    if record and record.train.stages and record.model.rope and record.train.tokens:
        return extend_model(source, record.model.rope, record.train.tokens)
    return source
