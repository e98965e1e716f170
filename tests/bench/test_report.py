"""Pages regenerate identically from what is stored, and say of every figure what it is."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from ithaca.base.errors import ConfigError
from ithaca.bench import origin, tasks
from ithaca.bench.readme import BEGIN, END, with_block
from ithaca.bench.report import make_report, write_report
from ithaca.bench.rows import Limits
from ithaca.bench.run import Options
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
    tasks.start("ladder", "llama3-8b", Limits(), Options(out=tmp_path, predict=True, commit="c0ffee"), [])
    (file,) = tmp_path.glob("ladder-llama3-8b-*.json")
    return file


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


def test_factors_need_the_row_before_and_its_limits(stored: Path) -> None:
    page, content = make_report(stored.parent)["results.md"], json.loads(stored.read_text())
    lines = {line.split(" | ")[0][2:]: line.split(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert lines["Sweep, keep o"][2] != "–"
    names = [row["name"] for row in content["rows"]]
    before = content["rows"][names.index("Sweep, keep o") - 1]
    before["question"]["limits"]["host"] = 1
    stored.write_text(json.dumps(content))
    page = make_report(stored.parent)["results.md"]
    assert next(line for line in page.splitlines() if line.startswith("| Sweep, keep o |")).split(" | ")[2] == "–"
    content["rows"].remove(before)
    stored.write_text(json.dumps(content))
    page = make_report(stored.parent)["results.md"]
    assert next(line for line in page.splitlines() if line.startswith("| Sweep, keep o |")).split(" | ")[2] == "–"


def test_shares_are_of_the_full_stack(tmp_path: Path) -> None:
    options = Options(out=tmp_path, predict=True, commit="c0ffee", only=("without chunks", "offloaded K"))
    tasks.start("ablation", "llama3-8b", Limits(), options, [])
    page = make_report(tmp_path)["results.md"]
    assert next(line for line in page.splitlines() if line.startswith("| without chunks |")).split(" | ")[2] == "–"


def test_a_length_that_was_not_bracketed_from_above(stored: Path) -> None:
    page = change(stored, "Sweep, disk", answer={**ANSWER, "fails": None, "limit": "not reached"}, origin=ORIGIN)
    assert "| Sweep, disk | ≥ 1M |" in page


def test_another_way_to_share_begins_a_ladder_of_its_own(stored: Path) -> None:
    """Its first row has no factor over the longest context of the way before."""
    rows = [line.split(" | ") for line in make_report(stored.parent)["results.md"].splitlines()]
    factors = {cells[0]: cells[2] for cells in rows if len(cells) > 2}
    assert factors["| ZeRO-3 alone"] == "–"
    assert factors["| Tensor parallel + checkpointing"] != "–"


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


def peer(side: str, number: int, seconds: float, **more: object) -> dict[str, object]:
    question = {"side": side, "tokens": 2**18, "round": number, "layers": 2, "model": "llama3-8b", "attention": "best"}
    answer = {"ran": True, "seconds": seconds, "bytes_beside": 2**33, "mfu_causal": 0.4, "attention": "sdpa", **more}
    return {"name": f"{side} {number}", "question": question, "answer": answer, "origin": ORIGIN}


def test_a_readme_has_the_short_table_between_its_marks(stored: Path, tmp_path: Path) -> None:
    change(stored, "+ checkpointing", answer=ANSWER, origin=ORIGIN)
    rows = [peer("+ Liger", 1, 12.0), peer("Ithaca, sweep", 1, 9.0), peer("+ Liger", 2, 12.6)]
    rows += [peer("DeepSpeed ALST pieces", 1, 0.0, ran=False, why="not run: deepspeed is not here")]
    file = tmp_path / "peers-llama3-8b-2-layers-best.json"
    file.write_text(json.dumps({"bench": "peers", "model": "llama3-8b", "rows": rows}))
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    write_report(tmp_path, tmp_path / "docs" / "results.md", readme)
    text = readme.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert "old" not in text
    assert "| + checkpointing | 1M | – | 819 |" in text
    assert re.search(r"^\| FPDT \| \*\d+[KM]\* \| 4M \| \*\d+\* \|$", text, re.MULTILINE)
    assert "| + Liger | 256K | 12.3 | 8 GiB | 1.37 |" in text
    assert "ALST pieces |" not in text
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "| 256K | + Liger | 12.3 s | 8 GiB | 40.0 % | sdpa |" in page
    assert "| 256K | DeepSpeed ALST pieces | not run: deepspeed is not here |" in page
    write_report(tmp_path, tmp_path / "docs" / "results.md", readme)
    assert readme.read_text() == text


def test_a_readme_without_marks_is_refused(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(ConfigError, match="has no place for the table: write <!-- ithaca bench: begin -->"):
        write_report(stored.parent, tmp_path / "results.md", tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text() == "# Title\n"


def test_our_readme_is_what_the_stored_results_give() -> None:
    """As soon as it has the marks. If this fails: ithaca bench report --readme README.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if BEGIN in text:
        assert with_block(ROOT / "README.md", RESULTS, Path("docs/results.md")) == text


def test_a_damaged_file_of_results_is_said(stored: Path) -> None:
    stored.write_text("<<<<<<< ours\n" + stored.read_text())
    with pytest.raises(ConfigError, match=f"'{stored}' holds no results of ithaca bench: move it away"):
        make_report(stored.parent)


def test_results_without_rows_are_left_out(stored: Path) -> None:
    page = make_report(stored.parent)
    (stored.parent / "dial-tiny-8x80GB.json").write_text('{"bench": "dial", "model": "tiny", "rows": []}')
    assert make_report(stored.parent) == page


def test_pictures_of_others_stay(stored: Path, tmp_path: Path) -> None:
    """Only those that the old page shows are deleted."""
    page, old, theirs = tmp_path / "notes.md", tmp_path / "notes-ladder-old.svg", tmp_path / "notes-diagram.svg"
    page.write_text("![An old ladder](notes-ladder-old.svg)\n")
    for picture in (old, theirs):
        picture.write_text("<svg/>")
    write_report(stored.parent, page)
    assert theirs.exists()
    assert not old.exists()


def test_the_commit_of_another_repository_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ithaca is installed in a virtual environment inside of its user's repository."""
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "lib" / "ithaca" / "bench" / "origin.py"))
    (tmp_path / "lib" / "ithaca" / "bench").mkdir(parents=True)
    (tmp_path / "lib" / "ithaca" / "bench" / "origin.py").touch()
    user = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), (*user, "commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert origin.commit() == "unknown"
