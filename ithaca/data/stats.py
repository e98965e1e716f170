"""Document lengths of a token file: a table, and a histogram of the tokens by document length.

Training on millions of tokens needs long documents, so the table shows the share of tokens in documents of several
lengths. Cost: one pass over the bounds, 8 bytes a document. Tokens are not read.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.data.reader import TokenFile
from ithaca.data.tokenfile import DTYPES

LONG = (4 << 10, 32 << 10, 128 << 10, 1 << 20)


@dataclass(frozen=True)
class Lengths:
    """Statistics of document lengths, in tokens."""

    documents: int
    tokens: int
    least: int
    median: float
    mean: float
    p90: float
    p99: float
    most: int
    shares: tuple[float, ...]  # the share of all tokens in documents of at least LONG tokens


def measure(data: TokenFile) -> Lengths:
    lengths = np.diff(data.bounds())
    median, p90, p99 = (float(value) for value in np.percentile(lengths, (50, 90, 99)))
    return Lengths(
        documents=len(lengths),
        tokens=int(lengths.sum()),
        least=int(lengths.min()),
        median=median,
        mean=float(lengths.mean()),
        p90=p90,
        p99=p99,
        most=int(lengths.max()),
        shares=tuple(float(lengths[lengths >= long].sum() / lengths.sum()) for long in LONG),
    )


def table(data: TokenFile) -> Table:
    """Return the lengths as a table of two columns."""
    found = measure(data)
    rows = {
        "documents": f"{found.documents:,}",
        "tokens": f"{found.tokens:,}",
        "held in": f"{data.header.dtype}, {format_bytes(data.tokens * DTYPES[data.header.dtype].itemsize)}",
        "vocabulary": f"{data.vocab:,}",
        "tokenizer": data.tokenizer[: len("sha256:") + 12],
        "shortest": f"{found.least:,}",
        "median": f"{found.median:,.0f}",
        "mean": f"{found.mean:,.0f}",
        "90 % are up to": f"{found.p90:,.0f}",
        "99 % are up to": f"{found.p99:,.0f}",
        "longest": f"{found.most:,}",
    }
    for long, share in zip(LONG, found.shares, strict=True):
        rows[f"tokens in documents of {format_tokens(long)} or more"] = f"{100 * share:.1f} %"
    drawn = Table(show_header=False)
    drawn.add_column()
    drawn.add_column(justify="right")
    for name, value in rows.items():
        drawn.add_row(name, value)
    return drawn


def histogram(data: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    """Return edges a factor of √2 apart, and the tokens in documents from each edge to below the next."""
    lengths = np.diff(data.bounds())
    low, high = (int(np.floor(2 * np.log2(length))) for length in (lengths.min(), lengths.max()))
    edges = 2.0 ** (np.arange(low, high + 2) / 2)
    held, _ = np.histogram(lengths, edges, weights=lengths)
    return edges, held


def draw(data: TokenFile, picture: Path) -> None:
    """Draw the histogram into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges, held = histogram(data)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots()
    axes.stairs(held, edges, fill=True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: format_tokens(round(value)))
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("tokens in all documents of that length")
    axes.set_title(
        f"{data.path.name if data.path else 'in memory'}: {data.tokens:,} tokens, {data.documents:,} documents"
    )
    try:
        figure.savefig(picture, format="png", dpi=150)
    except OSError as problem:
        raise DataError(f"--picture '{picture}' cannot be written ({problem.strerror}): name another file") from None
