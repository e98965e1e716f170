"""Rates and sizes as the report writes them."""

from ithaca.base.sizes import format_number


def format_rate(rate: float, unit: str) -> str:
    """'655 TFLOP/s', '4.14 TB/s', '25 GB/s'; powers of ten."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= size:
            return f"{format_number(rate / size)} {prefix}{unit}"
    return f"{format_number(rate)} {unit}"


def rate_title(name: str) -> str:
    """A rate of attention in words: 'attention.flash4.forward_64' has heads of 64."""
    name, narrow, _ = name.partition("_64")
    return name.replace(".", " ") + (", heads of 64" if narrow else "")


def columns(rows: list[list[str]], left: int = 1) -> list[str]:
    """Rows as lines: the first `left` columns to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
