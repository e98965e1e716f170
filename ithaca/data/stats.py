"""Document lengths of a token file, and what context lengths keep of the documents: tables and a picture.

Training on millions of tokens needs long documents. For a context length the table shows how many documents fit into it
whole, how many would be cut, and the share of tokens in documents that fill it. Cost: one pass over the bounds, 8 bytes
a document. Tokens are not read; the header knows how many are learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ithaca.base.errors import DataError
from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.data.reader import TokenFile
from ithaca.data.tokenfile import DTYPES

CONTEXTS = tuple(4096 << double for double in range(9))  # 4K to 1M


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


@dataclass(frozen=True)
class Kept:
    """What a context length keeps of the documents."""

    tokens: int  # the context length
    whole: int  # documents that fit
    cut: int  # documents that are longer
    first_part: float  # the share of all tokens that is left if longer documents are cut to the context length
    as_long: float  # the share of all tokens in documents of at least the context length


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
    )


def keep(data: TokenFile, contexts: Sequence[int]) -> list[Kept]:
    """Return what each of the context lengths keeps."""
    lengths = np.diff(data.bounds())
    total = lengths.sum()
    return [
        Kept(
            tokens=context,
            whole=int((lengths <= context).sum()),
            cut=int((lengths > context).sum()),
            first_part=float(np.minimum(lengths, context).sum() / total),
            as_long=float(lengths[lengths >= context].sum() / total),
        )
        for context in contexts
    ]


def table(data: TokenFile) -> Table:
    """Return the lengths as a table of two columns."""
    found = measure(data)
    rows = {
        "documents": f"{found.documents:,}",
        "tokens": f"{found.tokens:,}",
        "in the loss": f"{data.header.labels:,} ({100 * data.header.labels / found.tokens:.1f} %)",
        "stored as": f"{data.header.dtype}, {format_bytes(data.tokens * DTYPES[data.header.dtype].itemsize)}",
        "vocabulary": f"{data.vocab:,}",
        "tokenizer": data.tokenizer[: len("sha256:") + 12],
        "shortest": f"{found.least:,}",
        "median": f"{found.median:,.0f}",
        "mean": f"{found.mean:,.0f}",
        "90 % are up to": f"{found.p90:,.0f}",
        "99 % are up to": f"{found.p99:,.0f}",
        "longest": f"{found.most:,}",
    }
    drawn = Table(show_header=False)
    drawn.add_column()
    drawn.add_column(justify="right")
    for name, value in rows.items():
        drawn.add_row(name, value)
    return drawn


def context_table(data: TokenFile, contexts: Sequence[int]) -> Table:
    """Return a table with a row for each context length."""
    drawn = Table("context", "documents whole", "cut", "tokens in documents at least as long", "left if cut")
    for column in drawn.columns:
        column.justify = "right"
    for row in keep(data, contexts):
        shares = (f"{100 * share:.1f} %" for share in (row.as_long, row.first_part))
        drawn.add_row(format_tokens(row.tokens), f"{row.whole:,}", f"{row.cut:,}", *shares)
    return drawn


def histogram(data: TokenFile) -> tuple[np.ndarray, np.ndarray]:
    """Return edges a factor of √2 apart, and the tokens in documents from each edge to below the next."""
    lengths = np.diff(data.bounds())
    low, high = (int(np.floor(2 * np.log2(length))) for length in (lengths.min(), lengths.max()))
    edges = 2.0 ** (np.arange(low, high + 2) / 2)
    held, _ = np.histogram(lengths, edges, weights=lengths)
    return edges, held


def draw(data: TokenFile, picture: Path) -> None:
    """Draw the histogram, and what context lengths keep, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    lengths, contexts = figure.subplots(2, 1, sharex=True)
    edges, held = histogram(data)
    lengths.stairs(held, edges, fill=True)
    lengths.set_xscale("log", base=2)
    lengths.xaxis.set_major_formatter(lambda value, _: format_tokens(round(value)))
    lengths.set_ylabel("tokens in all documents of that length")
    lengths.set_title(
        f"{data.path.name if data.path else 'in memory'}: {data.tokens:,} tokens, {data.documents:,} documents"
    )
    _draw_contexts(contexts, data, edges)
    try:
        figure.savefig(picture, format="png", dpi=150)
    except OSError as problem:
        raise DataError(f"--picture '{picture}' cannot be written ({problem.strerror}): name another file") from None


def _draw_contexts(axes: Any, data: TokenFile, edges: np.ndarray) -> None:
    kept = keep(data, [int(np.ceil(edge)) for edge in edges])
    axes.plot(edges, [100 * row.whole / data.documents for row in kept], label="documents whole")
    axes.plot(edges, [100 * row.as_long for row in kept], label="tokens in documents at least as long")
    axes.plot(edges, [100 * row.first_part for row in kept], label="tokens left if cut to this length")
    axes.set_xlabel("tokens in a document, or in a context")
    axes.set_ylabel("%")
    axes.legend()
