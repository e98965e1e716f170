"""GPUs by name, with what they hold and how fast they are; each number knows where it comes from.

The table is `hardware.toml` beside this file; another TOML file of the same form adds GPUs to it, or replaces numbers.
What kernels reach on a GPU for which nobody has measured it is taken to be the share of its peak that they reach on the
H200, and says so.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ithaca.base.errors import PlanError, suggestion

MEASURED_ON = "H200-141GB"
NEEDED = 'a number and its source are needed, as [55e9, "measured"]'
LARGEST = 1e24  # of the table's numbers: what is far beyond any GPU overflows later
HERE = "measured by --measure"  # the source of a number that needs no excuse
RATES = ("matmul", "attention_forward", "attention_backward")


@dataclass(frozen=True)
class Gpu:
    """hardware.toml says what each number means; `sources` says where it is from."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    inside: float
    across: float
    host: float
    ram: float
    matmul: float
    attention_forward: float
    attention_backward: float
    sources: Mapping[str, str]


NUMBERS = tuple(field.name for field in fields(Gpu) if field.name not in ("name", "sources"))


def read_gpus(more: Path | None = None) -> dict[str, Gpu]:
    """Every GPU that is known, those of another file among them."""
    tables = dict(_own())
    for name, table in (_read(more) if more else {}).items():
        tables[name] = {**tables.get(name, {}), **table}
    ours = tables[MEASURED_ON]
    measured = {number: _figure(MEASURED_ON, number, ours[number])[0] for number in ("flops", *RATES)}
    return {name: _gpu(name, table, measured) for name, table in tables.items()}


def parse_gpus(text: str, known: Mapping[str, Gpu]) -> tuple[int, Gpu]:
    """'8xH100-80GB' -> 8 and that GPU; 'H100-80GB' is one, and where there is no other H100, 'H100' is it."""
    found = re.fullmatch(r"(?:(\d+)\s*[xX×]\s*)?(.+)", text.strip())
    # Twenty digits are enough to be refused
    count, name = (int((found[1] or "1")[:20]), found[2]) if found else (1, text)
    if count < 1:
        raise PlanError(f"'{text}' has {count} GPUs: 1 or more can be planned for, as 8x{name}")
    meant = [gpu for other, gpu in known.items() if name.upper() in (other.upper(), _stem(other))]
    if len(meant) > 1:
        raise PlanError(f"GPU '{name}' is one of several: {' or '.join(gpu.name for gpu in meant)}")
    if not meant:
        raise PlanError(f"GPU '{name}' is not known: {_suggested(name, known)}")
    return count, meant[0]


def _suggested(name: str, known: Mapping[str, Gpu]) -> str:
    """Of the GPUs whose name without the memory is nearest, the nearest."""
    stems = get_close_matches(_stem(name), map(_stem, known), n=1)
    alike = [other for other in known if _stem(other) in stems]
    near = get_close_matches(name.upper(), alike, n=1, cutoff=0.0)
    return f"did you mean '{near[0]}'?" if near else suggestion(name, known)


def _stem(name: str) -> str:
    return name.upper().split("-")[0]


def nearest(name: str, memory: int, known: Mapping[str, Gpu]) -> Gpu:
    """The GPU of the table that a driver's name and a memory mean."""
    letters = name.upper().replace(" ", "")
    meant = [gpu for gpu in known.values() if _stem(gpu.name) in letters]
    if not meant:
        raise PlanError(f"'{name}' is in no table of GPUs: describe it in a file (--hardware), as hardware.toml does")
    longest = max(len(_stem(gpu.name)) for gpu in meant)  # a GH200 is no H200
    return min((gpu for gpu in meant if len(_stem(gpu.name)) == longest), key=lambda gpu: abs(gpu.memory - memory))


def peak_flops(name: str, memory: int) -> float | None:
    """Return the peak FLOP/s of a GPU (dense bf16) that MFU is measured against; None if no table describes it."""
    try:
        return nearest(name, memory, read_gpus()).flops
    except PlanError:
        return None


def _gpu(name: str, table: Mapping[str, Any], measured: Mapping[str, float]) -> Gpu:
    numbers: dict[str, float] = {}
    sources: dict[str, str] = {}
    for number in NUMBERS:
        if number in table:
            numbers[number], sources[number] = _figure(name, number, table[number])
        elif number in RATES and "flops" in numbers:
            share = measured[number] / measured["flops"]
            numbers[number] = share * numbers["flops"]
            sources[number] = f"assumed: {100 * share:.0f} % of the peak, as measured on the {MEASURED_ON}"
        else:
            raise PlanError(f"GPU '{name}' has no {number}: {NEEDED}")
    unknown = [word for word in table if word not in NUMBERS]
    if unknown:
        raise PlanError(f"GPU '{name}' has a '{unknown[0]}', which nobody reads: {suggestion(unknown[0], NUMBERS)}")
    return Gpu(name, **numbers, sources=sources)


def _figure(name: str, number: str, value: Any) -> tuple[float, str]:
    match value:
        case [int() | float() as figure, str() as source] if not isinstance(figure, bool) and 1 <= figure <= LARGEST:
            return float(figure), source
        case [int() | float() as figure, str()] if figure > LARGEST:
            raise PlanError(f"{number} of GPU '{name}' is more than can be planned with: up to {LARGEST:g} can")
    raise PlanError(f"{number} of GPU '{name}' is {value}: {NEEDED}")


@lru_cache
def _own() -> dict[str, Any]:
    return tomllib.loads((files("ithaca.planner") / "hardware.toml").read_text(encoding="utf-8"))


def _read(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise PlanError(f"'{path}' cannot be read as TOML ({problem})") from None
    wrong = [name for name, table in tables.items() if not isinstance(table, dict)]
    if wrong:
        raise PlanError(
            f"'{wrong[0]}' in '{path}' is no GPU: a table of numbers is, as in ithaca/planner/hardware.toml"
        )
    return tables
