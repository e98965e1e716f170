"""The claims about GPUs: their commands exist, their figures are read rightly, and a run of them can be continued."""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import claims
from bench.claims import Claim, Figure, Found, Store, run_claim, run_claims
from bench.claims_table import (
    CLAIMS,
    ENDED,
    chunk_curve,
    disk,
    documents,
    kernels_of_steps,
    kv_on_the_host,
    looks_far,
    losses_of_ranks,
    of_liger,
    of_tests,
    over_bare,
    peak,
    picked_plans,
    rank_of_8,
    results,
    small_steps,
    tensor_rungs,
)
from bench.digest import changed_since, digest
from ithaca.cli import app

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
NOT_FOUND = "neither a benchmark nor a command nor tests"


class Parsed(Exception):
    """The options of a command were accepted."""


def check_options(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error if the program does not know the options of a command line."""
    if words[:2] == ["-m", "pytest"]:
        assert all(Path(word).exists() for word in words if word.startswith("tests/"))
    elif words[:2] == ["-m", "ithaca"]:
        command: Any = typer.main.get_command(app)
        rest = list(words[2:])
        while hasattr(command, "commands"):
            command = command.commands[rest.pop(0)]
        command.make_context("ithaca", rest)
    else:
        assert words[0] == "-m"
        assert words[1].startswith("bench."), NOT_FOUND
        parse = argparse.ArgumentParser.parse_args

        def stop(parser: argparse.ArgumentParser) -> None:
            parse(parser)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        monkeypatch.setattr(sys, "argv", ["bench", *words[2:]])
        with pytest.raises(Parsed):
            importlib.import_module(words[1]).main()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_the_command_of_a_claim_is_one(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(claim.command.split(" > ")[0].format(out="out"))
    assert words[0] == "python"
    check_options(words[1:], monkeypatch)
    assert set(claim.needs) <= set(claims.NEEDS)


def test_a_wrong_option_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        check_options(["-m", "bench.block", "--tokns", "1M"], monkeypatch)
    with pytest.raises(Exception, match="--tokns"):
        check_options(["-m", "ithaca", "rehearse", "tiny", "--tokns", "1M"], monkeypatch)


def test_names_are_unique() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def values(figures: Sequence[Figure]) -> list[float]:
    return [round(figure.value, 3) for figure in figures]


STORED: dict[str, tuple[Callable[[list[dict[str, Any]]], Sequence[Figure]], list[float], bool]] = {
    # What the log and README say of these files
    "block-llama3-8b-2M-kv": (kv_on_the_host, [0.05, 1.0], True),
    "block-llama3-8b-5M-device": (lambda rows: [peak(rows[0], 26), over_bare(rows[0], 1.03)], [23.033, 1.017], True),
    "chunks-llama3-8b-1M-8-cudnn": (chunk_curve, [12, 1.23], True),
    "step-llama3-8b-1-layers-1M": (kernels_of_steps(1.05, 53), [1.103, 0.539], True),
    "step-llama3-8b-128K": (kernels_of_steps(1.06), [1.074, 0.471], True),
    "kernels-rates-documents": (documents, [1.102, 1.077, 1.861, 1.014], True),
    "operations-smollm2-135m-64K": (small_steps, [0.371, 4571, 0, 276266.638], True),
    "disk-llama3.2-1b-256K": (disk, [0.392, 0], True),
    "recipes-graphs": (picked_plans, [10, 1.0, 12.299, 10.693], False),
}


@pytest.mark.parametrize("name", STORED)
def test_figures_of_stored_results(name: str) -> None:
    read, wanted, holds = STORED[name]
    figures = read(results(RESULTS, name))
    assert values(figures) == pytest.approx(wanted, rel=1e-4)
    assert all(figure.holds for figure in figures) is holds


def test_a_rank_of_8_is_compared_at_its_longest_context() -> None:
    sizes = ((2**18, 9.0, 1.5), (2**21, 20.0, 1.03), (2**18, 9.0, 1.5), (2**21, 23.0, 1.06))
    rows = [{"tokens": tokens, "seconds": seconds, "over_bare": bare} for tokens, seconds, bare in sizes]
    assert values(rank_of_8(rows)) == [1.15, 1.03]


def test_the_tensor_rungs_of_the_stored_ladder(tmp_path: Path) -> None:
    (tmp_path / "tensor").symlink_to(RESULTS)
    assert values(tensor_rungs(tmp_path)) == [3, 1.563, 8.053]


def test_short_contexts_beside_liger(tmp_path: Path) -> None:
    """Theirs is the faster side with Liger of those that ran: with checkpointing, or without."""
    sides = ("Ithaca, planned", "+ Liger", "transformers + Liger, nothing checkpointed")
    times = {"8K": (0.15, 0.2, 0.16), "32K": (0.9, 0.9, 1.0), "64K": (2.7, 2.6, None)}
    rows = [
        {"name": f"{tokens} round 1: {side}", "answer": {"ran": seconds is not None, "seconds": seconds}}
        for tokens, taken in times.items()
        for side, seconds in zip(sides, taken, strict=True)
    ]
    rows.append({"name": "8K round 1: + Liger, tiled MLP, host offload", "answer": {"ran": False}})
    claim = of_liger("llama3-8b", 4)
    (out,) = re.findall(r"--out \{out\}/(\S+)", claim.command)
    (tmp_path / out).mkdir()
    file = tmp_path / out / "peers-llama3-8b-4-layers-best.json"
    file.write_text(json.dumps({"rows": rows}))
    figures = claim.read(tmp_path)
    assert values(figures) == pytest.approx([1.067, 1.0, 0.963], abs=1e-3)
    assert [figure.holds for figure in figures] == [True, True, False]
    rows[2]["answer"] = None  # an error, which says nothing of a side
    file.write_text(json.dumps({"rows": rows}))
    with pytest.raises(TypeError):
        claim.read(tmp_path)


def test_a_result_with_an_error_is_no_result(tmp_path: Path) -> None:
    rows = [{"point": "a", "seconds": 1}, {"point": "b", "error": "out of memory"}]
    (tmp_path / "x.json").write_text(json.dumps({"results": rows}))
    with pytest.raises(ValueError, match="out of memory"):
        results(tmp_path, "x")


def test_tests_that_were_all_skipped_prove_nothing(tmp_path: Path) -> None:
    claim = of_tests("some tests", "tests/x.py", 1, passed=3)
    (file,) = re.findall(r"\S+\.xml", claim.command)
    for counts, holds in (("5 0 0 2", True), ("5 0 0 3", False), ("5 1 0 0", False), ("5 0 1 0", False)):
        words = zip(("tests", "failures", "errors", "skipped"), counts.split(), strict=True)
        suite = "<testsuite " + " ".join(f'{name}="{count}"' for name, count in words) + "/>"
        (tmp_path / file.split("/")[-1]).write_text(f"<testsuites>{suite}</testsuites>")
        assert all(figure.holds for figure in claim.read(tmp_path)) is holds


def test_a_figure_that_is_not_a_number_does_not_hold() -> None:
    assert not Figure("speed", float("nan"), most=1).holds
    assert not Figure("speed", float("nan"), least=1).holds
    assert Figure("speed", 1.0, least=1, most=1).holds
    assert Figure("speed", 1.0, least=1, most=2).bound == "≥ 1 ≤ 2"


def python(program: str) -> str:
    return f"python -c {shlex.quote(program)}"


def make_claim(name: str, program: str, value: float = 1.0, **more: Any) -> Claim:
    return Claim(name, python(program), 0.0, lambda _: [Figure("x", value, most=1)], **more)


def test_claims_are_run_stored_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "out").mkdir()
    count = tmp_path / "count"
    some = [
        make_claim("good", f"open({str(count)!r}, 'a').write('x')"),
        make_claim("outside", "pass", 2.0),
        make_claim("broken", "raise SystemExit('no such option')"),
        make_claim("together", "pass", timed=False),
        Claim("elsewhere", "true", 0.0, lambda _: [], needs=("gpu",)),
        Claim("long", "true", 1e9, lambda _: []),
        Claim("unread", "true", 0.0, lambda out: [Figure("x", json.loads((out / "no").read_text()))]),
    ]
    store = Store(tmp_path / "out")
    run_claims(some, store, tmp_path / "out", "abc", "digest", "CPU", 1000.0)
    said = capsys.readouterr().out
    assert "good: holds" in said
    assert "outside: DOES NOT HOLD" in said
    assert "<- outside" in said
    assert "no such option" in said
    assert "elsewhere: not run, no CUDA device" in said
    assert "long: not run, it takes about 1000000000 s" in said
    assert "its results cannot be read: FileNotFoundError" in said
    stored = Store(tmp_path / "out").found
    assert {name: found.holds for name, found in stored.items()} == {
        "together": True, "good": True, "outside": False, "broken": False, "unread": False,
    }  # fmt: skip
    assert stored["good"].commit == "abc"
    assert stored["good"].answers(some[0], "digest")
    assert not stored["good"].answers(some[0], "other code")
    assert not stored["good"].answers(replace(some[0], command="another"), "digest")


def test_a_claim_does_not_continue_an_older_run(tmp_path: Path) -> None:
    """Results are replaced by a run that ends well; those of one that fails lie elsewhere."""
    program = "import os, sys; open('{out}/x', 'x').write('new'); os.makedirs('{out}/y'); sys.exit({code})"
    for code, kept in (("0", "new"), ("1", "old")):
        (tmp_path / "x").write_text("old")
        (tmp_path / "y").mkdir(exist_ok=True)
        (tmp_path / "y" / "old").touch()
        run_claim(make_claim("some", program.replace("{code}", code)), tmp_path, "abc", "digest", "CPU", 60.0)
        assert (tmp_path / "x").read_text() == kept
        assert (tmp_path / "y" / "old").exists() is (kept == "old")
    assert (tmp_path / "failed" / "x").read_text() == "new"


def test_a_command_that_takes_too_long_ends_with_its_processes(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    inner = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    found = run_claim(make_claim("slow", program), tmp_path, "abc", "digest", "CPU", 0.5)
    assert found.error is not None
    assert found.error.startswith("not at its end after 0 s")
    assert not found.holds


def test_a_command_that_is_cut_short_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its older result stays, and the next call runs it."""
    claim, store = make_claim("slow", "import time; time.sleep(60)"), Store(tmp_path)
    run_claims([claim], store, tmp_path, "abc", "digest", "CPU", 1.0)
    assert store.found == {}
    assert "slow: not stored" in capsys.readouterr().out


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["claims", *words, "--out", str(tmp_path), "--commit", "abc"])
        claims.main()

    run("--list", "--only", "5M tokens, K and V on")
    said = capsys.readouterr().out
    assert "not run" in said
    assert "bench.block --tokens 5M" in said
    with pytest.raises(SystemExit, match="no claim has xyz in its name"):
        run("--only", "xyz")
    (claim,) = (claim for claim in CLAIMS if claim.name == "5M tokens, K and V on the device")
    code = digest(ROOT / "ithaca")
    found = Found(claim.name, claim.command, "abc", code, "H200", 1.0, [vars(Figure("x", 1.0, most=2))], None)
    Store(tmp_path).add(found)
    run("--only", claim.name)  # seen with this code, so that it asks for no GPU
    said = capsys.readouterr().out
    assert "not run" not in said
    assert f"1 of {len(CLAIMS)} claims hold with this code ({code})" in said
    run("--only", claim.name, "--again")
    assert "not run, no CUDA device" in capsys.readouterr().out
    run("--list", "--only", claim.name)
    assert "holds at abc\n" in capsys.readouterr().out
    Store(tmp_path).add(replace(found, code="older"))
    run("--only", claim.name)
    assert "not run, no CUDA device" in capsys.readouterr().out
    run("--list", "--only", claim.name)
    assert "holds at abc, with other code\n" in capsys.readouterr().out  # this tree has no such commit
    Store(tmp_path).add(replace(found, error="exit code 1"))
    with pytest.raises(SystemExit):
        run("--only", claim.name)


