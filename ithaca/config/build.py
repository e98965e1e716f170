"""A table of options made into a dataclass. An unknown option is an error that says what was meant."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from ithaca.base.aliases import ALIASES, suggest_option
from ithaca.base.errors import ConfigError, PlanError, read_option, shown, suggestion
from ithaca.config.sections import AUTO, Config, options_of
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES

Section = TypeVar("Section")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table", list: "a list"}


def build(section: type[Section], content: dict[str, Any], where: str) -> Section:
    """Return a dataclass made of a table's content; `where` is the table's path with a dot at the end."""
    fields = {item.name: item for item in dataclasses.fields(section)}  # pyrefly: ignore
    kinds = typing.get_type_hints(section)
    values = {}
    for key, value in content.items():
        if key not in fields:
            raise ConfigError(f"'{where}{key}' is not an option: {_suggest(key, value, fields)}")
        name = f"{where}{key}"
        read = read_plan if name == "plan" else fields[key].metadata.get("read")
        what = fields[key].metadata.get("what")
        values[key] = read_option(name, read, value) if read else _typed(kinds[key], value, name, what)
    return section(**values)


def option_defaults() -> dict[str, Any]:
    """Return the default of every option, by names as 'train.steps'."""
    return {
        f"{section.name}.{name}": value
        for section in dataclasses.fields(Config)
        for name, value in options_of(getattr(Config(), section.name)).items()
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


def read_plan(table: Any) -> Plan | None:
    if isinstance(table, dict) and "recipe" not in table:
        _check_default_recipe(table)
    if not isinstance(table, dict) or table.get("recipe") != AUTO:
        return _typed(Plan, table, "plan")
    others = [name for name in table if name != "recipe"]
    if others:
        raise ConfigError(
            f"plan.{others[0]}={table[others[0]]} needs a recipe, but plan.recipe='{AUTO}' lets the planner choose: "
            "leave the option out, or name a recipe, as plan.recipe=sweep"
        )
    return None


def _check_default_recipe(options: dict[str, Any]) -> None:
    """Raise an error for an option of other recipes than the one that a Plan has if none is named."""
    default = Plan().recipe
    for name in options:
        recipes = [recipe for recipe, entry in RECIPES.items() if name in entry.options]
        if recipes and default not in recipes:
            raise PlanError(
                f"plan.{name}={options[name]} needs a recipe, and plan.recipe is not set: '{default}', the default, "
                f"has no {name}; set plan.recipe={' or '.join(recipes)}"
            )


def _typed(kind: Any, value: Any, name: str, what: str | None = None) -> Any:
    """Return a value of a type, or raise an error. `what`: what it has to be, if the name of the type is not enough."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            example = suggest_option(name, value, {}) if name in ("model", "data") else f"write {name}.option=value"
            raise ConfigError(f"'{name}' is a table of options, not {value!r}: {example}")
        return build(kind, value, f"{name}.")  # pyrefly: ignore
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        wanted = what or " or ".join(WORDS[option] for option in kinds if option is not types.NoneType)
        given = str(value).lower() if isinstance(value, bool) else shown(value)  # as users write it
        raise ConfigError(f"{name} {given} is not {wanted}")
    return value
