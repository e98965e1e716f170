"""A run under `plan.cuda_graph` that profiles a step: what is watched is not replayed, and numbers stay the same."""

import json
from dataclasses import replace
from pathlib import Path

from ithaca.config import Config
from ithaca.plans.plan import Plan
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from ithaca.train.step_profile import StepProfile
from tests.graphs import graphs_on_a_cpu, kind
from tests.nursery import Nursery
from tests.train.test_validation import done

PLAN = Plan(recipe="dense", zero=2, checkpoint="none", cuda_graph=True)


def train_noting(config: Config, path: Path, file: Path) -> None:
    """Train and write how each step ran."""
    graphs_on_a_cpu()
    said, add = list[str](), StepProfile.add

    def noted(profile: StepProfile, run: object, metrics: dict) -> None:
        said.append(kind(run.model))  # pyrefly: ignore
        add(profile, run, metrics)  # pyrefly: ignore

    StepProfile.add = noted
    train(config, path)
    file.write_text(json.dumps(said))


def test_a_profiled_step(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """Step 3 is replayed under torch's profiler; step 4, whose memory is logged, is not, and step 5 captures again."""
    config = replace(small_config, plan=PLAN, train=replace(small_config.train, steps=6))
    watched = replace(config, run=replace(config.run, profile_step=3))
    eager = replace(watched, plan=replace(PLAN, cuda_graph=None))
    kinds, numbers = {}, {}
    for name, each in (("plain", config), ("watched", watched), ("eager", eager)):
        done(nursery.job(train_noting, each, tmp_path / name, tmp_path / "kinds.json"))
        kinds[name] = json.loads((tmp_path / "kinds.json").read_text())
        lines = RunFolder(tmp_path / name).read_metrics()
        numbers[name] = [(line["loss"], line["gradient_norm"]) for line in lines]
    assert kinds["plain"] == [f"replay {step}" for step in range(1, 7)]
    assert kinds["watched"] == ["replay 1", "replay 2", "replay 3", "eager", "replay 1", "replay 2"]
    assert kinds["eager"] == 6 * ["eager"]
    assert numbers["plain"] == numbers["watched"] == numbers["eager"]
    found, wanted = (
        json.loads((tmp_path / name / "profile-step-3" / "profile.json").read_text()) for name in ("watched", "eager")
    )
    assert found["memory"] == wanted["memory"]
    told, wanted_told = ([each["phase"] for each in report["phases"]] for report in (found, wanted))
    assert told == wanted_told  # replays tell none
