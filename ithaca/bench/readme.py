"""The short table of a README, from stored results: longest context and speed against the peers by name. No torch.

It stands between two marks, so that everything around it stays as it was written.
"""

from pathlib import Path
from statistics import median
from typing import Any

from ithaca.base.errors import ConfigError
from ithaca.base.sizes import format_bytes, format_number, format_tokens
from ithaca.bench.store import Stored, read_results

Json = dict[str, Any]
BEGIN, END = "<!-- ithaca bench: begin -->", "<!-- ithaca bench: end -->"
MODEL = "llama3-8b"


def with_block(readme: Path, folder: Path, page: Path) -> str:
    """Return the text of a README with its block made anew."""
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"--readme {readme} cannot be read ({problem.strerror}): name another file") from None
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"--readme {readme} has no place for the table: write {BEGIN} and {END} on lines of their own"
        )
    return "\n".join([head + BEGIN, *block(folder, page), END]) + tail


def block(folder: Path, page: Path) -> list[str]:
    """Return the lines of the block: the ladder, its picture, and the peers where they were measured."""
    (ladder, *_) = [*sorted(folder.glob(f"ladder-{MODEL}-*.json")), None]
    if ladder is None:
        raise ConfigError(f"'{folder}' has no ladder of {MODEL}: run ithaca bench ladder {MODEL} first")
    lines = ["", "| Llama3-8B on 8 GPUs | longest context | published | tokens/s/GPU at 512K |", "|---|---|---|---|"]
    rows = [row for row in read_results(ladder)[1] if row.answer or row.predicted]
    lines += [_ladder_line(row) for row in rows]
    name = f"{page.stem}-{ladder.stem}.svg"
    where = "" if str(page.parent) == "." else f"{page.parent}/"
    lines += ["", "*Italics are predicted.*" if any(not row.answer for row in rows) else "All rows are measured."]
    lines += ["", f"![Longest context of Llama3-8B by technique]({where}{name})"]
    for peers in sorted(folder.glob(f"peers-{MODEL}-*.json")):
        lines += _peers(read_results(peers)[1])
    return [*lines, "", f"[All results]({where}{page.name})", ""]


def _ladder_line(row: Stored) -> str:
    found = row.answer or row.predicted or {}
    published = (row.about["published"] or {}).get("tokens")
    rate = found.get("tokens_per_second_per_gpu") if found.get("timed") == 2**19 else None
    cells = [format_tokens(found["longest"]) if found["longest"] else "nothing", f"{rate:.0f}" if rate else "–"]
    longest, speed = cells if row.answer else [f"*{cell}*" if cell != "–" else cell for cell in cells]
    return f"| {row.name} | {longest} | {format_tokens(published) if published else '–'} | {speed} |"


def _peers(rows: list[Stored]) -> list[str]:
    """Seconds, memory and how much longer than Ithaca each side takes, from sides that ran."""
    found: dict[tuple[int, str], list[Json]] = {}
    for row in rows:
        if row.answer and row.answer["ran"]:
            found.setdefault((row.question["tokens"], row.question["side"]), []).append(row.answer)
    if not found:
        return []
    layers = rows[0].question["layers"]
    lines = [
        "",
        f"| {layers} layers of Llama3-8B on one GPU | tokens | seconds | beside weights and gradients | × Ithaca |",
    ]
    lines.append("|---|---|---|---|---|")
    seconds = {key: median(answer["seconds"] for answer in answers) for key, answers in found.items()}
    for (tokens, side), answers in found.items():
        own = [time for (length, name), time in seconds.items() if length == tokens and "Ithaca" in name]
        beside = [answer["bytes_beside"] for answer in answers if answer["bytes_beside"] is not None]
        memory = format_bytes(median(beside)) if beside else "–"
        over = f"{seconds[tokens, side] / min(own):.2f}" if own else "–"
        lines.append(
            f"| {side} | {format_tokens(tokens)} | {format_number(seconds[tokens, side])} | {memory} | {over} |"
        )
    return lines
