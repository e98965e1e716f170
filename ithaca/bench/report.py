"""The page of all stored results, and its pictures. The same files give the same bytes. No torch.

Every figure is marked as measured or predicted (in italics), beside the published figures of others. Only files that
`ithaca bench` wrote are read; other files of the folder are skipped.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.files import read_small
from ithaca.base.sizes import format_bytes, format_number, format_seconds, format_tokens
from ithaca.bench.measure import NO_FURTHER
from ithaca.bench.picture import Bar, Line, bars, lines
from ithaca.bench.readme import with_block
from ithaca.bench.rows import plan_words
from ithaca.bench.store import Stored, read_results
from ithaca.bench.tables import ABLATION, LADDER

Json = dict[str, Any]
ORDER = ("ladder", "ablation", "context-parallel", "dial", "recompute", "peers")
HEAD = """# Results

Made by `ithaca bench report` from the files in `bench/results`; do not edit. [Benchmarks](benchmarks.md) says what each
table shows and how it is measured. *Italics are predicted*, by the formulas of `ithaca plan`, and were not measured. A
rehearsal runs one rank of the job on one device: the links between GPUs take no time in it. Predicted steps have them.
"""


class Page:
    """Lines of Markdown, and the pictures that they show."""

    def __init__(self, stem: str):
        self.lines: list[str] = []
        self.pictures: dict[str, str] = {}
        self._stem = stem

    def add(self, *lines: str) -> None:
        self.lines += lines

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.add("", _row(header), _row(["---"] * len(header)), *map(_row, rows))

    def picture(self, name: str, about: str, svg: str) -> None:
        file = f"{self._stem}-{name}.svg"
        self.pictures[file] = svg
        self.add("", f"![{about}]({file})")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_report(folder: Path, page: Path, readme: Path | None = None) -> list[Path]:
    """Write the page and its pictures, and the block of a README; return their paths."""
    files = make_report(folder, page.stem)
    text = with_block(readme, folder, page) if readme else None
    written = []
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        for old in page.parent.glob(f"{page.stem}-*.svg"):
            if old.name not in files and f"]({old.name})" in before:
                old.unlink()
        for name, content in files.items():
            path = page.parent / (page.name if name.endswith(".md") else name)
            path.write_text(content, encoding="utf-8")
            written.append(path)
        if readme and text is not None:
            readme.write_text(text, encoding="utf-8")
            written.append(readme)
    except OSError as problem:
        raise ConfigError(f"--out {page} cannot be written ({problem.strerror}): name another page") from None
    return written


def make_report(folder: Path, stem: str = "results") -> dict[str, str]:
    """Return the page and its pictures by name."""
    found = sorted(_results(folder), key=lambda each: (ORDER.index(each[0]["bench"]), each[1]))
    if not found:
        raise ConfigError(
            f"'{folder}' has no results of ithaca bench: run one first, as ithaca bench ladder --predict, or name the "
            "folder that has them, as ithaca bench report FOLDER"
        )
    page = Page(stem)
    page.add(*HEAD.strip().splitlines())
    for bench in ORDER:
        some = [(head, name, rows) for head, name, rows in found if head["bench"] == bench]
        if some:
            title, section = SECTIONS[bench]
            page.add("", f"## {title}")
            for head, name, rows in some:
                section(page, head["model"], name, rows)
                page.add("", *_origin(name, rows))
    return {f"{stem}.md": "\n".join(page.lines) + "\n", **page.pictures}


def _results(folder: Path) -> Iterable[tuple[Json, str, list[Stored]]]:
    """The head, the name and the rows of every file that a command of ours wrote."""
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(read_small(path))
        except (OSError, ValueError):
            content = None
        ours = isinstance(content, dict) and content.get("bench") in ORDER
        if ours or (content is None and path.name.startswith(tuple(f"{bench}-" for bench in ORDER))):
            head, rows = read_results(path)  # raises an error about one of ours that cannot be read
            if rows:
                yield head, path.stem, rows


def _origin(name: str, rows: Sequence[Stored]) -> list[str]:
    """Where the rows of a file come from: device, versions, commits, commands."""
    measured = [_origin_text(row) for row in rows if row.origin and row.answer]
    predicted = [_predicted_text(row) for row in rows if row.origin and row.predicted and not row.answer]
    return [f"`{name}.json`: {text}" for text in dict.fromkeys(measured + predicted)]


def _origin_text(row: Stored) -> str:
    machine = row.origin["machine"]
    names = ("torch", "cudnn", "flash-attn-4", "transformers", "liger-kernel", "deepspeed")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    return f"measured on {machine['device']}, {versions}, commit {row.origin['commit']}, `{row.origin['command']}`."


def _predicted_text(row: Stored) -> str:
    machine = row.origin["machine"]
    target = machine.get("predicted_for") or machine["device"]
    return f"predicted for {target}, commit {row.origin['commit']}, `{row.origin['command']}`."


def _found(row: Stored) -> tuple[Json, Callable[[str], str], str]:
    """A row's answer or its prediction, the function that writes its cells, and its kind."""
    if row.answer:
        return row.answer, str, "measured"
    return (row.predicted or {}), _italic, "predicted"


