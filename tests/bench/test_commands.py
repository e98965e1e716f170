"""Every benchmark runs on a CPU at the size of `tiny`, by the meter's peak under a small cap, and its page is made."""

import json
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ithaca.bench import ask
from ithaca.bench.commands import bench
from ithaca.bench.report import make_report
from ithaca.bench.store import Stored, read_results
from ithaca.cli import main
from tests.nursery import Ended, Nursery

SMALL = ["--ranks", "4", "--cap", "30MB", "--host", "1GB"]


def command(words: list[str], folder: Path) -> None:
    """`ithaca bench …` whose measurements are forked from this process, which has torch."""
    os.chdir(folder)
    ask.context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["ithaca", "bench", *words]
    main()


def measured(nursery: Nursery, folder: Path, *words: str) -> dict[str, Stored]:
    end = nursery.job(command, [*words, "--out", "out", "--commit", "c0ffee"], folder)[0]
    assert end.code == 0, end.err
    (file,) = (folder / "out").glob("*.json")
    return {row.name: row for row in read_results(file)[1]}


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def answer(row: Stored) -> dict[str, Any]:
    assert row.error is None
    assert row.answer is not None
    return row.answer


def test_ladder(nursery: Nursery, tmp_path: Path) -> None:
    """Lengths were tried on both sides of the cap, and the page shows them."""
    names = ["Tensor parallel + checkpointing", "Tensor parallel + checkpointing + offload"]
    names += ["ZeRO-3 alone", "Ulysses + ZeRO-3", "+ checkpointing", "Sweep, disk"]
    words = ["ladder", "tiny", *SMALL, "--most", "16K", "--tokens", "512", *only(*names)]
    rows = measured(nursery, tmp_path, *words)
    found = {name: answer(row) for name, row in rows.items()}
    assert [*found] == names
    for each in found.values():
        assert each["peak_bytes"] <= 30e6
        assert each["longest"] < each["fails"]
        assert each["seconds"] > 0
        assert each["limit"] == "GPU"
        assert each["mfu_causal"] is None
    assert found["Ulysses + ZeRO-3"]["longest"] > found["ZeRO-3 alone"]["longest"]
    assert found["+ checkpointing"]["longest"] > found["Ulysses + ZeRO-3"]["longest"]
    assert found[names[1]]["longest"] >= found[names[0]]["longest"]  # a bracket of a cap of 30 MB is coarse
    origin = rows["Sweep, disk"].origin
    assert (origin["commit"], origin["machine"]["on_cpu"]) == ("c0ffee", True)
    assert shlex.split(origin["command"]) == ["ithaca", "bench", *words]
    page = make_report(tmp_path / "out")
    assert f"| + checkpointing | {found['+ checkpointing']['longest']}, " in page["results.md"].replace("K", "")
    assert [*page] == ["results.md", "results-ladder-tiny-4x30MB.svg"]


def test_ablation(nursery: Nursery, tmp_path: Path) -> None:
    some = only("full stack", "block inputs", "context")
    rows = measured(nursery, tmp_path, "ablation", "tiny", *SMALL, "--most", "4K", *some)
    assert len(rows) == 3
    assert answer(rows["without context parallelism"])["longest"] < answer(rows["full stack"])["longest"]
    assert "seconds" not in answer(rows["full stack"])


def test_context_parallel(nursery: Nursery, tmp_path: Path) -> None:
    """Without it, the longer of two lengths does not fit; with it, it does."""
    words = ["context-parallel", "tiny", *SMALL, "--tokens", "256,1K"]
    rows = measured(nursery, tmp_path, *words)
    assert [*rows] == ["256 without", "256 with", "1K without", "1K with"]
    assert [answer(row)["fits"] for row in rows.values()] == [True, True, False, True]
    assert answer(rows["256 without"])["plan"]["recipe"] == "dense"
    assert answer(rows["256 with"])["peak_bytes"] < answer(rows["256 without"])["peak_bytes"]


def test_dial(nursery: Nursery, tmp_path: Path) -> None:
    rows = measured(nursery, tmp_path, "dial", "tiny", "--ranks", "4", "--tokens", "1K")
    assert [*rows] == ["1K chunk 1K", "1K heads 4", "1K heads 8"]
    for row in rows.values():
        assert answer(row)["fits"]
        assert row.predicted
        assert {*row.predicted["gpus"]} == {"A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB"}
        assert row.predicted["gpus"]["H100-80GB"]["seconds"] > 0


def test_recompute(nursery: Nursery, tmp_path: Path) -> None:
    words = ["recompute", "tiny", "--ranks", "4", "--tokens", "2K", "--cap", "1GB", *only("none", "full", "keep o")]
    rows = measured(nursery, tmp_path, *words)
    none, full = (answer(rows[f"2K {name}"]) for name in ("none", "full"))
    assert none["peak_bytes"] > 1.4 * full["peak_bytes"]
    assert none["layers_timed"] == [1, 2]
    assert answer(rows["2K sweep, keep o"])["layers_timed"] == [2, 4]


