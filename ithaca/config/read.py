"""Read a configuration: a TOML file, `--set` on the command line, or what a checkpoint records."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ithaca.base.errors import ConfigError, IthacaError
from ithaca.base.files import read_small
from ithaca.config.build import build
from ithaca.config.sections import AUTO, Config, ModelSection
from ithaca.config.warmup import default_warmup
from ithaca.plans.places import REBUILD
from ithaca.plans.plan import PLACED, RECIPE_OPTIONS
from ithaca.plans.recipes import RECIPES

RENAMED = {  # old option -> new option; the old one still works
    "train.micro": "train.micro_batch",
    "run.patience": "run.timeout",
    "plan.gradient": "plan.residual",
}
MOST_BYTES = 2**20  # in a configuration file
OF_STAGES = ("tokens", "steps", "epochs", "warmup", "micro_batch")  # options of [train] that each stage has itself


def _tell(notice: str) -> None:
    print(notice, file=sys.stderr)


def read_config(
    file: Path | None,
    overrides: list[str],
    tell: Callable[[str], None] = _tell,
    saved: bool = False,
    model: ModelSection | None = None,
    anew: bool = False,
) -> Config:
    """Return the configuration of a TOML file (None: the defaults) with `key=value` overrides.

    `tell` gets one line for each thing the user should know: old option names, an option that is ignored. Old names in
    a file that a run has `saved` are read without notice: no user wrote them. Options of [model] that neither sets are
    those of `model`. With `anew`, another run begins with the file's options, but not with its stages or default
    warm-up.
    """
    content = _read_toml(file) if file else {}
    if saved:
        _keep_cutting(content)
    if anew:
        _begin_anew(_table(content, "train"))
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
    if config.train.stages:
        _check_stages(_table(given if saved else content, "train"), saved)
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
    """Set the packing of a run that began before there was such an option: `cut`."""
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
    if "disk" in plan and not any("disk" in str(plan.get(name)) for name in PLACED):
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


def _begin_anew(train: dict[str, Any]) -> None:
    """Drop the stages of a run, so that [train] is that of the last one begun, and a default warm-up."""
    train.pop("stages", None)
    steps = train.get("steps")
    if isinstance(steps, int) and train.get("warmup") == default_warmup(steps):
        del train["warmup"]


def _check_stages(train: dict[str, Any], saved: bool) -> None:
    """Raise an error if [train] sets an option of stages. In a `saved` run these include batch and learning rate."""
    for name in (*OF_STAGES, "batch", "learning_rate") if saved else OF_STAGES:
        if name in train:
            raise ConfigError(
                f"train.{name}={train[name]} is set, but the run has stages, each with its own {name}: set it in "
                "[[train.stages]]"
            )


def _recipe(content: dict[str, Any]) -> Any:
    return _table(content, "plan").get("recipe")


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of options; an empty one if there is none, or something else."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


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