def _italic(text: str) -> str:
    return f"*{text}*" if text and text != "–" else text


def _tokens(count: int | None) -> str:
    """'6464K', '16M', '1.5M': a length with three or four digits."""
    return "–" if not count else format_tokens(count)


def _speed(found: Json) -> list[str]:
    if not found.get("seconds"):
        return ["–", "–"]
    mfu = found.get("mfu_causal")
    return [f"{found['tokens_per_second_per_gpu']:.0f}", "–" if mfu is None else f"{100 * mfu:.1f} %"]


# The longest context of every row
def _ladder(page: Page, model: str, name: str, rows: Sequence[Stored]) -> None:
    _longest_text(page, model, rows)
    header = ("", "longest", "× before", "peak", "limit", "timed at", "tokens/s/GPU", "causal MFU", "published")
    table = []
    for row in rows:
        found, write, _ = _found(row)
        cells = [_bounds(found), _factor(model, row, rows), _peak_words(found), found.get("limit") or "–"]
        cells += [_tokens(found.get("timed")), *_speed(found)]
        table.append([row.name, *map(write, cells), _published_words(row)])
    page.table(header, table)
    _notes(page, rows)
    _longest_picture(page, f"Longest context of {model} by technique", name, rows)


def _factor(model: str, row: Stored, rows: Sequence[Stored]) -> str:
    """'1.80': the longest context over that of the row before in the ladder, if they can be compared."""
    names = [each.name for each in LADDER if each.plans or model in each.published]
    number = names.index(row.name) if row.name in names else 0
    before = next((each for each in rows if number and each.name == names[number - 1]), None)
    if before is None or row.about.get("begins") or not _comparable(row, before):
        return "–"
    more = "≥ " if _found(row)[0].get("limit") == NO_FURTHER else ""
    return f"{more}{_found(row)[0]['longest'] / _found(before)[0]['longest']:.2f}"


def _comparable(one: Stored, other: Stored) -> bool:
    """Whether two rows have a longest context, both measured or both predicted, under the same limits."""
    alike = _found(one)[2] == _found(other)[2] and one.question["limits"] == other.question["limits"]
    return alike and all(_found(row)[0].get("longest") for row in (one, other))


def _peak_words(found: Json) -> str:
    """'74 GiB; 59.1 GiB at 3M': the peak at the longest context, and at another length if that was asked for."""
    if not found.get("peak_bytes"):
        return "–"
    tokens, size = found.get("peak_at") or (None, 0)
    return format_bytes(found["peak_bytes"]) + (f"; {format_bytes(size)} at {format_tokens(tokens)}" if tokens else "")


def _ablation(page: Page, model: str, name: str, rows: Sequence[Stored]) -> None:
    _longest_text(page, model, rows)
    full = next((row for row in rows if row.name == ABLATION[0].name), None)
    table = []
    for row in rows:
        found, write, _ = _found(row)
        share = "–"
        if full and _comparable(row, full):
            share = f"{100 * found['longest'] / _found(full)[0]['longest']:.0f} %"
        peak = format_bytes(found["peak_bytes"]) if found.get("peak_bytes") else "–"
        cells = [_bounds(found), share, peak, found.get("limit") or "–"]
        table.append([row.name, *map(write, cells), row.about["adds"]])
    page.table(("", "longest", "of the full stack", "peak", "limit", "in its place"), table)
    _longest_picture(page, f"Longest context of {model} without one component", name, rows)