def test_a_step_of_all_layers_is_that_of_few_with_the_missing_ones_added(nursery: Nursery, tmp_path: Path) -> None:
    rows = measured(nursery, tmp_path, "recompute", "tiny", "--ranks", "2", "--tokens", "1K", "--only", "selective")
    found = answer(rows["1K selective"])
    (few, more), (fewer, most) = found["seconds_timed"], found["layers_timed"]
    if more > few:
        assert found["layer_seconds"] == pytest.approx((more - few) / (most - fewer))
    assert found["seconds"] == pytest.approx(more + 2 * found["layer_seconds"])
    assert found["tokens_per_second_per_gpu"] == pytest.approx(1024 / found["seconds"] / 2)


def ended(nursery: Nursery, folder: Path, *words: str) -> Ended:
    return nursery.job(command, [*words], folder)[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ladder", "no-such-model"], "'no-such-model'"),
        (["ladder", "tiny", "--cap", "much"], "--cap: 'much' is not a number of bytes"),
        (["dial", "tiny", "--tokens", "1K,x"], "--tokens: 'x' is not a number of tokens"),
        (["peers", "tiny", "--rounds", "0"], "--rounds 0 measures nothing: give 1 or more"),
        (["peers", "tiny", "--layers", "9"], "--layers 9 cannot be run: 'tiny' has 4, so 1 to 4 can"),
        (["peers", "tiny", "--path", "nowhere"], "--path nowhere is not a folder"),
        (["report", "empty"], "'empty' has no results of ithaca bench: run one first"),
        (["ladder", "--nonsense"], "--nonsense"),
    ],
)
def test_refused(nursery: Nursery, tmp_path: Path, words: list[str], sentence: str) -> None:
    end = ended(nursery, tmp_path, *words)
    assert end.code == 2
    assert end.err.startswith("error: ")
    assert len(end.err.strip().splitlines()) == 1, end.err
    assert sentence in end.err
    assert not any(tmp_path.iterdir())


def test_no_command_has_more_than_ten_options() -> None:
    for name, found in typer.main.get_command(bench).commands.items():  # pyrefly: ignore
        options = [item for item in found.params if item.param_type_name == "option"]
        assert len(options) <= 10, name


def test_a_cap_below_what_libraries_take(nursery: Nursery, tmp_path: Path) -> None:
    """The example of docs/benchmarks.md, predicted: a CPU fits what the GPU of the prediction does not."""
    words = ["ladder", "tiny", "--ranks", "4", "--cap", "40MB", "--host", "1GB", "--tokens", "1K", "--only", "keep o"]
    end = ended(nursery, tmp_path, *words, "--predict", "--out", "out")
    assert end.code == 0, end.err
    assert end.out.startswith("Predictions are for H100-80GB, where libraries take memory")
    why = r"1K tokens take 8\d\.\d MiB, 64 MiB of it libraries; --cap is 38\.1 MiB"
    assert re.search(f"Sweep, keep o: predicted nothing fits: {why}", end.out), end.out
    ((row,),) = [json.loads(file.read_text())["rows"] for file in (tmp_path / "out").iterdir()]
    found = row["predicted"]
    assert (found["longest"], found["fails"], found["limit"], found["libraries_bytes"]) == (0, 1024, "GPU", 64 << 20)
    assert "| nothing fits |" in make_report(tmp_path / "out")["results.md"].replace("*", "")


def test_report_writes_its_files_and_removes_the_old_pictures_of_its_page(nursery: Nursery, tmp_path: Path) -> None:
    words = ["ladder", "--predict", "--commit", "c0ffee", "--out", "my out", "--only", "Sweep"]
    first = ended(nursery, tmp_path, *words)
    assert first.code == 0, first.err
    (tmp_path / "page-old.svg").touch()
    (tmp_path / "page.md").write_text("![Of an older release](page-old.svg)\n")
    printed = re.findall(r"`ithaca bench (report .*)`", first.out)[0]
    end = ended(nursery, tmp_path, *shlex.split(printed), "--out", "page.md")
    assert end.code == 0, end.err
    assert {path.name for path in tmp_path.iterdir()} == {"my out", "page.md", "page-ladder-llama3-8b-8x80GB.svg"}
    rows = json.loads((tmp_path / "my out" / "ladder-llama3-8b-8x80GB.json").read_text())["rows"]
    assert all(row["answer"] is None for row in rows)
    assert re.search(r"^\| Sweep \| \*\d+[KM]\* \|", (tmp_path / "page.md").read_text(), re.MULTILINE)
