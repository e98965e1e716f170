"""The learning rate of a run that sets none: by the model; said when the run starts, and kept when it continues."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ithaca.config import Config, TrainSection, read_config
from ithaca.config.warmup import default_warmup
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.source import load_model
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.configuration import read_run_config
from ithaca.train.setup.learning_rate import default_rate, describe_rate, warn_of_warmup
from ithaca.train.setup.stages import Span
from tests.nursery import Ended, Nursery
from tests.train.conftest import SMALL

OPEN = [option for option in SMALL if not option.startswith(("train.learning_rate", "train.warmup", "train.steps"))]


def sets(*options: str) -> list[str]:
    return [word for option in options for word in ("--set", option)]


def test_large_models_have_small_rates() -> None:
    """Beside what was published: SmolLM, Llama 3 and its two larger models."""
    rates = {name: default_rate(read_spec(config).parameters(), True) for name, config in PRESETS.items()}
    assert (rates["tiny"], rates["smollm2-135m"]) == (3e-3, 1.2e-3)
    assert (rates["llama3-8b"], rates["llama3-70b"]) == (3e-4, 1.5e-4)
    assert default_rate(405_853_388_800, True) == pytest.approx(8e-5, rel=0.02)
    assert default_rate(1_711_376_384, True) == pytest.approx(5e-4, rel=0.02)
    by_size = sorted(PRESETS, key=lambda name: read_spec(PRESETS[name]).parameters())
    assert [rates[name] for name in by_size] == sorted(rates.values(), reverse=True)
    assert {default_rate(10**power, False) for power in range(6, 13)} == {1e-5}


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 1), (3, 3), (16, 4), (133, 4), (134, 5), (1000, 30), (50_000, 1500), (10**6, 2000)]
)
def test_the_warm_up_follows_the_steps(steps: int, warmup: int) -> None:
    assert default_warmup(steps) == warmup


def test_the_line() -> None:
    options = TrainSection(steps=200, learning_rate=1e-5, warmup=6)
    run, stage = Span(0, 200, 200), Span(240, 440, 480, 1, 4)
    line = describe_rate(options, 2_900_000, False, run)
    assert line == (
        "Learning rate: at most 1e-05 (the default for trained weights); a warm-up of 6 steps, then cosine; "
        "1e-06 in step 200"
    )
    assert "(set by train.learning_rate)" in describe_rate(options, 2_900_000, True, run)
    assert describe_rate(options, 2_900_000, True, stage) == (
        "Learning rate: at most 1e-05 (learning_rate of stage 2); a warm-up of 6 steps, then cosine; 1e-06 in step 440"
    )
    flat = replace(options, learning_rate=0.003, warmup=0, schedule="wsd", decay=0)
    assert describe_rate(flat, 2_900_000, True, run).endswith(
        "at most 0.003 (the default for 2.9M random weights); no warm-up, then wsd; 0.003 in step 200"
    )


def test_a_warm_up_that_is_longer_than_the_run() -> None:
    run, stage = Span(0, 2, 2), Span(240, 242, 480, 1, 4)
    options = TrainSection(steps=2, learning_rate=1e-5, warmup=40)
    assert describe_rate(options, 2_900_000, False, run).endswith("; a warm-up of 40 steps; 5e-07 in step 2")
    assert warn_of_warmup(options, run) == "train.warmup 40 is longer than train.steps 2: the rate ends at 5e-07"
    assert warn_of_warmup(options, stage) == "warmup 40 of stage 2 is longer than its steps 2: the rate ends at 5e-07"
    assert warn_of_warmup(replace(options, warmup=2), run) is None


def started(nursery: Nursery, folder: Path, *options: str) -> tuple[Ended, Config]:
    """Train one step in `run`; return how it ended and the configuration that the run has saved."""
    words = sets(*OPEN, "train.steps=1", "train.tokens=16", "train.batch=1", *options)
    end = nursery.command("train", "--run", "run", "--ranks", "1", *words, folder=folder)
    assert end.code == 0, end.err
    return end, RunFolder(folder / "run").saved_config()


def test_a_folder_and_a_preset(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    end, config = started(nursery, tmp_path / "folder", f"model.source={small_model}")
    assert config.train.learning_rate == 1e-5
    assert f"parameters, weights of {small_model}, in float32" in end.out.splitlines()[0]
    assert (
        "Learning rate: at most 1e-05 (the default for trained weights); a warm-up of 1 step; 1e-05 in step 1\n"
        in end.out
    )
    (tmp_path / "preset").mkdir()
    end, config = started(nursery, tmp_path / "preset", "model.source=tiny")
    assert config.train.learning_rate == 3e-3
    assert "2.9M parameters, random weights (preset tiny), in float32" in end.out.splitlines()[0]
    assert "Learning rate: at most 0.003 (the default for 2.9M random weights)" in end.out
    assert (config.train.steps, config.train.warmup, config.train.epochs) == (1, 1, None)
    (line,) = RunFolder(tmp_path / "preset" / "run").read_metrics()
    assert line["learning_rate"] == pytest.approx(3e-3)


def test_another_model_in_a_run_that_saved_nothing_has_its_own_rate(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(read_config(None, ["model.source=tiny", "train.learning_rate=0.003"]).toml())
    assert read_config(file, ["model.source=my-model"], saved=True).train.learning_rate is None
    assert (
        read_config(file, ["model.source=my-model", "train.learning_rate=0.1"], saved=True).train.learning_rate == 0.1
    )
    assert read_config(file, ["model.source=tiny"], saved=True).train.learning_rate == 0.003
    assert read_config(file, ["model.source=my-model"]).train.learning_rate == 0.003  # a user wrote it


def test_a_run_from_another_has_a_warm_up_of_its_own(tmp_path: Path) -> None:
    """Unless the other one's was set: then it is an option like any other."""
    (tmp_path / "k").mkdir()
    for warmup, steps, then in ((12, 400, None), (4, 16, None), (40, 400, 40)):
        options = [f"train.steps={steps}", f"train.warmup={warmup}", "train.learning_rate=0.003"]
        (tmp_path / "k" / "config.toml").write_text(read_config(None, options).toml())
        found = read_run_config(None, ["train.steps=2"], tmp_path / "new", tmp_path / "k").train
        assert (found.steps, found.warmup, found.learning_rate) == (2, then, 0.003)
        found = read_run_config(None, [f"train.warmup={warmup}"], tmp_path / "new", tmp_path / "k").train
        assert (found.steps, found.warmup) == (steps, warmup)
        assert read_run_config(None, ["train.steps=999"], tmp_path / "k", None).train.warmup == warmup


