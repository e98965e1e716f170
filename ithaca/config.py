"""The configuration of a run: TOML read into frozen dataclasses. An unknown option is an error.

    [train]
    tokens = "8K"

`--set train.tokens=8K` on the command line does the same and wins over the file.
"""

import dataclasses
import difflib
import json
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ithaca.base.aliases import ALIASES, suggest_option
from ithaca.base.errors import ConfigError, IthacaError, suggestion
from ithaca.base.files import read_small
from ithaca.base.sizes import MOST_SECONDS, parse_tokens
from ithaca.model.extend import parse_rope
from ithaca.plans.places import REBUILD
from ithaca.plans.plan import RECIPE_OPTIONS, Plan
from ithaca.plans.recipes import RECIPES

Section = TypeVar("Section")

AUTO = "auto"  # plan.recipe="auto": the planner chooses
RENAMED = {  # old option -> new option; the old one still works
    "train.micro": "train.micro_batch",
    "run.patience": "run.timeout",
    "plan.gradient": "plan.residual",
}
PACKINGS = ("auto", "cut", "whole", "joined")
MOST_WEIGHT = 1e9  # of a source in data.mix
MIX_EXAMPLE = "write --set data.mix.books.tokens=0.7"
MOST_TOKENS = 2**32  # in a step
MOST_BYTES = 2**20  # in a configuration file
# Options of [train] that may change when a run continues. Others would make it another run
CHANGEABLE = {"steps", "epochs", "learning_rate", "schedule", "warmup", "decay", "final_rate", "micro_batch", "device"}


def _tell(notice: str) -> None:
    print(notice, file=sys.stderr)


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


@dataclass(frozen=True, kw_only=True)
class DataSection:
    source: str = ""
    """A token file made by `ithaca data`. Default: the source code of Python's standard library, one token a byte."""
    mix: dict[str, float] | None = field(default=None, metadata={"read": lambda table: _read_mix(table)})
    """Token files with weights, instead of `source`: `"books.tokens" = 0.7`. Weights are shares of the tokens."""
    long_share: float | None = None
    """The share of tokens that come from long documents. Default: as it is in the data."""
    long: int | None = field(default=None, metadata={"read": parse_tokens})
    """Documents of at least this many tokens are long, for `long_share`. Default: 32K."""
    packing: str = "auto"
    """How documents become sequences. `cut`: windows cut anywhere. `whole`: documents whole where they fit, padding at
    the end. `joined`: as `cut`, without a mask between documents. `auto`: `whole` if the data have a loss mask."""
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
                f"data.source is '{self.source}' and data.mix has {len(self.mix)} token files: leave one of both out"
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
    """The highest learning rate, reached at the end of the warm-up. Default: by the model (train/learning_rate.py)."""
    schedule: str = "cosine"
    """`cosine`: the rate falls after the warm-up. `wsd`: it stays, then falls linearly at the end."""
    warmup: int | None = None
    """Steps over which the learning rate rises. Default: 3 % of the steps, at least 4 and at most 2000."""
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
            raise ConfigError(f"train.micro_batch {self.micro_batch} does not divide train.batch {self.batch}")


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
    timeout: float | None = None
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
        if self.timeout is not None and not 0 < self.timeout <= MOST_SECONDS:
            raise ConfigError(
                f"run.timeout is {self.timeout:g}: seconds above 0 and up to {MOST_SECONDS} are needed, as 1200"
            )
        if self.report not in ("", "tensorboard", "wandb"):
            hint = suggestion(self.report, ("tensorboard", "wandb"))
            raise ConfigError(f"run.report '{self.report}' does not exist: {hint}")


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    plan: Plan | None = field(default=None, metadata={"read": lambda table: _read_plan(table)})
    """None, or `recipe = "auto"`: the planner chooses when the run starts, for the ranks and memory it finds."""
    mesh: MeshSection = field(default_factory=MeshSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    run: RunSection = field(default_factory=RunSection)

    def conflict(self, record: "Config") -> str | None:
        """Return the first option that a run must not change, with what sets it back; None if there is none.

        `record` is the configuration of its checkpoint. The data are compared by content, not by the file's name; a
        share that is held out decides what is trained on.
        """
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
        """Return all options whose values differ, by name: this one's value and the other's."""
        found = {}
        for section in dataclasses.fields(self):
            mine, theirs = (_options(getattr(config, section.name)) for config in (self, other))
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
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    # Strings and numbers of JSON are valid TOML, except for this character, which JSON does not escape
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: Any) -> str:
    return "unset" if value is None or value == "" else str(value)


def _options(section: Any) -> dict[str, Any]:
    """Return a section's options by name; those of a Plan that the planner will choose if it is None."""
    return vars(section) if section is not None else vars(Plan()) | {"recipe": AUTO}


