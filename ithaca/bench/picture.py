"""Pictures as SVG, written by hand: the same bytes on every machine, so that a test can compare them. No torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, LINE = 860, 250, 150, 50, 22
COLORS = ("#2c6fbb", "#c0392b", "#3a8f5c", "#8e5ea2", "#b8860b", "#555555")
FONT = 'font-family="Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class Bar:
    """One bar of a picture; `published` is marked beside it."""

    label: str
    value: float
    text: str
    kind: str  # measured or predicted
    published: float | None = None


KINDS = {
    "measured": f'fill="{COLORS[0]}"',
    "predicted": f'fill="white" stroke="{COLORS[0]}" stroke-dasharray="4 2"',
}


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return a picture of bars on a logarithmic axis, with a legend of the kinds that occur."""
    values = [size for row in rows for size in (row.value, row.published) if size]
    low, high = 0.7 * min(values), max(values)
    span = math.log(high / low)

    def length(value: float) -> float:
        return max((WIDTH - LEFT - RIGHT) * math.log(value / low) / span, 2) if value else 0

    parts = []
    for number, row in enumerate(rows):
        y = TOP + number * LINE
        parts.append(_text(LEFT - 8, y + 15, row.label, "end"))
        parts.append(f'<rect x="{LEFT}" y="{y + 3}" width="{length(row.value):.1f}" height="15" {KINDS[row.kind]}/>')
        ends = [length(row.value)]
        if row.published:
            x = LEFT + length(row.published)
            parts.append(f'<path d="M{x:.1f} {y + 1}v19" stroke="{COLORS[1]}" stroke-width="2.5"/>')
            ends.append(length(row.published))
        parts.append(_text(LEFT + max(ends) + 6, y + 15, row.text, "start"))
    height = TOP + len(rows) * LINE + 34
    return _svg(title, height, [*parts, *_legend(rows, height - 12)])


def _legend(rows: Sequence[Bar], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for kind in (kind for kind in KINDS if any(row.kind == kind for row in rows)):
        parts += [f'<rect x="{x:.1f}" y="{y - 10}" width="14" height="11" {KINDS[kind]}/>', _text(x + 19, y, kind)]
        x += 100
    if any(row.published for row in rows):
        parts.append(f'<path d="M{x + 4:.1f} {y - 12}v15" stroke="{COLORS[1]}" stroke-width="2.5"/>')
        parts.append(_text(x + 12, y, "published by others"))
    return parts


@dataclass(frozen=True)
class Line:
    """One curve: points (x, y), solid where measured and dashed where predicted."""

    label: str
    points: tuple[tuple[float, float], ...]
    measured: bool


def lines(title: str, curves: Sequence[Line], label_x: Callable[[float], str], y_label: str) -> str:
    """Return a picture of curves over a logarithmic x, from 0 upwards. Labels that begin alike share a color."""
    left, right, bottom, height = 70, 200, 40, 340
    names = [*dict.fromkeys(curve.label.split(",")[0] for curve in curves)]
    xs = sorted({x for curve in curves for x, _ in curve.points})
    top = max(y for curve in curves for _, y in curve.points)
    span = math.log(xs[-1] / xs[0]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (WIDTH - left - right) * math.log(x / xs[0]) / span
        return across, height - bottom - (height - bottom - TOP) * y / top

    parts = [f'<path d="M{left} {TOP}V{height - bottom}H{WIDTH - right}" fill="none" stroke="#888"/>']
    parts += [_text(at(x, 0)[0], height - bottom + 18, label_x(x), "middle") for x in xs]
    parts += [_text(left - 6, at(xs[0], share * top)[1] + 4, f"{share * top:.3g}", "end") for share in (0, 0.5, 1)]
    parts.append(_text(left, TOP - 8, y_label))
    for number, curve in enumerate(curves):
        color = COLORS[names.index(curve.label.split(",")[0]) % len(COLORS)]
        places = [at(x, y) for x, y in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = "" if curve.measured else ' stroke-dasharray="5 3"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places if curve.measured]
        y = TOP + 18 * number
        parts.append(f'<path d="M{WIDTH - right + 16} {y}h22" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(_text(WIDTH - right + 44, y + 4, curve.label))
    return _svg(title, height, parts)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} font-size="12" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    name = f'<text x="12" y="20" {FONT} font-size="14" font-weight="bold">{escape(title)}</text>'
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, name, *parts, "</svg>"]) + "\n"