def _longest_text(page: Page, model: str, rows: Sequence[Stored]) -> None:
    limits = rows[0].question["limits"]
    page.add(
        "",
        f"{_heading(model, rows)}, {limits['host'] / 1e12:g} TB of host memory",
        "",
        f"A measured longest context is written as (fits, does not fit). Both were tried; but where host memory or the "
        f"disk is the limit, what does not fit is counted. No context above {format_tokens(limits['most'])} was looked "
        "for.",
    )


def _heading(model: str, rows: Sequence[Stored]) -> str:
    limits = rows[0].question["limits"]
    return f"### {model}: {limits['ranks']} GPUs of {limits['cap'] / 1e9:g} GB"


def _bounds(found: Json) -> str:
    """'4288K, 4672K': the longest length that was seen to fit, and the shortest that was not."""
    if "longest" not in found:
        return "–"
    if not found["longest"]:
        return "nothing fits"
    fits = _longest_word(found)
    return f"{fits}, {_tokens(found['fails'])}" if found.get("fails") else fits


def _longest_word(found: Json) -> str:
    """'6464K', or '≥ 16M' where nothing longer was looked for."""
    return f"{'≥ ' if found.get('limit') == NO_FURTHER else ''}{_tokens(found['longest'])}"


def _published(row: Stored) -> Json:
    return row.about.get("published") or {}


def _published_words(row: Stored) -> str:
    found = _published(row)
    words = [
        _tokens(found["tokens"]) if found.get("tokens") else "",
        f"{found['gigabytes']:g} GB" if found.get("gigabytes") else "",
        f"MFU {found['mfu']:g} %" if found.get("mfu") else "",
        found.get("note", ""),
    ]
    return ", ".join(word for word in words if word) or "–"


def _notes(page: Page, rows: Sequence[Stored]) -> None:
    sources = dict.fromkeys(_published(row)["source"] for row in rows if _published(row))
    if sources:
        page.add("", f"Published: {'; '.join(sources)}. MFU as they count it.")


def _longest_picture(page: Page, title: str, name: str, rows: Sequence[Stored]) -> None:
    shown = []
    for row in rows:
        found, _, kind = _found(row)
        text = _longest_word(found) if found.get("longest") else "nothing fits"
        shown.append(Bar(row.name, found.get("longest") or 0, text, kind, _published(row).get("tokens")))
    if any(bar.value for bar in shown):
        page.picture(name, title, bars(f"{title}, tokens", shown))


# Memory and speed at given lengths
def _point_cells(found: Json) -> list[str]:
    if not found.get("fits"):
        return [f"does not fit ({found.get('limit') or 'GPU'})", "–", "–", "–"]
    seconds = format_seconds(found["seconds"]) if found.get("seconds") else "–"
    return [format_bytes(found["peak_bytes"]), seconds, *_speed(found)]


def _context_parallel(page: Page, model: str, name: str, rows: Sequence[Stored]) -> None:
    page.add("", _heading(model, rows))
    header = ("tokens", "without", "peak", "tokens/s/GPU", "causal MFU", "with", "peak", "tokens/s/GPU", "causal MFU")
    table = []
    for tokens in dict.fromkeys(row.question["tokens"] for row in rows):
        line = [format_tokens(tokens)]
        for way in ("without", "with"):
            row = next((row for row in rows if (row.question["tokens"], row.question["row"]) == (tokens, way)), None)
            if row is None:
                line += ["–"] * 4
                continue
            found, write, _ = _found(row)
            peak, _, *speed = _point_cells(found)
            line += [write(_short_plan(found)), *map(write, (peak, *speed))]
        table.append(line)
    page.table(header, table)
    curves = []
    for way in ("without", "with"):
        for measured in (True, False):
            points = [
                (row.question["tokens"], 100 * found["mfu_causal"])
                for row in rows
                if row.question["row"] == way and bool(row.answer) == measured
                for found in [_found(row)[0]]
                if found.get("fits") and found.get("mfu_causal")
            ]
            label = f"{way}, {'measured' if measured else 'predicted'}"
            curves += [Line(label, tuple(points), measured)] if points else []
    if curves:
        title = f"{model} with and without context parallelism"
        page.picture(name, title, lines(title, curves, lambda x: format_tokens(int(x)), "causal MFU, %"))


def _short_plan(found: Json) -> str:
    plan = found.get("plan", {})
    return plan_words({key: plan[key] for key in ("recipe", "checkpoint", "x") if key in plan})


