"""Lengths against numpy, the table and the picture."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ithaca.base.errors import DataError
from ithaca.data.preparation.prepare import prepare
from ithaca.data.reader import TokenFile, in_memory, open_tokens
from ithaca.data.stats import CONTEXTS, context_table, draw, histogram, keep, measure, table


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


def test_what_a_context_keeps(data: TokenFile) -> None:
    lengths = np.diff(data.bounds()).tolist()
    assert [row.tokens for row in keep(data, CONTEXTS)] == [4096 * 2**double for double in range(9)]
    for row in keep(data, (*CONTEXTS, 3)):
        assert row.whole == sum(length <= row.tokens for length in lengths)
        assert row.cut == sum(length > row.tokens for length in lengths)
        assert row.as_long == pytest.approx(sum(length for length in lengths if length >= row.tokens) / data.tokens)
        assert row.first_part == pytest.approx(sum(min(length, row.tokens) for length in lengths) / data.tokens)


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
    console = Console(file=said, width=100)
    console.print(table(data))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.getvalue().splitlines() if "│" in line]
    found = dict(rows)
    assert found["documents"] == "507"
    assert found["longest"] == "3,145,728"
    assert found["in the loss"] == f"{data.tokens - 507:,} ({100 * (data.tokens - 507) / data.tokens:.1f} %)"
    said.truncate(0)
    console.print(context_table(data, (1 << 20,)))
    row = [cell.strip() for line in said.getvalue().splitlines() if "1M" in line for cell in line.split("│")[1:-1]]
    (kept,) = keep(data, (1 << 20,))
    assert row == ["1M", "506", "1", f"{100 * kept.as_long:.1f} %", f"{100 * kept.first_part:.1f} %"]


def test_learned_share_is_that_of_the_mask(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "12345", "completion": "678"}\n{"text": "12"}')
    prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    said = io.StringIO()
    Console(file=said, width=100).print(table(open_tokens(tmp_path / "out")))
    assert "4 (40.0 %)" in said.getvalue()  # 3 of a completion, and the second token of a text


def test_picture(data: TokenFile, tmp_path: Path) -> None:
    draw(data, tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"none/p.png' cannot be written \(No such file or directory\): name another"):
        draw(data, tmp_path / "none" / "p.png")


def test_picture_of_one_document(tmp_path: Path) -> None:
    draw(in_memory(np.zeros(1, np.uint8), np.array([0, 1])), tmp_path / "picture")
    assert (tmp_path / "picture").exists()