def read_config(
    file: Path | None,
    overrides: list[str],
    tell: Callable[[str], None] = _tell,
    saved: bool = False,
    model: ModelSection | None = None,
) -> Config:
    """Return the configuration of a TOML file (None: the defaults) with `key=value` overrides.

    `tell` gets one line for each thing the user should know: old option names, an option that is ignored. Old names in
    a file that a run has `saved` are read without notice: no user wrote them. Options of [model] that neither sets are
    those of `model`.
    """
    content = _read_toml(file) if file else {}
    if saved:
        _keep_cutting(content)
    given: dict[str, Any] = {}
    for override in overrides:
        _set(given, override)
    in_file, in_overrides = _rename_options(content), _rename_options(given)
    if renamed := dict.fromkeys(in_overrides if saved else in_file + in_overrides):
        tell(f"Renamed: {', '.join(f'{old} is now {RENAMED[old]}' for old in renamed)}. The old names still work.")
    _change_recipe(content, _recipe(given), tell)
    _change_length(content, given, None if saved else tell)
    if saved:
        _forget_rate(content, given)
    for override in overrides:
        path, equals, value = override.partition("=")
        _set(content, f"{RENAMED.get(path.strip(), path)}{equals}{value}")
    _rename_options(content)  # in tables that an override gave whole
    if model and isinstance(found := content.get("model", {}), dict):
        content["model"] = vars(model) | found
    config = build(Config, content, "")
    if config.plan is not None and _recipe(content) is None:
        tell(f"plan.recipe is not set: using '{config.plan.recipe}' with the plan options that are")
    return config


def parse_config(text: str) -> Config:
    """Return the configuration that a checkpoint records. Old names are read without notice."""
    try:
        content = tomllib.loads(text)
        _rename_options(content)
        _keep_cutting(content)
        return build(Config, content, "")
    except (ValueError, RecursionError, IthacaError) as problem:
        raise ConfigError(f"the checkpoint records a configuration that cannot be read ({problem})") from None


def _keep_cutting(content: dict[str, Any]) -> None:
    """Set the packing of a run that began before there was one to choose."""
    data = content.setdefault("data", {})
    if isinstance(data, dict):
        data.setdefault("packing", "cut")


def _rename_options(content: dict[str, Any]) -> list[str]:
    """Give old options their new names; return the old names found. An option given under both is an error."""
    found = []
    for old, new in RENAMED.items():
        section, _, old_name = old.partition(".")
        new_name = new.partition(".")[2]
        table = content.get(section)
        if not isinstance(table, dict) or old_name not in table:
            continue
        if new_name in table:
            raise ConfigError(
                f"{old}={table[old_name]} and {new}={table[new_name]} are one option, which was renamed: keep {new}"
            )
        table[new_name] = table.pop(old_name)
        found.append(old)
    return found


def _change_recipe(content: dict[str, Any], recipe: Any, tell: Callable[[str], None]) -> None:
    """Drop the file's plan options that another recipe, from `--set`, does not have."""
    plan = content.get("plan")
    if recipe not in (*RECIPES, AUTO) or recipe == _recipe(content) or not isinstance(plan, dict):
        return
    build(Config, content, "")  # a mistake in the file is an error even if its option is dropped
    if recipe == AUTO:
        for name in [name for name in plan if name != "recipe"]:
            tell(f"Ignoring plan.{name}={plan.pop(name)}: the planner chooses the Plan")
        return
    for name in [name for name in RECIPE_OPTIONS if plan.get(name) is not None]:
        if name not in RECIPES[recipe].options:
            tell(f"Ignoring plan.{name}={plan.pop(name)}: recipe '{recipe}' has no such option")
        elif name == "x" and REBUILD in str(plan[name]) and RECIPES[recipe].schedule != "sweep":
            tell(f"Ignoring plan.x={plan.pop(name)}: recipe '{recipe}' cannot rebuild x")
    if "disk" in plan and not any("disk" in str(plan.get(name)) for name in ("x", "o")):
        tell(f"Ignoring plan.disk={plan.pop('disk')}: recipe '{recipe}' writes nothing to disk")


def _change_length(content: dict[str, Any], given: dict[str, Any], tell: Callable[[str], None] | None) -> None:
    """Drop the file's train.steps if `--set` has train.epochs, and the other way round."""
    train, wanted = _table(content, "train"), _table(given, "train")
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if other in wanted and name not in wanted and name in train:
            build(Config, content, "")  # a mistake in the file is an error even if its option is dropped
            dropped = train.pop(name)
            if tell:
                tell(f"Ignoring train.{name}={dropped}: train.{other}={wanted[other]} is set")


