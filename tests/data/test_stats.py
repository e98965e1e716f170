"""Lengths against numpy, the table and the picture."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.data.reader import TokenFile, in_memory
from ithaca.data.stats import draw, histogram, measure, table


@pytest.fixture(scope="module")
def data() -> TokenFile:
    chance = np.random.default_rng(0)
    lengths = np.concatenate([2 ** chance.integers(0, 16, 500), [4095, 4096, 32768, 131071, 131072, 1 << 20, 3 << 20]])
    bounds = np.cumsum([0, *lengths])
    return in_memory(np.zeros(bounds[-1], np.uint8), bounds, tokenizer="bytes", vocab=256)


def test_measure(data: TokenFile) -> None:
    found = measure(data)
    lengths = np.diff(data.bounds())
    assert (found.documents, found.tokens) == (507, data.tokens)
    assert (found.least, found.most) == (lengths.min(), lengths.max())
    assert found.mean == pytest.approx(np.mean(lengths))
    assert [found.median, found.p90, found.p99] == [np.quantile(lengths, share) for share in (0.5, 0.9, 0.99)]
    for long, share in zip((4096, 32768, 131072, 1048576), found.shares, strict=True):
        assert share == pytest.approx(sum(length for length in lengths.tolist() if length >= long) / lengths.sum())


def test_histogram_holds_all_tokens(data: TokenFile) -> None:
    edges, held = histogram(data)
    lengths = np.diff(data.bounds())
    assert held.sum() == data.tokens
    assert edges[0] <= lengths.min()
    assert edges[-1] > lengths.max()
    for low, high, tokens in zip(edges[:-1], edges[1:], held, strict=True):
        assert tokens == lengths[(lengths >= low) & (lengths < high)].sum()


def test_table(data: TokenFile) -> None:
    said = io.StringIO()
    Console(file=said, width=80).print(table(data))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.getvalue().splitlines() if "│" in line]
    found = dict(rows)
    assert found["documents"] == "507"
    assert found["longest"] == "3,145,728"
    assert found["tokens in documents of 1M or more"] == f"{100 * measure(data).shares[3]:.1f} %"


def test_picture(data: TokenFile, tmp_path: Path) -> None:
    draw(data, tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"none/p.png' cannot be written \(No such file or directory\): name another"):
        draw(data, tmp_path / "none" / "p.png")


def test_picture_of_one_document(tmp_path: Path) -> None:
    draw(in_memory(np.zeros(1, np.uint8), np.array([0, 1])), tmp_path / "picture")
    assert (tmp_path / "picture").exists()
