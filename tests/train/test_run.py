"""The run folder: whose it is, who holds it, and what happens to its metrics."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ithaca.base.errors import ConfigError, RunError
from ithaca.config import Config, read_config
from ithaca.model.source import load_model
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.learning_rate import learning_rate


def test_a_configuration_comes_back_as_it_went(tmp_path: Path) -> None:
    config = read_config(
        None, ["train.tokens=64K", 'model.source=a"b\\c é', "plan.zero=2", "train.learning_rate=1e-05"]
    )
    folder = RunFolder(tmp_path / "run")
    begin(folder, config)
    assert folder.saved_config() == config


def begin(folder: RunFolder, config: Config) -> None:
    with folder.hold():
        folder.begin(config, load_model("tiny"), torch.float32)


def test_a_run_of_another_configuration(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    begin(folder, Config())
    folder.check(read_config(None, ["train.seed=1"]))  # nothing was trained yet
    (folder.checkpoints / "step-00000004").mkdir(parents=True)
    allowed_options = ("steps=99", "micro_batch=1", "learning_rate=1", "schedule=wsd", "warmup=1", "final_rate=0")
    others = ("plan.checkpoint=none", "mesh.shard=2", "run.keep=5", "data.source=x")
    for allowed in (*(f"train.{option}" for option in allowed_options), *others):
        folder.check(read_config(None, [allowed]))
    for option in ("train.seed=1", "train.batch=3", "model.source=llama3-8b", "train.beta2=0.99"):
        name, _, value = option.partition("=")
        with pytest.raises(
            ConfigError, match=rf"holds a different run: {name} is '?{value}.* continues it, another --run starts"
        ):
            folder.check(read_config(None, [option]))


def test_the_description_is_of_the_model_that_trains(tmp_path: Path) -> None:
    """A start that came to nothing may have left another model's."""
    folder = RunFolder(tmp_path / "run")
    with folder.hold():
        folder.begin(Config(), load_model("llama3-8b"), torch.float32)
    begin(folder, Config())
    assert json.loads((folder.model / "config.json").read_text())["hidden_size"] == 256


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="exists and is not a run folder"):
        RunFolder(tmp_path).hold()
    with pytest.raises(ConfigError, match="cannot be made a run folder"):
        RunFolder(tmp_path / "thesis.tex" / "run").hold()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_link_to_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"run' cannot be made a run folder \(File exists"):
        RunFolder(tmp_path / "run").hold()


def test_two_jobs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    held = folder.hold()
    monkeypatch.setattr("ithaca.train.folder.run_folder.LOCK_SECONDS", 0.3)
    for intrusion in (folder.hold, folder.set_aside):
        with pytest.raises(RunError, match="in use by another job"):
            intrusion()
    held.close()
    folder.hold().close()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    program = f"from ithaca.train.folder.run_folder import *\nheld = RunFolder(Path('{tmp_path}/run')).hold()"
    subprocess.run([sys.executable, "-c", program], check=True)
    RunFolder(tmp_path / "run").hold().close()


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n12\n{"step": 2}\n{"step": 3}\n{"st')
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    folder.cut_metrics(2)
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_folder_without_a_name_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--run . --fresh` would go on in the folder that was moved away."""
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    for path in (".", "../run/.."):
        with pytest.raises(
            ConfigError, match=r"--fresh cannot rename '\.\S*': name the run folder, as --run \.\./mine"
        ):
            RunFolder(Path(path)).set_aside()
    assert [*tmp_path.rglob("*")] == [tmp_path / "run"]


def test_an_old_run_is_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.set_aside() is None
    for number in (1, 2):
        begin(folder, Config())
        assert folder.set_aside() == tmp_path / f"run.old{number}"
    assert not folder.begun()


def test_learning_rates() -> None:
    options = replace(Config().train, steps=111, warmup=10, learning_rate=1.0, final_rate=0.1, decay=0.25)
    rates = [learning_rate(options, step) for step in range(111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    flat = [learning_rate(replace(options, schedule="wsd"), step) for step in range(111)]
    assert set(flat[9:86]) == {1.0}
    assert flat[97:99] == pytest.approx([0.1 + 0.9 * 0.52, 0.1 + 0.9 * 0.48])
    assert flat[-1] == pytest.approx(0.1)
