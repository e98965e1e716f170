"""The options of a run, section by section: frozen dataclasses that check their values, and how two runs differ."""

import dataclasses
import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from ithaca.base.errors import ConfigError, suggestion
from ithaca.base.sizes import MOST_SECONDS, nearest_divisors, parse_tokens
from ithaca.config.stages import MOST_TOKENS, Stage, changed_stage, read_stages
from ithaca.model.extend import parse_rope
from ithaca.plans.plan import Plan

AUTO = "auto"  # plan.recipe="auto": the planner chooses
PACKINGS = ("auto", "cut", "whole", "joined")
MOST_WEIGHT = 1e9  # of a source in data.mix
MIX_EXAMPLE = "write --set data.mix.books.tokens=0.7"
# Options of [train] that may change when a run continues. Others would make it another run
CHANGEABLE = {"steps", "epochs", "learning_rate", "schedule", "warmup", "decay", "final_rate", "micro_batch", "device"}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    source: str = "tiny"
    """A Hugging Face folder, or the name of a preset, which gets random weights."""
    dtype: str = "auto"
    """The dtype of the computation: bfloat16, float32, float64; `auto`: bfloat16 on a GPU, float32 on a CPU."""
    seed: int = 0
    """The seed of a preset's random weights."""
    rope: str = ""
    """New rope settings for a longer context: `theta`, `linear`, `yarn`, `llama3`, with parameters, or `auto`."""

    def __post_init__(self) -> None:
        if self.rope:
            parse_rope(self.rope)