def _forget_rate(content: dict[str, Any], given: dict[str, Any]) -> None:
    """Drop the learning rate that a run has saved if `--set` names another model, which has a default of its own."""
    source = _table(given, "model").get("source")
    if source is not None and source != _table(content, "model").get("source"):
        _table(content, "train").pop("learning_rate", None)


def _recipe(content: dict[str, Any]) -> Any:
    return _table(content, "plan").get("recipe")


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of options; an empty one if there is none, or something else."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def build(section: type[Section], content: dict[str, Any], where: str) -> Section:
    """Return a dataclass made of a table's content; `where` is the table's path with a dot at the end."""
    fields = {item.name: item for item in dataclasses.fields(section)}  # pyrefly: ignore
    kinds = typing.get_type_hints(section)
    values = {}
    for key, value in content.items():
        if key not in fields:
            raise ConfigError(f"'{where}{key}' is not an option: {_suggest(key, value, fields)}")
        read = fields[key].metadata.get("read")
        name = f"{where}{key}"
        values[key] = _read(read, value, name) if read else _typed(kinds[key], value, name)
    return section(**values)


def option_defaults() -> dict[str, Any]:
    """Return the default of every option, by names as 'train.steps'."""
    return {
        f"{section.name}.{name}": value
        for section in dataclasses.fields(Config)
        for name, value in _options(getattr(Config(), section.name)).items()
    }


def _suggest(key: str, value: Any, here: Iterable[str]) -> str:
    """Return what to write instead of an unknown option or table; `here`: the names that its table has."""
    options = option_defaults()
    for name, item in value.items() if isinstance(value, dict) else ():
        if name in ALIASES:
            return suggest_option(name, item, options) or ""
    near = difflib.get_close_matches(key, list(here), n=1)
    elsewhere = suggest_option(key, value, options, mistyped=not near)
    return elsewhere or suggestion(key, here)


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
            f"'{value}' is no share of the documents: write a number above 0 and below 1, as 0.02, or a percentage, "
            "as 2%, or name a token file"
        )
    return repr(share)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _read_plan(table: Any) -> Plan | None:
    if not isinstance(table, dict) or table.get("recipe") != AUTO:
        return _typed(Plan, table, "plan")
    others = [name for name in table if name != "recipe"]
    if others:
        raise ConfigError(
            f"plan.{others[0]}={table[others[0]]} needs a recipe, but plan.recipe='{AUTO}' lets the planner choose: "
            "leave the option out, or name a recipe, as plan.recipe=sweep"
        )
    return None


def _read_mix(table: Any, prefix: str = "") -> dict[str, float]:
    """Return weights by file name. A name that TOML takes apart at its dots is put together again."""
    if not isinstance(table, dict) or not table:
        raise ConfigError(f"data.mix is {table!r}, no table of token files and weights: {MIX_EXAMPLE}")
    found: dict[str, float] = {}
    for key, weight in table.items():
        name = f"{prefix}{key}"
        if isinstance(weight, dict):
            found |= _read_mix(weight, f"{name}.")
        elif type(weight) not in (int, float) or not 0 < weight <= MOST_WEIGHT:
            raise ConfigError(
                f"the weight of '{name}' is {weight!r}: a number above 0 and up to {MOST_WEIGHT:.0e} is needed, as 0.7"
            )
        else:
            found[name] = float(weight)
    return found


def _read(read: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return read(value)
    except ConfigError as problem:
        if f"{name}." in str(problem):
            raise  # the message names the option already
        raise ConfigError(f"{name}: {problem}") from None


def _typed(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            example = suggest_option(name, value, {}) if name in ("model", "data") else f"write {name}.option=value"
            raise ConfigError(f"'{name}' is a table of options, not {value!r}: {example}")
        return build(kind, value, f"{name}.")  # pyrefly: ignore
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join(option.__name__ for option in kinds if option is not types.NoneType)
        raise ConfigError(f"'{name}' is {value!r}, of type {type(value).__name__}: {wanted} is needed")
    return value


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(file, MOST_BYTES).decode())
    except OSError as problem:
        raise ConfigError(f"'{file}' cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"'{file}' is not TOML ({problem})") from None


def _set(content: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    *tables, key = path.strip().split(".")
    if tables[:2] == ["data", "mix"]:  # the rest is the name of a file, with dots and perhaps quotes
        path, found, text = override.rpartition("=")
        tables, key = ["data", "mix"], path.strip().removeprefix("data.mix.").strip("\"'")
    if not found or not all((*tables, key)):
        raise ConfigError(f"--set {override} is not of the form key=value: write --set train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()  # a bare word is a string: no quotes are needed on a command line
    if value == {}:
        raise ConfigError(f"--set {override} is a table without options: write --set train.steps=100")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override} goes through '{table}', which is not a table")
    if isinstance(value, dict) and isinstance(content.get(key), dict):
        content[key].update(value)  # the table's other options stay
    else:
        content[key] = value
