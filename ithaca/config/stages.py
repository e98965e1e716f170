"""Stages of a run: a curriculum of context lengths, one after the other in one run.

[[train.stages]]
tokens = "8K"
steps = 400

[[train.stages]]
tokens = "64K"
steps = 100
rope = "theta, rope_theta=4e6"
"""

from dataclasses import dataclass, field, fields
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import parse_tokens
from ithaca.model.extend import parse_rope
from ithaca.plans.plan import Plan

MOST_TOKENS = 2**32  # in a step
EXAMPLE = "write [[train.stages]] with tokens and steps for each"


@dataclass(frozen=True, kw_only=True)
class Stage:
    tokens: int = field(default=0, metadata={"read": parse_tokens})
    """The context length."""
    steps: int = 0
    """Optimizer steps."""
    batch: int | None = None
    """Sequences in a step. Default: as many tokens in a step as in the first stage, whose default is train.batch."""
    micro_batch: int | None = field(default=None, compare=False)
    """Sequences in one pass. Default: one pass."""
    learning_rate: float | None = None
    """The highest learning rate of the stage. Default: train.learning_rate."""
    warmup: int | None = None
    """Steps over which the rate rises at the beginning of the stage. Default: as for a run of its steps."""
    rope: str = ""
    """The rope of the stage, made from the model's own. Default: model.rope."""
    plan: Plan | None = field(default=None, compare=False, metadata={"read": lambda table: _read_plan(table)})
    """The Plan of the stage. Default: that of [plan], or the planner's for this length."""

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.steps < 1:
            raise ConfigError(
                f"a stage has tokens={self.tokens} and steps={self.steps}: 2 tokens and 1 step or more are needed; "
                f"{EXAMPLE}"
            )
        for name in ("batch", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: 1 or more is needed")
        if (self.batch or 1) * self.tokens > MOST_TOKENS:
            raise ConfigError(
                f"a stage has batch={self.batch or 1} × tokens={self.tokens}, more than the {MOST_TOKENS} tokens that "
                "a step can have: fewer sequences work"
            )
        if self.warmup is not None and self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}: 0 or more is needed")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate is {self.learning_rate}: a number above 0 is needed")
        if self.batch and self.micro_batch and self.batch % self.micro_batch:
            raise ConfigError(f"micro_batch {self.micro_batch} does not divide batch {self.batch}")
        if self.rope:
            parse_rope(self.rope)

    def table(self) -> dict[str, Any]:
        """The options that are set, as a table."""
        found = {name: value for name, value in vars(self).items() if value not in (None, "") and name != "plan"}
        if self.plan is not None:
            found["plan"] = {name: value for name, value in vars(self.plan).items() if value is not None}
        return found


def changed_stage(mine: tuple[Stage, ...], theirs: tuple[Stage, ...]) -> str:
    """Return how stages differ from those of a checkpoint, and what continues the run."""
    if len(mine) != len(theirs):
        return (
            f"the run has {len(mine)} stages, and its checkpoints have {len(theirs)}: put [[train.stages]] back to "
            "continue it"
        )
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True), start=1):
        for option in (item.name for item in fields(Stage) if item.compare):
            now, before = getattr(one, option), getattr(other, option)
            if now != before:
                return (
                    f"stage {number} has {option}={now!r}, and its checkpoints have {option}={before!r}: put it back "
                    "in [[train.stages]] to continue it"
                )
    raise AssertionError("the stages are the same")


def read_stages(tables: Any) -> tuple[Stage, ...]:
    """Return the stages of an array of tables."""
    from ithaca.config.build import build  # which needs the sections, and these need stages

    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"train.stages is {tables!r}, no list of stages: {EXAMPLE}")
    return tuple(build(Stage, table, f"train.stages.{number}.") for number, table in enumerate(tables, start=1))


def _read_plan(table: Any) -> Plan | None:
    from ithaca.config.build import read_plan

    return read_plan(table)