def test_another_model_by_file_has_its_own_rate(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """In the folder of a start that came to nothing."""
    run = RunFolder(tmp_path / "run")
    with run.hold():
        run.begin(read_config(None, ["train.learning_rate=0.003"]), load_model("tiny"), torch.float32)
    (tmp_path / "run.toml").write_text(f"[model]\nsource = '{small_model}'\n")
    words = sets(*OPEN, "train.steps=1")
    end = nursery.command("train", "run.toml", "--run", "run", "--ranks", "1", *words, folder=tmp_path)
    assert end.code == 0, end.err
    assert run.saved_config().train.learning_rate == 1e-5


def test_an_open_rate_continues_with_the_checkpoint_s(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Not with a default of today: an older version gave every model 0.003 and 4 steps of warm-up."""
    words = sets(*SMALL, "train.steps=2", "train.warmup=1", "train.final_rate=0.5", f"model.source={small_model}")
    assert nursery.command("train", "--run", "run", "--ranks", "1", *words, folder=tmp_path).code == 0
    config = tmp_path / "run" / "config.toml"
    config.write_text(re.sub("(learning_rate|warmup|steps) = .*\n", "", config.read_text()))
    end = nursery.command("train", "--run", "run", "--ranks", "1", folder=tmp_path)
    assert end.code == 0, end.err
    assert "changed" not in end.out
    options = RunFolder(tmp_path / "run").saved_config().train
    assert (options.learning_rate, options.warmup, options.steps) == (0.003, 1, 2)


def test_a_finished_run_trains_nothing(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    words = sets(*SMALL, "train.steps=4", "train.warmup=9", f"model.source={small_model}")
    short = "warning: train.warmup 9 is longer than train.steps 4: the rate ends at 0.00133333\n"
    end = nursery.command("train", "--run", "run", "--ranks", "1", *words, folder=tmp_path)
    assert end.code == 0, end.err
    assert short in end.out
    assert "over 4 steps\n  run folder   run\n" in end.out
    end = nursery.command("train", "--run", "run", "--ranks", "1", folder=tmp_path)
    assert end.code == 0, end.err
    more = "--set train.steps=8 trains further"
    assert f"All 4 steps are done, nothing was trained: {more}\n  run folder   run\n" in end.out
    assert "Done:" not in end.out


def history(run: Path) -> list[list[object]]:
    (manifest,) = sorted((run / "checkpoints").glob("step-*/manifest.json"))[-1:]
    return json.loads(manifest.read_text())["history"]


def test_a_changed_rate_on_resume(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Screen, log, metrics and manifest have old and new; the next change is added to the history."""
    words = sets(*SMALL, "train.steps=4", f"model.source={small_model}")
    assert nursery.command("train", "--run", "run", "--ranks", "1", *words, folder=tmp_path).code == 0
    change = sets("train.steps=6", "train.learning_rate=0.0001", "train.schedule=wsd", "train.warmup=1")
    end = nursery.command("train", "--run", "run", "--ranks", "1", *change, folder=tmp_path)
    assert end.code == 0, end.err
    changed = (
        "warning: changed since the checkpoint of step 4: train.steps 4 -> 6, train.learning_rate 0.003 -> 0.0001, "
        "train.schedule cosine -> wsd, train.warmup 3 -> 1"
    )
    moved = "warning: the learning rate goes from 0.003 in step 4 to 0.0001 in step 5"
    log = (tmp_path / "run" / "log.txt").read_text()
    for said in (changed, moved):
        assert f"{said}\n" in end.out
        assert log.count(f" {said}\n") == 1
    lines = RunFolder(tmp_path / "run").read_metrics()
    assert [line.get("changed") for line in lines] == [
        None,
        None,
        None,
        None,
        {
            "train.steps": [4, 6],
            "train.learning_rate": [0.003, 0.0001],
            "train.schedule": ["cosine", "wsd"],
            "train.warmup": [3, 1],
        },
        None,
    ]
    assert [line["learning_rate"] for line in lines[3:5]] == pytest.approx([0.003, 0.0001])
    first = [
        [4, "train.steps", 4, 6],
        [4, "train.learning_rate", 0.003, 0.0001],
        [4, "train.schedule", "cosine", "wsd"],
        [4, "train.warmup", 3, 1],
    ]
    assert history(tmp_path / "run") == first
    end = nursery.command("train", "--run", "run", "--ranks", "2", *sets("train.steps=7"), folder=tmp_path)
    assert end.code == 0, end.err
    assert history(tmp_path / "run") == [*first, [6, "train.steps", 6, 7]]
