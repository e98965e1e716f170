"""The rows of a benchmark as data, published figures beside them, and the limits that all rows share. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.plans.recipes import RECIPES

Options = Mapping[str, Any]  # of a Plan


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure that others have published, with its source."""

    source: str
    tokens: int | None = None  # the longest context
    gigabytes: float | None = None  # of a GPU
    mfu: float | None = None  # as they count it, in percent
    note: str = ""  # a remark of the source


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: a technique, as Plans of which the first that fits counts."""

    name: str
    adds: str  # what this row has that the one before, or the full stack, has not
    plans: tuple[Options, ...]  # the fastest first
    shares: bool = True  # all ranks share one sequence by heads; otherwise each has a sequence of its own
    layers: int = 2  # that run
    begins: bool = False  # another way to share the work: no factor over the row before
    published: Mapping[str, Published] = field(default_factory=dict)  # by model

    def axes(self, ranks: int) -> Axes:
        return RECIPES[self.plans[0]["recipe"]].axes(ranks, 1) if self.shares else Axes(shard=ranks)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The memory that a rank may use, and the lengths that are looked at."""

    ranks: int = 8
    cap: int = 80 * 10**9  # bytes of a GPU
    host: int = 1_900 * 10**9  # bytes of memory of the node that the ranks share
    disk: int = 28_000 * 10**9  # bytes of its disk
    most: int = 2**24  # tokens: longer contexts are not looked for
    timed: int = 2**19  # tokens of the step that is timed, if this many fit; 0: none is


def read_plan(options: Options) -> Plan:
    """Return the Plan of a row's options."""
    return Plan(**options)


def plan_words(options: Options) -> str:
    """Return the options of a Plan in one line: 'sweep, o=recompute'."""
    return ", ".join(str(value) if name == "recipe" else f"{name}={value}" for name, value in options.items())
