"""Assumed beside measured, and what that means here: the longest context of a model, and how long a step takes.

Both come from the planner, once with its own numbers and once with the measured ones. The longest context depends on
memory alone, the step on the rates. The steps that are compared have the same length.
"""

from collections.abc import Mapping

from ithaca.base.sizes import format_bytes, format_seconds, format_tokens
from ithaca.doctor.exam import Exam, Found, Section
from ithaca.doctor.rates import cluster, disk_rates, gpus_option, known_gpus, measured_tables
from ithaca.doctor.units import columns, format_rate, rate_title
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.hardware import Gpu
from ithaca.planner.search import longest, search

TITLES = {
    "matmul": ("matrix products", "FLOP/s"),
    "bandwidth": ("memory, read and written", "B/s"),
    "host": ("host link, all GPUs at once", "B/s"),
    "launches": ("operations launched in small steps", "/s"),
    "inside": ("to other ranks of the node", "B/s"),
    "across": ("to other nodes", "B/s"),
    "memory": ("memory of a rank's device", "B"),
    "ram": ("host memory of a rank", "B"),
    "disk_write": ("disk of a node, written beside products", "B/s"),
    "disk_read": ("disk of a node, read beside products", "B/s"),
}


def examine(exam: Exam) -> Found:  # noqa: ARG001
    return {}  # arithmetic, for the first rank alone


def conclude(exam: Exam, told: list[Found], findings: dict[str, Found]) -> Found:  # noqa: ARG001
    tables = measured_tables(exam, findings)
    gpus = known_gpus(exam, tables)
    if not gpus:
        return {"skipped": "the device was not measured, and no table describes it"}
    spec = read_spec(find_config(exam.model)[0])
    clusters = {kind: cluster(exam, gpu) for kind, gpu in gpus.items()}
    most = {kind: longest(spec, there) for kind, there in clusters.items()}
    tokens = min(most.values())
    answers = {kind: search(spec, there, tokens) if tokens else None for kind, there in clusters.items()}
    return {
        "gpus": gpus_option(exam, next(iter(gpus.values())).name),
        "table": _table(gpus, findings),
        "model": exam.model,
        "longest": most,
        "tokens": tokens,
        "step_seconds": {kind: answer.seconds.step for kind, answer in answers.items() if answer},
        "hardware": tables,
    }


def _table(gpus: dict[str, Gpu], findings: dict[str, Found]) -> list[Found]:
    """Each number: what the planner assumes, with the source, and what was measured."""
    rates, links = findings["devices"].get("slowest", {}), findings["links"]
    names = [*(name for name in TITLES if name in rates or name in links), "memory", "ram"]
    names += disk_rates(findings["disk"])
    rows = [_row(name, {kind: getattr(gpu, name) for kind, gpu in gpus.items()}, gpus) for name in names]
    for name, rate in rates.items():
        if name.startswith("attention."):
            _, kernel, number = name.split(".")
            known = gpus["assumed"].rates(kernel) if "assumed" in gpus else None
            rows.append(_row(name, {"assumed": getattr(known, number, None), "measured": rate}, gpus))
    return rows


def _row(name: str, figures: Mapping[str, float | None], gpus: dict[str, Gpu]) -> Found:
    source = gpus["assumed"].sources.get(name) if "assumed" in gpus else None
    return {"name": name, "assumed": figures.get("assumed"), "source": source, "measured": figures.get("measured")}


def lines(found: Found) -> list[str]:
    rows = [["", "assumed", "measured"]]
    for row in found["table"]:
        title, unit = TITLES.get(row["name"]) or (rate_title(row["name"]), "FLOP/s")
        rows.append([title, *("–" if row[kind] is None else _figure(row[kind], unit) for kind in rows[0][1:])])
    steps, most = found["step_seconds"], found["longest"]
    shown = {kind: format_tokens(tokens) if tokens else "does not fit" for kind, tokens in most.items()}
    rows.append([f"{found['model']}: longest context", *(shown.get(kind, "–") for kind in rows[0][1:])])
    if steps:
        times = [format_seconds(steps[kind]) if kind in steps else "–" for kind in rows[0][1:]]
        rows.append([f"{found['model']}: a step of {format_tokens(found['tokens'])} tokens", *times])
    return [found["gpus"], *columns(rows)]


def _figure(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "B" else format_rate(value, unit)


SECTION = Section("meaning", examine, conclude, lines)
