"""Pages regenerate identically from what is stored, and say of every figure what it is."""

import json
import shutil
from pathlib import Path

import pytest

from ithaca.bench.report import make_report
from ithaca.bench.store import Stored, read_results

ROOT = Path(__file__).parent.parent.parent
RESULTS, DOCS = ROOT / "bench" / "results", ROOT / "docs"


def test_the_page_is_what_the_stored_results_give() -> None:
    """If this fails: ithaca bench report."""
    files = make_report(RESULTS)
    there = {path.name for path in DOCS.glob("results*")}
    assert there == {*files}
    for name, content in files.items():
        assert (DOCS / name).read_text(encoding="utf-8") == content, name


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A ladder of predictions."""
    (file,) = RESULTS.glob("ladder-llama3-8b-*.json")
    return Path(shutil.copy(file, tmp_path))


def change(file: Path, name: str, **fields: object) -> str:
    """The page after a row has changed."""
    content = json.loads(file.read_text())
    (row,) = [row for row in content["rows"] if row["name"] == name]
    row.update(fields)
    file.write_text(json.dumps(content))
    return make_report(file.parent)["results.md"]


MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "cudnn": 91900}
ORIGIN = {"machine": MACHINE, "commit": "c0ffee", "command": "ithaca bench ladder"}
ANSWER = {
    "longest": 2**20,
    "fails": 2**20 + 2**16,
    "predicted": 2**20,
    "limit": "GPU",
    "peak_bytes": 2**36,
    "timed": 2**19,
    "seconds": 80.0,
    "tokens_per_second_per_gpu": 819.2,
    "mfu_causal": 0.4321,
}


def test_what_is_measured_is_not_in_italics(stored: Path) -> None:
    page = change(stored, "+ checkpointing", answer=ANSWER, origin=ORIGIN)
    (line,) = [line for line in page.splitlines() if line.startswith("| + checkpointing |")]
    assert line.startswith("| + checkpointing | 1M, 1088K | – | 64 GiB | GPU | 512K | 819 | 43.2 % |")
    assert "measured on NVIDIA H200, torch 2.11.0, cudnn 91900, commit c0ffee, `ithaca bench ladder`." in page


def test_factors_are_taken_between_rows_of_one_kind(stored: Path) -> None:
    change(stored, "Ulysses + ZeRO-3", answer={**ANSWER, "longest": 2**17}, origin=ORIGIN)
    page = change(stored, "+ checkpointing", answer=ANSWER, origin=ORIGIN)
    lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert lines["+ checkpointing"][2] == "8.00"
    assert lines["Ulysses + ZeRO-3"][2] == "–"  # the row before it is predicted


def test_a_length_that_was_not_bracketed_from_above(stored: Path) -> None:
    page = change(stored, "Sweep, disk", answer={**ANSWER, "fails": None, "limit": "not reached"}, origin=ORIGIN)
    assert "| Sweep, disk | ≥ 1M |" in page


def test_quoted_rows_say_so(stored: Path) -> None:
    page = make_report(stored.parent)["results.md"]
    assert "| Tensor parallel | – | – | – | – | – | – | – | 32K, 64.3 GB, MFU 9.4 % |" in page
    assert "Only quoted: Tensor parallel, " in page


def test_other_files_are_passed_over(stored: Path) -> None:
    before = make_report(stored.parent)
    (stored.parent / "block.json").write_text('{"results": []}')
    (stored.parent / "broken.json").write_text("{")
    assert make_report(stored.parent) == before


def test_every_stored_row_can_be_read() -> None:
    for file in RESULTS.glob("*.json"):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and "bench" in content:
            rows = read_results(file)[1]
            assert rows
            assert all(isinstance(row, Stored) and row.origin["commit"] for row in rows if row.predicted or row.answer)
