"""Configuration: TOML into frozen dataclasses, a line of documentation a field, nothing unknown accepted.

    [train]
    tokens = "8K"

`--set train.tokens=8K` does the same from the command line and wins over the file.
"""

import dataclasses
import json
import sys
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ithaca.base.errors import ConfigError, suggestion
from ithaca.base.sizes import MOST_SECONDS, parse_tokens
from ithaca.plans.places import REBUILD
from ithaca.plans.plan import RECIPE_OPTIONS, Plan
from ithaca.plans.recipes import RECIPES

Section = TypeVar("Section")

AUTO = "auto"  # as plan.recipe: the planner chooses
RENAMED = {"train.micro": "micro_batch", "run.patience": "timeout", "plan.gradient": "residual"}  # old option -> new
MOST_TOKENS = 2**32  # in a step; each takes 24 bytes of host memory before it is split


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    source: str = "tiny"
    """A Hugging Face folder, or a preset with random weights."""
    dtype: str = "auto"
    """Of the computation: bfloat16, float32, float64; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    seed: int = 0
    """What a preset's random weights are drawn from."""


@dataclass(frozen=True, kw_only=True)
class MeshSection:
    replicate: int = 1
    """Copies of the parameters."""
    shard: int | None = None
    """Data ranks that a copy is cut over; what the other axes leave when not given."""
    ring: int = 1
    """Ranks, or groups of `ulysses` ranks, that share each sequence by tokens, also across nodes."""
    ulysses: int = 1
    """Ranks within a node that share each sequence, by heads."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    source: str = ""
    """A token file that `ithaca data` made; empty: the Python standard library's sources, byte by byte."""


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    tokens: int | None = field(default=None, metadata={"read": parse_tokens})
    """The context length: tokens in one sequence, as 4096 or 64K; not given: 8K on a CPU, 64K on GPUs."""
    batch: int | None = None
    """Sequences in a step, all ranks together; not given: one a data rank."""
    micro_batch: int | None = None
    """Sequences in a pass, all ranks together; a step accumulates batch / micro passes. Not given: all at once."""
    steps: int = 16
    """Optimizer steps."""
    learning_rate: float = 3e-3
    """The highest, reached after the warm-up."""
    schedule: str = "cosine"
    """`cosine`: falls from the warm-up on; `wsd`: stays, then falls linearly at the end."""
    warmup: int = 4
    """Steps over which the learning rate rises."""
    decay: float = 0.2
    """The share of the run over which `wsd` falls."""
    final_rate: float = 0.1
    """The last learning rate, as a share of the highest."""
    weight_decay: float = 0.1
    """AdamW's, on matrices."""
    beta1: float = 0.9
    """AdamW's memory of gradients."""
    beta2: float = 0.95
    """AdamW's memory of their squares."""
    clip: float = 1.0
    """The largest norm of a gradient."""
    seed: int = 0
    """What the order of the data is drawn from."""
    device: str = "auto"
    """`cuda`, `cpu`, or `auto`: GPUs where there are any."""

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"train.{name} is {value}: 1 or more is needed")
        for name in ("warmup", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"train.{name} is {getattr(self, name)}: 0 or more is needed")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"train.{name} is {getattr(self, name)}: a number above 0 is needed")
        for name in ("decay", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: a number from 0 to 1 is needed")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}: a number from 0 to below 1 is needed")
        if (self.batch or 1) * (self.tokens or 1) > MOST_TOKENS:
            raise ConfigError(
                f"train.batch {self.batch} × train.tokens {self.tokens} are more than the {MOST_TOKENS} tokens that a "
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
    """Steps between checkpoints; one is always written at the end. 0: only then."""
    keep: int = 2
    """Checkpoints that are kept."""
    report: str = ""
    """Where metrics go beside the run folder: `tensorboard` or `wandb`."""
    timeout: float | None = None
    """Seconds after which a rank that the others wait for is given up; not given: 600 and three expected steps."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise ConfigError(f"run.checkpoint_every is {self.checkpoint_every}: 0 or more is needed")
        if self.keep < 1:
            raise ConfigError(f"run.keep is {self.keep}: 1 or more is needed")
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
    """None, or `recipe = "auto"`: chosen when the run starts, for the ranks and the memory there are."""
    mesh: MeshSection = field(default_factory=MeshSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    run: RunSection = field(default_factory=RunSection)

    def differs(self, other: "Config") -> str | None:
        """'train.seed=1 instead of 0', the first option in which another run's numbers would differ; None if none.

        The mesh and the Plan change no number, and a run may go on for more steps.
        """
        harmless = (("train", "steps"), ("train", "micro_batch"), ("train", "device"))
        for section in ("model", "data", "train"):
            mine, theirs = vars(getattr(self, section)), vars(getattr(other, section))
            for name, value in mine.items():
                if value != theirs[name] and (section, name) not in harmless:
                    return f"{section}.{name}={value!r} instead of {theirs[name]!r}"
        return None

    def toml(self) -> str:
        """The configuration as a file that `read_config` reads back."""
        lines = []
        for section in dataclasses.fields(self):
            if getattr(self, section.name) is None:
                continue
            lines.append(f"[{section.name}]")
            for name, value in vars(getattr(self, section.name)).items():
                if value is not None:
                    # JSON's strings and numbers are TOML's, but for characters that JSON need not escape
                    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                    lines.append(f"{name} = {text}")
            lines.append("")
        return "\n".join(lines)


def read_config(file: Path | None, overrides: list[str]) -> Config:
    """The configuration of a TOML file (None: the defaults) with `key=value` overrides."""
    content = _read_toml(file) if file else {}
    _rename_options(content)
    overrides = [_renamed_override(override) for override in overrides]
    given: dict[str, Any] = {}
    for override in overrides:
        _set(given, override)
    _change_recipe(content, _recipe(given))
    for override in overrides:
        _set(content, override)
    config = build(Config, content, "")
    if config.plan is not None and _recipe(content) is None:
        print(
            f"plan.recipe is not given, but other options of the Plan are: '{config.plan.recipe}' it is",
            file=sys.stderr,
        )
    return config


def _rename_options(content: dict[str, Any]) -> None:
    """Read options under their old names, with a notice."""
    for old, new in RENAMED.items():
        section, _, name = old.partition(".")
        table = content.get(section)
        if isinstance(table, dict) and name in table:
            _tell_renamed(old)
            table.setdefault(new, table.pop(name))


def _renamed_override(override: str) -> str:
    path, equals, value = override.partition("=")
    old = path.strip()
    if old not in RENAMED:
        return override
    _tell_renamed(old)
    return f"{old.partition('.')[0]}.{RENAMED[old]}{equals}{value}"


def _tell_renamed(old: str) -> None:
    print(f"{old} is now called {old.partition('.')[0]}.{RENAMED[old]}: the old name still works", file=sys.stderr)


def _change_recipe(content: dict[str, Any], recipe: Any) -> None:
    """Another recipe than the file's has no use for some of what the file says: leave that out, and say so."""
    if (
        not isinstance(recipe, str)
        or recipe not in (*RECIPES, AUTO)
        or recipe == _recipe(content)
        or not isinstance(content.get("plan"), dict)
    ):
        return
    build(Config, content, "")  # what is left out must be right as well
    if recipe == AUTO:
        for name in [name for name in content["plan"] if name != "recipe"]:
            print(f"plan.{name}={content['plan'].pop(name)} is left out: the planner chooses", file=sys.stderr)
        return
    for name in RECIPE_OPTIONS:
        value = content["plan"].get(name)
        unknown = name not in RECIPES[recipe].options or (name == "x" and REBUILD in str(value) and recipe != "sweep")
        if value is not None and unknown:
            del content["plan"][name]
            print(f"plan.{name}={value} is left out: it means nothing under recipe '{recipe}'", file=sys.stderr)
    if "disk" in content["plan"] and not any("disk" in str(content["plan"].get(name)) for name in ("x", "o")):
        print(f"plan.disk={content['plan'].pop('disk')} is left out with what it was for", file=sys.stderr)


def _recipe(content: dict[str, Any]) -> Any:
    plan = content.get("plan")
    return plan.get("recipe") if isinstance(plan, dict) else None


def build(section: type[Section], content: dict[str, Any], where: str) -> Section:
    """A dataclass of a table's content; `where` is the table's path with a dot behind it."""
    fields = {item.name: item for item in dataclasses.fields(section)}  # pyrefly: ignore
    kinds = typing.get_type_hints(section)
    values = {}
    for key, value in content.items():
        if key not in fields:
            raise ConfigError(f"'{where}{key}' is not an option: {suggestion(key, fields)}")
        read = fields[key].metadata.get("read")
        name = f"{where}{key}"
        values[key] = _read(read, value, name) if read else _typed(kinds[key], value, name)
    return section(**values)


def _read_plan(table: Any) -> Plan | None:
    if not isinstance(table, dict) or table.get("recipe") != AUTO:
        return _typed(Plan, table, "plan")
    others = [name for name in table if name != "recipe"]
    if others:
        raise ConfigError(
            f"plan.{others[0]}={table[others[0]]} goes with a recipe, but plan.recipe='{AUTO}' chooses all of it: "
            "leave it out, or name a recipe, as plan.recipe=sweep"
        )
    return None


def _read(read: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return read(value)
    except ConfigError as problem:
        if f"{name}." in str(problem):
            raise  # it names the option already
        raise ConfigError(f"{name}: {problem}") from None


def _typed(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"'{name}' is a table of options, not {value!r}: write {name}.option=value")
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
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigError(f"'{file}' cannot be read ({problem.strerror})") from None
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"'{file}' is not TOML ({problem})") from None


def _set(content: dict[str, Any], override: str) -> None:
    path, found, text = override.partition("=")
    *tables, key = path.strip().split(".")
    if not found or not all((*tables, key)):
        raise ConfigError(f"--set {override} is not of the form key=value: write --set train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()  # a bare word: text that needs no quotes on a command line
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override} goes through '{table}', which is not a table")
    content[key] = value
