"""`ithaca train --profile-step`: the numbers of a run stay as they are, and its folder gains a profile."""

import json
from pathlib import Path

import pytest

from ithaca.train.folder.run_folder import RunFolder
from tests.nursery import Nursery

SETS = [
    "model.source=tiny",
    "train.tokens=64",
    "train.batch=2",
    "train.steps=8",
    "run.checkpoint_every=0",
    "train.device=cpu",
]
SWEEP = ["plan.recipe=sweep", "plan.chunk=32", "mesh.ulysses=2"]
DENSE = ["plan.recipe=dense", "train.micro_batch=2"]


def train(nursery: Nursery, folder: Path, name: str, sets: list[str], *more: str, ranks: str = "2") -> str:
    words = [word for item in (*SETS, *sets) for word in ("--set", item)]
    end = nursery.command("train", "--run", name, "--ranks", ranks, *words, *more, folder=folder)
    assert end.code == 0, end.err
    return end.out


@pytest.mark.parametrize("sets", [SWEEP, DENSE], ids=["sweep", "dense"])
def test_losses_are_bit_identical(nursery: Nursery, tmp_path: Path, sets: list[str]) -> None:
    train(nursery, tmp_path, "plain", sets)
    out = train(nursery, tmp_path, "watched", sets, "--profile-step", "3")
    numbers = [
        [(line["loss"], line["gradient_norm"]) for line in RunFolder(tmp_path / name).read_metrics()]
        for name in ("plain", "watched")
    ]
    assert len(numbers[0]) == 8
    assert numbers[0] == numbers[1]
    folder = tmp_path / "watched" / "profile-step-3"
    assert {"profile.html", "profile.json", "trace.json"} == {file.name for file in folder.iterdir()}
    report = json.loads((folder / "profile.json").read_text())
    assert report["overhead"] in out
    assert "Step 3 took" in report["overhead"]
    assert "step 4 took" in report["overhead"]
    assert " before and " in report["overhead"]
    assert report["lanes"]["compute"]["busy_seconds"] > 0
    assert report["lanes"]["exchange"]["operations"] > 0  # gloo's
    for owner in ("states", "gradients"):
        assert report["memory"][owner] > 0
    assert [phase["phase"] for phase in report["phases"]][-1] == "optimizer"
    assert not (tmp_path / "plain" / "profile-step-3").exists()


def test_the_last_steps_may_be_the_ones(nursery: Nursery, tmp_path: Path) -> None:
    """A run that ends right after both, alone on one rank: there is no step after them to compare with."""
    out = train(nursery, tmp_path, "run", ["train.steps=3", "run.profile_step=2"], ranks="1")
    assert "Step 2 took" in out
    assert " before. Profile of rank 0: " in out
    out = train(nursery, tmp_path, "run", ["train.steps=4", "run.profile_step=1"], ranks="1")
    assert "Step 1 is not profiled: the run has done 3 steps already" in out


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        ("0", "run.profile_step is 0: 1 or more is needed"),
        ("8", "run.profile_step is 8, and train.steps is 8: memory is logged in the step after it, so 1 to 7 work"),
        ("999", "train.steps is 8"),
    ],
)
def test_steps_that_a_run_has_not(nursery: Nursery, tmp_path: Path, step: str, wanted: str) -> None:
    words = [word for item in SETS for word in ("--set", item)]
    end = nursery.command(
        "train", "--run", "run", "--ranks", "1", *words, "--profile-step", step, folder=tmp_path
    )  # fmt: skip
    assert (end.code, end.err.count("\n")) == (2, 1)
    assert wanted in end.err
    assert not (tmp_path / "run").exists()
