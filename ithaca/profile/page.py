"""One HTML page of a profile, with everything in it: styles, script, data. It loads nothing from anywhere."""

import html
import json
import re
from pathlib import Path
from typing import Any

from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.profile.tables import Table, make_tables, summary

HERE = Path(__file__).parent
TEXT = ("shape", "owner", "made in ithaca/", "called by", "operation", "lane")


def make_page(report: dict[str, Any]) -> str:
    """Return the page. Tables are in its HTML; page.js draws the charts."""
    parts = {
        "title": html.escape(f"{report['model']}, {format_tokens(report['tokens'])} tokens, {report['recipe']}"),
        "summary": "".join(f"<p>{html.escape(line)}</p>" for line in summary(report)),
        "memory": _memory(report) if "timeline" in report else "",
        "lanes": _lanes() if "bars" in report else "",
        "tables": "".join(_table(table) for table in make_tables(report)),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
        "data": _json({key: report[key] for key in ("timeline", "phases", "bars", "lanes_seconds") if key in report}),
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)


def _json(data: Any) -> str:
    """JSON without '<', which could end an element of the page."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _memory(report: dict[str, Any]) -> str:
    text = f"Device memory over a step, stacked by owner; the peak is {format_bytes(report['peak_bytes'])}"
    return (
        f'<section><h2>Device memory over the step</h2><figure><div id="memory" class="chart" role="img" '
        f'aria-label="{html.escape(text)}"></div><div id="owners" class="legend"></div><figcaption>Stacked by owner, '
        "in the time of the host that allocates, while memory was logged, which slows it down. Move over the chart for "
        "values; drag to zoom, double-click to reset.</figcaption></figure></section>"
    )


def _lanes() -> str:
    return (
        '<section><h2>Lanes</h2><figure><div id="lanes" class="chart" role="img" '
        'aria-label="When each lane is busy: compute, exchange, host copies, disk"></div><figcaption>Busy times of '
        "each lane in a step under torch's profiler. Gaps too short to see are closed. Drag to zoom, double-click to "
        "reset; trace.json has every operation, for ui.perfetto.dev.</figcaption></figure></section>"
    )


def _table(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        found = [
            f"<{tag}{'' if head in TEXT or place == 0 else ' class=n'}{' scope=col' if tag == 'th' else ''}>"
            f"{html.escape(cell)}</{tag}>"
            for place, (head, cell) in enumerate(zip(table.header, cells, strict=True))
        ]
        return f"<tr>{''.join(found)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    note = f"<p class=note>{html.escape(table.note)}</p>" if table.note else ""
    return (
        f"<section><h2>{html.escape(table.title)}</h2><div class=scroll><table><thead>{row(table.header, 'th')}</thead>"
        f"<tbody>{body}</tbody></table></div>{note}</section>"
    )