def _dial(page: Page, model: str, _: str, rows: Sequence[Stored]) -> None:
    page.add("", _heading(model, rows))
    gpus = [*dict.fromkeys(gpu for row in rows for gpu in (row.predicted or {}).get("gpus", {}))]
    header = ("", "peak", "step", "tokens/s/GPU", "causal MFU", *(f"{gpu}, tokens/s/GPU" for gpu in gpus))
    table = []
    for row in rows:
        found, write = _found(row)[:2]
        others = [_speed((row.predicted or {}).get("gpus", {}).get(gpu, {}))[0] for gpu in gpus]
        table.append([row.name, *map(write, _point_cells(found)), *map(_italic, others)])
    page.table(header, table)
    best = _best_settings(rows, gpus)
    if best:
        page.add("", f"Fastest: {'; '.join(best)}.")


def _best_settings(rows: Sequence[Stored], gpus: Sequence[str]) -> list[str]:
    """The fastest chunk and the fastest number of heads at each length, here and on each GPU."""
    found = []
    for group in dict.fromkeys(_dial_group(row) for row in rows):
        some = [row for row in rows if _dial_group(row) == group]
        places: list[tuple[str, Callable[[Stored], Json]]] = [
            ("measured", lambda row: row.answer or {}),
            *((gpu, lambda row, gpu=gpu: (row.predicted or {}).get("gpus", {}).get(gpu, {})) for gpu in gpus),
        ]
        best = []
        for place, read in places:
            timed = [(read(row)["seconds"], row.name) for row in some if read(row).get("seconds")]
            best += [f"{place} {min(timed)[1].split()[-1]}"] if timed else []
        if best:
            found.append(f"{group}: {', '.join(best)}")
    return found


def _dial_group(row: Stored) -> str:
    return row.name.rsplit(" ", 1)[0]


def _recompute(page: Page, model: str, _: str, rows: Sequence[Stored]) -> None:
    page.add("", _heading(model, rows))
    table = []
    for row in rows:
        found, write, kind = _found(row)
        alike = [_found(other) for other in rows if other.question["tokens"] == row.question["tokens"]]
        least = min((other["seconds"] for other, _, same in alike if same == kind and other.get("seconds")), default=0)
        ratio = f"{found['seconds'] / least:.2f} ×" if found.get("seconds") and least else "–"
        peak, *speed = _point_cells(found)
        table.append([row.name, *map(write, (peak, *speed, ratio)), row.about["adds"]])
    page.table(("", "peak", "step", "tokens/s/GPU", "causal MFU", "time of the fastest", "what is kept"), table)


# Peers
def _peers(page: Page, model: str, _: str, rows: Sequence[Stored]) -> None:
    layers = rows[0].question["layers"]
    page.add("", f"### {model}, {layers} layers, one device", "", "Medians over rounds in which every side has a turn.")
    table, sides = [], [*dict.fromkeys((row.question["tokens"], row.question["side"]) for row in rows)]
    for tokens, side in sides:
        asked = [row for row in rows if (row.question["tokens"], row.question["side"]) == (tokens, side)]
        found = [row.answer for row in asked if row.answer]
        ran = [answer for answer in found if answer.get("ran")]
        if not ran:
            why = next((answer["why"] for answer in found), asked[0].error or "not run yet")
            table.append([format_tokens(tokens), side, why, "–", "–", "–"])
            continue
        beside, mfu = (_median([answer[key] for answer in ran]) for key in ("bytes_beside", "mfu_causal"))
        cells = [
            f"{format_number(_median([answer['seconds'] for answer in ran]) or 0)} s",
            "–" if beside is None else format_bytes(beside),
            "–" if mfu is None else f"{100 * mfu:.1f} %",
            ran[0]["attention"],
        ]
        table.append([format_tokens(tokens), side, *cells])
    page.table(("tokens", "side", "step", "memory beside weights and gradients", "causal MFU", "attention"), table)


def _median(values: Sequence[float | None]) -> float | None:
    """The median of the measured values; None if there are none, as of memory on a CPU."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


SECTIONS: dict[str, tuple[str, Callable[[Page, str, str, Sequence[Stored]], None]]] = {
    "ladder": ("The ladder", _ladder),
    "ablation": ("One component left out", _ablation),
    "context-parallel": ("With and without context parallelism", _context_parallel),
    "dial": ("The dial: chunks and heads at a time", _dial),
    "recompute": ("What is computed again", _recompute),
    "peers": ("Beside other programs", _peers),
}
