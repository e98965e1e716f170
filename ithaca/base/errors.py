"""What a user did wrong, as one sentence: both numbers, the option's name, a value that works.

The command line prints the sentence and ends with its code; a library user catches `IthacaError`. A mistake
inside Ithaca is an assertion, never one of these.
"""

import difflib
from collections.abc import Iterable


class IthacaError(Exception):
    """Something the caller can mend; the message says what and how."""

    code = 2  # what the command line ends with


class ModelError(IthacaError):
    """A model folder, preset or weight file that cannot be used."""


class PlanError(IthacaError):
    """A Plan or mesh that does not go with the model, the ranks or the device."""


class InputError(IthacaError):
    """Tokens, labels or documents that the model cannot take."""


class DataError(IthacaError):
    """Text, tokens or a tokenizer that cannot be used."""


class ConfigError(IthacaError):
    """A configuration file or a `--set` option that cannot be read."""


class RunError(IthacaError):
    """A run that cannot go on, though it was begun rightly."""

    code = 1


class LostRankError(RunError):
    """Other ranks that have ended or hang, so that this one cannot go on; `ranks` are those that are known."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


def suggestion(word: str, known: Iterable[str]) -> str:
    """'; did you mean 'chunk'?' where a known word is near, else the known words."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean '{near[0]}'?" if near else "known are " + ", ".join(known)
