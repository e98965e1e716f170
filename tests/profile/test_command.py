"""`ithaca profile` as a user types it: its output, its files, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.nursery import Ended, Nursery

SMALL = ("--ranks", "2", "--tokens", "256", "--layers", "1", "--set", "plan.chunk=64")


def run(nursery: Nursery, folder: Path, *words: str) -> Ended:
    return nursery.command("profile", *words, folder=folder)


def test_tables_and_files(nursery: Nursery, tmp_path: Path) -> None:
    end = run(nursery, tmp_path, "tiny", *SMALL, "--documents", "2x100+56")
    assert end.code == 0, end.err
    for title in (
        "Device memory at its peak, by owner",
        "Lanes",
        "Hidden states that each operation holds",
        "Largest tensors at the peak",
        "Documents: ",
        "made in ithaca/",
    ):
        assert title in end.out
    folder = tmp_path / "profiles" / "tiny-256-sweep"
    assert {file.name for file in folder.iterdir()} == {"profile.html", "profile.json", "trace.json"}
    assert f"Wrote {folder.relative_to(tmp_path)}/profile.html" in end.out
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in trace}
    assert {"ithaca: step", "ithaca: loopback", "aten::mm", "copy in", "copy out"} <= names
    for event in trace:
        assert event.get("ph") != "X" or event["dur"] >= 0


def test_json_and_tapes_on_the_disk(nursery: Nursery, tmp_path: Path) -> None:
    """One object on stdout; reads and writes of the disk have their lane; a profile may be written over."""
    words = [*SMALL, "--set", "plan.o=disk", "--set", f"plan.disk={tmp_path}", "--out", "out", "--json"]
    for _ in range(2):
        end = run(nursery, tmp_path, "tiny", *words)
        assert end.code == 0, end.err
    found = json.loads(end.out)
    whole = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert {key: whole[key] for key in found} == found
    assert whole.keys() - found.keys() == {"timeline", "bars", "phases"}
    assert {row["name"] for row in found["lanes"]["disk"]["longest"]} == {"disk read", "disk write"}
    assert found["lanes"]["disk"]["busy_seconds"] > 0
    assert found["peak_bytes"] == sum(found["memory"].values())
    assert found["peak_bytes_predicted"] == sum(found["memory_predicted"].values())
    for lane in found["lanes"].values():
        assert 0 <= lane["idle_share"] <= 1
    assert found["seconds"] > 0
    assert found["files"]["trace"] == "out/trace.json"


WRONG = {
    "an unknown model": (["nowhere"], "nowhere"),
    "no tokens": (["tiny", "--tokens", "none"], "--tokens: 'none' is not a number of tokens: write 4096, 64K or 5M"),
    "no ranks": (["tiny", *SMALL, "--ranks", "0"], "--ranks 0 cannot be rehearsed: give 1 or more"),
    "too many layers": (["tiny", *SMALL, "--layers", "9"], "the model has 4, so 1 to 4 can"),
    "an unknown recipe": (["tiny", *SMALL, "--recipe", "swep"], "did you mean 'sweep'?"),
    "no recipe of its own": (["tiny", "--tokens", "256", "--recipe", "auto"], "--recipe auto cannot be rehearsed"),
    "an unknown option": (["tiny", *SMALL, "--set", "plan.chunks_=3"], "plan.chunks_"),
    "an option of a run": (["tiny", *SMALL, "--set", "train.steps=3"], "--set train.steps=3 has no effect"),
    "another recipe's option": (["tiny", *SMALL, "--recipe", "dense"], "chunk"),
    "ranks and mesh": (["tiny", *SMALL, "--set", "mesh.ulysses=3"], "but --ranks is 2"),
    "wrong documents": (["tiny", *SMALL, "--documents", "3x"], "3x"),
    "no bytes": (["tiny", *SMALL, "--cap", "much"], "--cap: 'much' is not a number of bytes"),
    "a cap without a GPU": (["tiny", *SMALL, "--cap", "80GB"], "is for a GPU"),
    "no hardware file": (["tiny", *SMALL, "--hardware", "none.toml"], "none.toml"),
    "a file as the folder": (["tiny", *SMALL, "--out", "taken"], "--out taken is not a folder: name a new one"),
    "a folder of others": (["tiny", *SMALL, "--out", "theirs"], "has other files and no profile.json"),
    "a folder below a file": (["tiny", *SMALL, "--out", "taken/out"], "--out taken/out cannot be written"),
    "an option of a rehearsal": (["tiny", *SMALL, "--memory-only"], "--memory-only"),
    "a flag from elsewhere": (["tiny", *SMALL, "--steps", "3"], "--steps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """One sentence, code 2, and nothing is left behind."""
    words, wanted = WRONG[name]
    (tmp_path / "taken").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "novel.txt").write_text("")
    before = sorted(tmp_path.rglob("*"))
    end = run(nursery, tmp_path, *words)
    assert (end.code, end.out) == (2, ""), end
    assert end.err.startswith("error: ")
    assert end.err.count("\n") == 1
    assert wanted in end.err
    assert sorted(tmp_path.rglob("*")) == before
