"""The tables of a profile, as rows of words: for the terminal and for the page. Prediction beside measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ithaca.base.sizes import format_bytes, format_count, format_number, format_seconds, format_tokens
from ithaca.profile.lanes import COMPUTE, DEVICE

NONE = "–"
LARGEST_SHOWN = 10  # tensors in the terminal; the page has all


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def make_tables(report: dict[str, Any]) -> list[Table]:
    """Return the tables of a profile; those of a part that was not recorded are left out."""
    found = []
    if "memory" in report:
        found += [_owners(report), _operations(report), _largest(report)]
    if "lanes" in report:
        found.insert(min(1, len(found)), _lanes(report))
    return found


def _owners(report: dict[str, Any]) -> Table:
    measured, predicted = report["memory"], report["memory_predicted"]
    names = [*measured, *(owner for owner in predicted if owner not in measured)]
    rows = [(owner, _bytes(measured.get(owner)), _bytes(predicted.get(owner))) for owner in names]
    rows.append(("all", _bytes(report["peak_bytes"]), _bytes(report["peak_bytes_predicted"])))
    note = f"Predicted: the peak is in {report['peak_phase_predicted']}."
    if report["device"] != "cuda":
        note += " The prediction is for a GPU's kernels; this is a CPU."
    return Table("Device memory at its peak, by owner", ("owner", "measured", "predicted"), rows, note)


def _lanes(report: dict[str, Any]) -> Table:
    rows = [
        (
            lane,
            _seconds(found["busy_seconds"]),
            _seconds(found.get("predicted_seconds")),
            f"{found['idle_share']:.1%}",
            NONE if lane in (COMPUTE, DEVICE) else _seconds(found["exposed_seconds"]),
            str(found["operations"]) if "operations" in found else NONE,
        )
        for lane, found in report["lanes"].items()
    ]
    header = ("lane", "busy", "predicted", "idle", "exposed", "operations")
    note = (
        f"Of a step of {format_seconds(report['lanes_seconds'])} under torch's profiler. Exposed: busy while nothing "
        "computes. The lane 'device' is computing and exchange together."
    )
    return Table("Lanes", header, rows, note)


def _operations(report: dict[str, Any]) -> Table:
    rows = [
        (
            row["operation"],
            _bytes(row["bytes"]),
            _states(row["hidden_states"]),
            _states(row["hidden_states_made"]),
            _states(row["hidden_states_predicted"]),
            _states(row["hidden_states_of_local_tokens"]),
            NONE if row["published"] is None else f"{row['published']}×",
        )
        for row in report["operations"]
    ]
    header = ("operation", "alive", "in d", "made itself", "predicted", "in d of all local tokens", "FPDT's slides")
    note = (
        f"Activations that are alive at each operation's own peak. d is a hidden state of the "
        f"{format_count(report['hidden_state_tokens'], 'token')} of this rank that go through a block together, "
        f"{format_bytes(report['hidden_state_bytes'])}; the rank has {format_count(report['local_tokens'], 'token')}. "
        "Published figures are in hidden states of all local tokens, with as many key/value heads as query heads."
    )
    return Table("Hidden states that each operation holds", header, rows, note)


def _largest(report: dict[str, Any]) -> Table:
    rows = [
        (
            _bytes(row["bytes"]),
            (f"{row['count']} of " if row["count"] > 1 else "")
            + f"{' × '.join(map(str, row['shape'])) or 'scalar'} {row['dtype']}",
            row["owner"],
            row["places"][0] if row["places"] else NONE,
            row["places"][1] if len(row["places"]) > 1 else "",
        )
        for row in report["largest"]
    ]
    return Table("Largest tensors at the peak", ("bytes", "shape", "owner", "made in ithaca/", "called by"), rows)


def summary(report: dict[str, Any]) -> list[str]:
    """Return what was profiled, in a few lines."""
    mesh = ", ".join(f"{name} {size}" for name, size in report["mesh"].items() if size > 1)
    layers = f"{report['layers']} of {format_count(report['model_layers'], 'layer')}"
    device = report["device_name"] if report["device"] == "cuda" else f"this CPU ({report['device_name']})"
    lines = [
        f"{report['model']}: {format_tokens(report['tokens'])} tokens, recipe '{report['recipe']}', rank 0 of "
        f"{report['ranks']}{mesh and f' ({mesh})'}, {layers}, {report['dtype']}, on {device}"
    ]
    if "documents_packed" in report:
        lines.append(f"Documents: {report['documents_packed']}")
    if "overhead" in report:
        return [*lines, report["overhead"]]
    lines.append(
        f"Step: {format_seconds(report['seconds'])}{_predicted(report['seconds_predicted'])}; "
        f"{format_seconds(report['seconds_with_memory_log'])} while memory was logged, "
        f"{format_seconds(report['seconds_with_profiler'])} under torch's profiler. Each is a step of its own."
    )
    return lines


def _predicted(seconds: float | None) -> str:
    return "" if seconds is None else f" (predicted {format_seconds(seconds)})"


def table_lines(table: Table, most: int | None = None) -> list[str]:
    """Return a table for the terminal: the first column and texts to the left, numbers to the right."""
    rows = [table.header, *table.rows[:most]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = [table.title]
    for row in rows:
        cells = [
            word.ljust(width) if column == 0 or _is_text(table, column) else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return [*lines, f"  {table.note}"] if table.note else lines


def _is_text(table: Table, column: int) -> bool:
    """Whether a column holds words."""
    return table.header[column] in ("shape", "owner", "made in ithaca/", "called by")


def report_lines(report: dict[str, Any]) -> list[str]:
    """Return a profile for the terminal."""
    lines = summary(report)
    for table in make_tables(report):
        lines += ["", *table_lines(table, LARGEST_SHOWN if table.header[0] == "bytes" else None)]
    return lines


def _bytes(size: float | None) -> str:
    return NONE if size is None else format_bytes(size)


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{format_number(seconds)} s"


def _states(number: float | None) -> str:
    return NONE if number is None else f"{number:.2f}"
