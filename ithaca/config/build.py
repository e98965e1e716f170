"""A table of options made into a dataclass. An unknown option is an error that says what was meant."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ithaca.base.aliases import ALIASES, suggest_option
from ithaca.base.errors import ConfigError, suggestion
from ithaca.config.sections import AUTO, Config, options_of
from ithaca.plans.plan import Plan

Section = TypeVar("Section")


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
        values[key] = _read(read, value, name) if read else _typed(kinds[key], value, name)
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
    if not isinstance(table, dict) or table.get("recipe") != AUTO:
        return _typed(Plan, table, "plan")
    others = [name for name in table if name != "recipe"]
    if others:
        raise ConfigError(
            f"plan.{others[0]}={table[others[0]]} needs a recipe, but plan.recipe='{AUTO}' lets the planner choose: "
            "leave the option out, or name a recipe, as plan.recipe=sweep"
        )
    return None


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
