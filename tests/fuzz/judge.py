"""What the pages promise of every command: its code, one sentence for a mistake, no traceback."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.recipe import Input

# Words of Python and of C++ that no sentence for a user has
JARGON = re.compile(
    r"Errno|<class |object at 0x|NoneType|KeyError|TypeError|ValueError|AttributeError|IndexError|RecursionError|"
    r"__\w+__\(|unexpected keyword|positional argument|subscriptable|not iterable|"
    r"\[enforce fail|terminate called|std::|c10::|\.cpp:|\.py:\d|dtype\('|panicked|must be real number|"
    r"unsupported operand|cannot unpack|literal for (int|float)|string indices|list indices"
)
LONGEST = 20_000  # characters of a sentence; it may quote what was typed
NOT_A_NUMBER = re.compile(r"(?<![\w.-])(nan|inf|-inf)(?![\w-])", re.IGNORECASE)


@dataclass
class Outcome:
    """How a command ended, and what is wrong with that."""

    code: int  # negative: the signal that ended it
    out: str
    err: str
    seconds: float
    peak: int
    findings: list[str] = field(default_factory=list)


def judge(item: Input, outcome: Outcome) -> None:
    """Add what is wrong with the code and with what was said."""
    code, err = outcome.code, outcome.err
    found = outcome.findings
    if code not in (0, 1, 2):
        found.append(f"code {code}")
    for stream in (outcome.out, err):
        if "Traceback (most recent call last)" in stream:
            found.append("traceback: " + (stream.strip().splitlines() or [""])[-1][:300])
    if code != 0:
        found += _sentence(item, outcome)
    if code == 0 and item.expect == "error":
        found.append("accepted")
    if code != 0 and item.expect == "ok":
        found.append(f"refused: {(err.strip().splitlines() or [''])[-1][:300]}")
    if code == 0 and item.command in ("plan", "rehearse"):
        found += _figures(item, outcome.out)


def _sentence(item: Input, outcome: Outcome) -> list[str]:
    lines = outcome.err.rstrip().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("error:")]
    if "--json" in item.words and not begins and _json(outcome.out).get("why"):
        return []  # the object has the sentence
    if len(begins) != 1:
        return [f"no sentence: {len(begins)} lines begin with 'error:'; the last is {(lines or [''])[-1][:200]!r}"]
    said = "\n".join(lines[begins[0] :])[len("error:") :].strip()
    found = []
    if begins[0] != len(lines) - 1:
        found.append(f"more than a sentence: {said[:300]!r}")
    if not said or len(said) > LONGEST:
        found.append(f"a sentence of {len(said)} characters")
    if jargon := JARGON.search(said):
        found.append(f"not a user's words ({jargon[0]!r}): {said[:300]}")
    return found


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _figures(item: Input, out: str) -> list[str]:
    if "--help" in item.words:
        return []
    if "--json" in item.words:
        return [] if _json(out) else ["no JSON object"]
    found = NOT_A_NUMBER.search(out)
    return [f"a figure is {found[0]!r}"] if found else []
