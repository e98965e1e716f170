"""Likely mistakes of Python callers, mostly habits from other libraries: one sentence, before anything is computed."""

import functools
from collections.abc import Callable
from types import UnionType
from typing import ParamSpec, TypeVar

from ithaca.base.errors import IthacaError

Given = ParamSpec("Given")
Result = TypeVar("Result")


def check_type(value: object, wanted: type | UnionType, error: type[IthacaError], needed: str) -> None:
    """Raise an error unless the value is of the wanted type; `needed` says what is, and how to get one."""
    if not isinstance(value, wanted):
        raise error(f"{describe(value)} was given, but {needed}")


def describe(value: object) -> str:
    """Return what a value is, as a sentence begins with it: "the text 'sweep'", 'a Tensor'."""
    if isinstance(value, str):
        return f"the text {value[:80]!r}"
    name = type(value).__name__
    return "nothing (None)" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def refuse_keywords(
    error: type[IthacaError], **hints: str
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Return a decorator that refuses arguments under the names they have elsewhere; `hints`: what to write."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            for name in kwargs.keys() & hints.keys():
                raise error(f"{function.__name__} has no argument '{name}': {hints[name]}")
            return function(*args, **kwargs)

        return checked

    return decorate


def missing_attribute(owner: str, name: str, hints: dict[str, str]) -> AttributeError | None:
    """Return the error for an attribute that objects of other libraries have; None for any other name.

    It is an AttributeError, so that `hasattr` works.
    """
    return AttributeError(f"{owner} has no '{name}': {hints[name]}") if name in hints else None