def test_a_digest_is_of_the_code_alone(tmp_path: Path) -> None:
    function = 'def f():\n    """Two\n    lines."""\n    return X\n'
    source = f'"""About it."""\n\nX = "# no comment"  # a number\n"""Of X."""\n\n\n{function}'
    file = tmp_path / "a.py"

    def of(text: str) -> str:
        file.write_text(text)
        return digest(tmp_path)

    first = of(source)
    for old, new in (("About it", "Of it"), ("a number", "a text"), ("Two\n", "Three\n    more\n"), ("\n\n\n", "\n")):
        assert old in source
        assert of(source.replace(old, new)) == first
    for old, new in (("no comment", "a comment"), ("return X", "return 1"), ("def f", "def g")):
        assert of(source.replace(old, new)) != first
    (tmp_path / "rates.toml").write_text("a = 1")
    assert digest(tmp_path) != first


def test_files_that_changed_since_a_claim_was_seen(tmp_path: Path) -> None:
    """Those whose code changed, came or went; not those of other folders, nor new words about the same code."""

    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        said = subprocess.run(["git", *names, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return said.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    for name in ("same", "words", "code", "gone", "moved"):
        (package / f"{name}.py").write_text(f'"""About it."""\n\nX = "{name}"\n')
    (tmp_path / "other.py").write_text("X = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "--short=7", "HEAD")
    assert changed_since(package, first) == []
    (package / "words.py").write_text('X = "words"  # a word\n')
    (package / "code.py").write_text('X = "other"\n')
    (package / "gone.py").unlink()
    (package / "moved.py").rename(package / "there.py")
    (tmp_path / "other.py").write_text("X = 2\n")
    git("add", ".")
    git("commit", "-qm", "second")
    (package / "rates.toml").write_text("a = 1\n")
    git("add", ".")
    assert changed_since(package, first) == ["code.py", "gone.py", "moved.py", "rates.toml", "there.py"]
    assert changed_since(package, "0000000") is None


def test_numbers_that_tests_print(tmp_path: Path) -> None:
    claim = of_tests("deaths", "tests/x.py", 1, 2, printed=(ENDED,))
    (file,) = re.findall(r"\S+\.xml", claim.command)
    said = "".join(
        f"<testcase><system-out>4 ranks: the others ended {seconds} s later</system-out></testcase>"
        for seconds in (6.4, 26.5)
    )
    (tmp_path / file.split("/")[-1]).write_text(f'<testsuites><testsuite tests="2">{said}</testsuite></testsuites>')
    assert values(claim.read(tmp_path)) == [2, 0, 26.5]


def test_every_test_is_in_one_share() -> None:
    def collected(share: str) -> list[str]:
        words = ["-m", "pytest", "--collect-only", "-qq", "-o", "addopts=", "-m", "nccl", "--share", share]
        words += ["-p", "no:cacheprovider", "tests/train/test_nccl.py", "-v"]
        said = subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return re.findall(r"^tests/.*::.*$", said, re.MULTILINE)

    every, parts = collected("1/1"), [collected(f"{number}/3") for number in (1, 2, 3)]
    assert len(every) > 5
    assert sorted(name for part in parts for name in part) == sorted(every)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.full
def test_losses_of_four_ranks_and_of_one(tmp_path: Path) -> None:
    words = ["-m", "bench.shared_ranks", "--smoke", "--out", str(tmp_path), "--commit", "none"]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    (row,) = results(tmp_path, "shared-ranks-smoke")
    assert len(row["several"]["losses"]) == len(row["one"]["losses"]) == 4
    assert row["largest_difference"] < 1e-5
    assert values(losses_of_ranks([row]))[0] == 4


@pytest.mark.full
def test_a_model_that_learns_to_look_far(tmp_path: Path) -> None:
    """The small form, stopped after its first seconds and continued by the same command."""
    words = [
        "-m",
        "bench.longer",
        "--smoke",
        "--out",
        str(tmp_path),
        "--commit",
        "none",
        "--folder",
        str(tmp_path / "f"),
    ]

    def measured() -> dict[str, Any]:
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
        return results(tmp_path, "longer-smoke")[0]

    row = measured()
    assert row["finished"]
    assert [stage["tokens"] for stage in row["stages"]] == [64, 128, 256, 512, 1024]
    assert [stage["steps"] for stage in row["stages"]] == [2] * 5
    assert all(stage["seconds"] > 0 for stage in row["stages"])
    assert [len(stage["needles"]) for stage in row["stages"]] == [0, 0, 1, 2, 2]
    assert {task["task"] for task in row["harder"]["tasks"]} == {"keys", "tracking"}
    for picture in ("loss", "needle"):
        assert (tmp_path / f"longer-smoke-{picture}.png").stat().st_size > 1000
    assert measured()["stages"] == row["stages"]  # nothing is trained twice
    figures = looks_far([row])
    assert [figure.holds for figure in figures] == [True, False]


def test_needles_are_found_at_the_lengths_that_were_promised() -> None:
    stage = {"needles": {"2048": 1.0, "65536": 0.92, "262144": 0.4}}
    found = looks_far([{"finished": True, "stages": [{"needles": {}}, stage]}])
    assert values(found) == [1, 0.92]
    assert all(figure.holds for figure in found)
    assert not looks_far([{"finished": False, "stages": [stage]}])[0].holds
    near = {"needles": {"2048": 1.0, "16384": 1.0}}
    assert not looks_far([{"finished": True, "stages": [stage, near]}])[1].holds