@dataclass(frozen=True, kw_only=True)
class MeshSection:
    replicate: int = 1
    """Copies of the parameters."""
    shard: int | None = None
    """Data ranks that one copy is sharded over. Default: all ranks that the other axes leave."""
    ring: int = 1
    """Ranks, or groups of `ulysses` ranks, that share each sequence by tokens. May cross nodes."""
    ulysses: int = 1
    """Ranks within a node that share each sequence by heads."""
    tensor: int = 1
    """Ranks within a node that hold parts of every weight, in the place of `ulysses`. (recipe tensor)"""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    source: str = ""
    """A token file made by `ithaca data`, or `needles`: synthetic documents with facts to find (data/synthetic.py). A
    file of that name is `./needles`, the documents beside it `synthetic:needles`. Default: the source code of Python's
    standard library, one token a byte."""
    mix: dict[str, float] | None = field(default=None, metadata={"read": lambda table: read_mix(table)})
    """Token files with weights, instead of `source`: `"books.tokens" = 0.7`. Weights are shares of the tokens."""
    long_share: float | None = None
    """The share of tokens that come from long documents. Default: as it is in the data."""
    long: int | None = field(default=None, metadata={"read": parse_tokens})
    """Documents of at least this many tokens are long, for `long_share`. Default: 32K."""
    packing: str = "auto"
    """How documents become sequences. `cut`: windows cut anywhere. `whole`: documents whole where they fit, padding at
    the end. `joined`: as `cut`, without a mask between documents. `auto`: `whole` if the data have a loss mask,
    but `cut` for `needles`."""
    too_long: str = "truncate"
    """A conversation longer than a sequence, under `whole`: `truncate` keeps its beginning, `drop` leaves it out."""
    validation: str = field(default="", metadata={"read": lambda value: _read_validation(value)})
    """A token file to measure the loss on, or a share of the documents to hold out for that, as 0.02 or 2%."""

    def __post_init__(self) -> None:
        for name, known in (("packing", PACKINGS), ("too_long", ("truncate", "drop"))):
            if getattr(self, name) not in known:
                hint = suggestion(getattr(self, name), known)
                raise ConfigError(f"data.{name} '{getattr(self, name)}' does not exist: {hint}")
        if self.source and self.mix:
            raise ConfigError(
                f"data.source is '{self.source}' and data.mix has {len(self.mix)} token files: leave one of them out"
            )
        if self.long_share is not None and not 0 < self.long_share < 1:
            raise ConfigError(f"data.long_share is {self.long_share:g}: a number above 0 and below 1 is needed, as 0.5")
        if self.long is not None and self.long_share is None:
            raise ConfigError(f"data.long is {self.long}, but data.long_share is not set: data.long_share=0.5 uses it")

    @property
    def share(self) -> float | None:
        """The share of the documents that `validation` holds out; None if it names a file or nothing."""
        return _number(self.validation)


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    tokens: int | None = field(default=None, metadata={"read": parse_tokens})
    """The context length: tokens in one sequence, as 4096 or 64K. Default: 8K on a CPU, 64K on GPUs."""
    batch: int | None = None
    """Sequences in a step, over all ranks. Default: one for each data rank."""
    micro_batch: int | None = None
    """Sequences in one pass, over all ranks. A step has batch / micro_batch passes. Default: one pass."""
    steps: int | None = None
    """Optimizer steps. Default: 16, unless train.epochs is set."""
    epochs: float | None = None
    """Passes over the data, instead of train.steps. The steps are rounded up, and recorded as train.steps."""
    learning_rate: float | None = None
    """The highest learning rate, reached at the end of the warm-up. Default: by the model
    (docs/training.md)."""
    schedule: str = "cosine"
    """`cosine`: the rate falls after the warm-up. `wsd`: it stays, then falls linearly at the end."""
    warmup: int | None = None
    """Steps over which the learning rate rises. Default: 3 % of the steps, at least 4 and at most 2000, but
    never more than the steps."""
    decay: float = 0.2
    """The share of the run in which the rate of `wsd` falls."""
    final_rate: float = 0.1
    """The last learning rate as a share of the highest."""
    weight_decay: float = 0.1
    """AdamW's weight decay. Norms and biases have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean squared gradient."""
    clip: float = 1.0
    """Gradients are scaled down to this norm if theirs is larger."""
    seed: int = 0
    """The seed of the order of the data."""
    device: str = "auto"
    """`cuda`, `cpu`, or `auto`: GPUs if there are any."""
    stages: tuple[Stage, ...] | None = field(default=None, metadata={"read": read_stages})
    """Stages of length, one after the other, each with its own tokens and steps. Default: none."""

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name} is {value}: 1 or more is needed")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                f"train.steps={self.steps} and train.epochs={self.epochs:g} both say how long the run is: set one"
            )
        for name in ("warmup", "weight_decay", "seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"train.{name} is {value}: 0 or more is needed")
        for name in ("learning_rate", "clip", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"train.{name} is {value}: a number above 0 is needed")
        for name in ("decay", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: a number from 0 to 1 is needed")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: a number from 0 to below 1 is needed")
        if (self.batch or 1) * (self.tokens or 1) > MOST_TOKENS:
            raise ConfigError(
                f"train.batch {self.batch} × train.tokens {self.tokens} is more than the {MOST_TOKENS} tokens that a "
                "step can have: fewer sequences work"
            )
        for name, known in (("schedule", ("cosine", "wsd")), ("device", ("auto", "cuda", "cpu"))):
            if getattr(self, name) not in known:
                hint = suggestion(getattr(self, name), known)
                raise ConfigError(f"train.{name} '{getattr(self, name)}' does not exist: {hint}")
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(f"train.tokens is {self.tokens}: 2 or more are needed, one to predict from the other")
        if self.batch and self.micro_batch and self.batch % self.micro_batch:
            works = nearest_divisors(self.batch, self.micro_batch)
            raise ConfigError(
                f"train.micro_batch {self.micro_batch} does not divide train.batch {self.batch}: {works} would"
            )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    checkpoint_every: int = 50
    """Steps between checkpoints. The end of a run always writes one. 0: only the end does."""
    keep: int = 2
    """Checkpoints to keep. With validation, the one with the lowest loss is kept as well."""
    validate_every: int | None = None
    """Steps between validations. The start and the end of a run always validate. Default: run.checkpoint_every."""
    validation_tokens: int | None = field(default=None, metadata={"read": parse_tokens})
    """Tokens of the validation data that count, from the first on, as 64K or 5M. Default: all."""
    log_every: int | None = None
    """Steps between lines in log.txt and, without a terminal, in the output. Default: twelve a run, or one a minute."""
    report: str = ""
    """Where metrics go besides the run folder: `tensorboard` or `wandb`."""
    profile_step: int | None = None
    """Profile this step, and memory in the step after it, on the first rank, into the run folder. Default: none."""
    timeout: float | None = field(default=None, metadata={"what": "a number of seconds, e.g. 600"})
    """Seconds to wait for a rank that hangs before the run stops. Default: 600 plus three expected steps."""
    share_gpus: bool = False
    """Let several ranks use one GPU, to try a run of many ranks on few GPUs. They take turns, so it is slow."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ConfigError(f"run.checkpoint_every is {self.checkpoint_every}: 0 or more is needed")
        if self.validate_every is not None and self.validate_every < 0:
            raise ConfigError(
                f"run.validate_every is {self.validate_every}: 0 or more is needed, 0 for the start and the end alone"
            )
        if self.validation_tokens is not None and self.validation_tokens < 2:
            raise ConfigError(f"run.validation_tokens is {self.validation_tokens}: 2 or more are needed, as 64K")
        if self.keep < 1:
            raise ConfigError(f"run.keep is {self.keep}: 1 or more is needed")
        if self.log_every is not None and self.log_every < 1:
            raise ConfigError(f"run.log_every is {self.log_every}: 1 or more is needed")
        if self.profile_step is not None and self.profile_step < 1:
            raise ConfigError(f"run.profile_step is {self.profile_step}: 1 or more is needed")
        if self.timeout is not None and not 0 < self.timeout <= MOST_SECONDS:
            raise ConfigError(
                f"run.timeout is {self.timeout:g}: seconds above 0 and up to {MOST_SECONDS} are needed, as 1200"
            )
        if self.report not in ("", "tensorboard", "wandb"):
            hint = suggestion(self.report, ("tensorboard", "wandb"))
            raise ConfigError(f"run.report '{self.report}' does not exist: {hint}")


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    tasks: tuple[str, ...] | None = field(default=None, metadata={"read": lambda value: _read_tasks(value)})
    """Long-context tasks to run during training, as `["needle", "keys"]` or `all`. Default: none."""
    tokens: tuple[int, ...] | None = field(default=None, metadata={"read": lambda value: _read_lengths(value)})
    """Their lengths, as `["2K", "8K"]`. Default: the training length and its halves down to a sixteenth."""
    count: int = 50
    """Samples of each task at each length."""
    every: int | None = None
    """Steps between evaluations. The end of a run, and of a stage, always evaluates. Default: run.checkpoint_every."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"evaluate.count is {self.count}: 1 or more samples are needed")
        if self.every is not None and self.every < 0:
            raise ConfigError(f"evaluate.every is {self.every}: 0 or more is needed, 0 for the end alone")
        if self.tokens and not self.tasks:
            raise ConfigError(f"evaluate.tokens is {self.tokens[0]}, but evaluate.tasks names none: as needle, or all")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    plan: Plan | None = None
    """None, or `recipe = "auto"`: the planner chooses when the run starts, for the ranks and memory it finds."""
    mesh: MeshSection = field(default_factory=MeshSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    run: RunSection = field(default_factory=RunSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)

    def __post_init__(self) -> None:
        if self.train.stages and self.run.profile_step:
            raise ConfigError(
                f"run.profile_step is {self.run.profile_step}, but a run of {len(self.train.stages)} stages is not "
                "profiled: leave it out, or profile a run of one length"
            )

    def in_stage_of(self, other: "Config") -> "Config":
        """Return this configuration with the options that `other`, which has the same stages, takes from its stage."""
        if not self.train.stages or self.train.stages != other.train.stages:
            return self
        names = "tokens", "batch", "micro_batch", "steps", "learning_rate", "warmup"
        train = dataclasses.replace(self.train, **{name: getattr(other.train, name) for name in names})
        model = dataclasses.replace(self.model, rope=other.model.rope)
        return dataclasses.replace(self, train=train, model=model, plan=other.plan)

    def conflict(self, record: "Config") -> str | None:
        """Return the first option that a run must not change, with what sets it back; None if there is none.

        `record` is the configuration of its checkpoint. The data are compared by content, not by the file's name; a
        share that is held out decides what is trained on.
        """
        if self.train.stages != record.train.stages:
            return changed_stage(self.train.stages or (), record.train.stages or ())
        for name, (mine, theirs) in self.differences(record).items():
            section, _, option = name.partition(".")
            order = name in ("data.packing", "data.too_long")
            held_out = name == "data.validation" and (self.data.share or record.data.share)
            if order or held_out or (section in ("model", "train") and option not in CHANGEABLE):
                back = shlex.quote(f"{name}={theirs}")
                return f"{name} is {mine!r}, and its checkpoints have {theirs!r}: --set {back} continues it"
        return None

    def changes(self, record: "Config") -> list[str]:
        """Return all options that differ from a checkpoint's, as 'train.steps 16 -> 32'."""
        differences = self.differences(record).items()
        return [f"{name} {_shown(old)} -> {_shown(new)}" for name, (new, old) in differences]

    def differences(self, other: "Config") -> dict[str, tuple[Any, Any]]:
        """Return all options whose values differ, by name: this one's value and the other's. Stages may differ."""
        found, other = {}, other.in_stage_of(self)
        for section in dataclasses.fields(self):
            mine, theirs = (options_of(getattr(config, section.name)) for config in (self, other))
            for name, value in mine.items():
                if value != theirs[name]:
                    found[f"{section.name}.{name}"] = value, theirs[name]
        return found

    def toml(self) -> str:
        """Return the configuration as TOML that `read_config` reads back."""
        lines = []
        for section in dataclasses.fields(self):
            if getattr(self, section.name) is None:
                continue
            lines.append(f"[{section.name}]")
            for name, value in vars(getattr(self, section.name)).items():
                if value is not None:
                    lines.append(f"{name} = {_toml(value)}")
            lines.append("")
        return "\n".join(lines)


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item.table() if isinstance(item, Stage) else item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    # Strings and numbers of JSON are valid TOML, except for this character, which JSON does not escape
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: Any) -> str:
    return "unset" if value is None or value == "" else str(value)


def options_of(section: Any) -> dict[str, Any]:
    """Return a section's options by name; those of a Plan that the planner will choose if it is None."""
    return vars(section) if section is not None else vars(Plan()) | {"recipe": AUTO}


def _read_validation(value: Any) -> str:
    """Return a share as the text of a number, and anything else, the path of a token file, as it is."""
    text = str(value).strip() if type(value) in (str, int, float) else ""
    if isinstance(value, str) and not text:
        return ""
    percent = _number(text.removesuffix("%")) if text.endswith("%") else None
    share = _number(text) if percent is None else percent / 100
    if share is None and text:
        return text
    if share is None or not 0 < share < 1:
        raise ConfigError(
            f"'{value}' is not a share of the documents: write a number above 0 and below 1, as 0.02, or a percentage, "
            "as 2%, or name a token file"
        )
    return repr(share)


def _read_tasks(value: Any) -> tuple[str, ...] | None:
    """Return the names of tasks, given as a list or with commas between them."""
    from ithaca.evaluate.tasks import TASKS  # which loads a tokenizer's package

    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{value!r} is not a list of tasks: write needle,keys, or all")
    if names in ([], [""]):
        return None
    for name in names:
        if name not in (*TASKS, "all"):
            raise ConfigError(f"'{name}' is not a task: {', '.join(TASKS)} are, and all")
    return tuple(dict.fromkeys(task for name in names for task in (TASKS if name == "all" else (name,))))


def _read_lengths(value: Any) -> tuple[int, ...] | None:
    """Return lengths, the shortest first, given as a list, or one, or with commas between them."""
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return tuple(sorted({parse_tokens(item) for item in given if item != ""})) or None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_mix(table: Any, prefix: str = "") -> dict[str, float]:
    """Return weights by file name. A name that TOML takes apart at its dots is put together again."""
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"data.mix is {table!r}, no table of token files and weights: {MIX_EXAMPLE}")
    found: dict[str, float] = {}
    for key, weight in table.items():
        name = f"{prefix}{key}"
        if isinstance(weight, dict):
            found |= read_mix(weight, f"{name}.")
        elif type(weight) not in (int, float) or not 0 < weight <= MOST_WEIGHT:
            raise ConfigError(
                f"the weight of '{name}' is {weight!r}: a number above 0 and up to {MOST_WEIGHT:.0e} is needed, as 0.7"
            )
        else:
            found[name] = float(weight)
    return found
