"""Errors that a user can fix. Each message is one sentence with both numbers, the option and a value that works.

The command line prints the sentence and exits with the error's code. A library user catches `IthacaError`. A bug inside
Ithaca is an assertion, never one of these.
"""

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Read = TypeVar("Read")


class IthacaError(Exception):
    """Something that the caller can fix; the message says what and how."""

    code = 2  # the exit code of the command line


class ModelError(IthacaError):
    """A model folder, preset or weight file that cannot be used."""


class PlanError(IthacaError):
    """A Plan or mesh that does not fit the model, the ranks or the device."""


class InputError(IthacaError):
    """Tokens, labels or documents that the model cannot take."""


class DataError(IthacaError):
    """Text, tokens or a tokenizer that cannot be used."""


class ConfigError(IthacaError):
    """A configuration file or a `--set` option that cannot be read."""


class RunError(IthacaError):
    """A run that cannot continue, though it was started correctly."""

    code = 1


class LostRankError(RunError):
    """Other ranks have ended or hang, so this one cannot continue; `ranks` are those that are known."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


def read_option(option: str, read: Callable[[Any], Read], value: object) -> Read:
    """An option's value, read by `read`. A mistake is raised with the option's name in front, unless it has that."""
    try:
        return read(value)
    except (ConfigError, DataError) as problem:
        if option in str(problem):
            raise
        raise type(problem)(f"{option}: {problem}") from None


def suggestion(word: str, known: Iterable[str]) -> str:
    """'did you mean 'chunk'?' if a known word is similar, else the list of known words."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else "known are " + ", ".join(known)


def shown(value: object, most: int = 80) -> str:
    """A value from a file as a message shows it: one line, no control characters, at most `most` characters."""
    found = reprlib.Repr()
    found.maxstring = found.maxother = found.maxlong = most
    return re.sub(r"\s*\n\s*", " ", found.repr(value))[: 2 * most]


def first_line(problem: BaseException, most: int = 300) -> str:
    """The first line of a library's error as a message quotes it: no control characters, no addresses of objects."""
    line = next(iter(str(problem).splitlines()), "") or type(problem).__name__
    line = re.sub(r":? <.* object at 0x\w+>", "", line)
    return "".join(filter(str.isprintable, line))[:most]
