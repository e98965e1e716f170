"""Commands that Ithaca prints, taken from its output as a user would copy them."""

import re
import shlex
from itertools import pairwise


def commands(output: str, name: str = "") -> list[list[str]]:
    """The words after `ithaca` of every printed command; `name`: of this one only."""
    found = re.findall(r"^(?:Next: |.* has its weights: | +)?(ithaca [a-z]+ .*)$", output, re.MULTILINE)
    words = [shlex.split(line)[1:] for line in found]
    return [line for line in words if not name or line[0] == name]


def settings(words: list[str]) -> list[str]:
    """What follows each `--set`."""
    return [value for option, value in pairwise(words) if option == "--set"]
