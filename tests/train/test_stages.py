"""Stages of length in one run: what each is, one metrics file, and a resume that changes no bit, in any stage."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.errors import ConfigError
from ithaca.checkpoint.files import CheckpointFolder
from ithaca.config import Config, parse_config, read_config
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from ithaca.train.setup.learning_rate import learning_rate
from ithaca.train.setup.stages import resolve_stages, span_of, stage_config, stage_seed, trained_length
from tests.nursery import Nursery
from tests.train.test_validation import done

STAGES = """
[train]
batch = 4
learning_rate = 3e-3
device = "cpu"

[[train.stages]]
tokens = 32
steps = 4

[[train.stages]]
tokens = 64
steps = 3
learning_rate = 1e-3
warmup = 2
rope = "theta, rope_theta=5e6"
plan = {recipe = "sweep", chunk = 24, tile = 10}

[[train.stages]]
tokens = 128
steps = 2
batch = 2
rope = "theta, rope_theta=9e6"

[run]
checkpoint_every = 2
"""


@pytest.fixture(scope="session")
def staged(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    file = tmp_path_factory.mktemp("stages") / "stages.toml"
    file.write_text(f'[model]\nsource = "{small_model}"\ndtype = "float32"\n{STAGES}')
    return read_config(file, [])


def test_what_is_open_follows_from_the_first_stage(staged: Config) -> None:
    config = resolve_stages(staged, None, lambda: 0.5)
    assert config.train.stages is not None
    assert [stage.batch for stage in config.train.stages] == [4, 2, 2]  # 128 tokens in a step, unless it is said
    assert [stage.learning_rate for stage in config.train.stages] == [3e-3, 1e-3, 3e-3]
    assert [stage.warmup for stage in config.train.stages] == [4, 2, 2]
    assert [stage.plan is None for stage in config.train.stages] == [True, False, True]
    without = replace(staged, train=replace(staged.train, learning_rate=None))
    stages = resolve_stages(without, None, lambda: 0.5).train.stages
    assert stages is not None
    assert [stage.learning_rate for stage in stages] == [0.5, 1e-3, 0.5]
    # A run that continues has what it began with, whatever the defaults are now
    again = resolve_stages(without, config, lambda: 0.7)
    assert again.train.stages == config.train.stages
    # What a file says now is not passed over: such stages are those of another run
    for name, value in (("learning_rate", 7e-3), ("batch", 8)):
        other = resolve_stages(replace(staged, train=replace(staged.train, **{name: value})), config, lambda: 0.7)
        assert other.train.stages != config.train.stages, name
    assert parse_config(config.toml()) == config


def test_spans(staged: Config) -> None:
    config = resolve_stages(staged, None, lambda: 0.5)
    found = [(span.number, span.first, span.last, span.total) for span in [span_of(config, n) for n in range(10)]]
    assert found == [*[(0, 0, 4, 9)] * 4, *[(1, 4, 7, 9)] * 3, *[(2, 7, 9, 9)] * 3]
    assert not span_of(config, 6).is_last
    assert span_of(config, 9).is_last
    assert [trained_length(config, step) for step in (1, 4, 5, 9)] == [32, 32, 64, 128]
    assert len({stage_seed(7, span_of(config, step)) for step in range(9)}) == 3
    second = stage_config(config, 4)
    assert (second.train.tokens, second.train.batch, second.train.steps, second.train.warmup) == (64, 2, 3, 2)
    assert (second.model.rope, second.plan and second.plan.recipe) == ("theta, rope_theta=5e6", "sweep")


WRONG = {
    "no steps": ("[[train.stages]]\ntokens = 32", "a stage has tokens=32 and steps=0"),
    "no table": ("[train]\nstages = 3", "train.stages is 3, no list of stages"),
    "unknown": ("[[train.stages]]\ntokens = 32\nsteps = 1\nlengths = 3", "'train.stages.1.lengths' is not an option"),
    "twice": (
        "[train]\ntokens = 9\n[[train.stages]]\ntokens = 32\nsteps = 1",
        "train.tokens=9 is set, but",
    ),
    "rope": ('[[train.stages]]\ntokens = 32\nsteps = 1\nrope = "thete"', "'thete' does not exist"),
    "plan": ('[[train.stages]]\ntokens = 32\nsteps = 1\nplan = {recipe = "swep"}', "swep"),
    "profile": (
        "[run]\nprofile_step = 1\n[[train.stages]]\ntokens = 32\nsteps = 3",
        "run.profile_step is 1, but",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(tmp_path: Path, name: str) -> None:
    text, sentence = WRONG[name]
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(Exception, match=sentence):
        read_config(tmp_path / "c.toml", [])


def test_batches_that_do_not_divide(staged: Config) -> None:
    stages = staged.train.stages
    assert stages is not None
    odd = replace(staged, train=replace(staged.train, batch=3, stages=(stages[0], replace(stages[1], batch=None))))
    with pytest.raises(ConfigError, match="has 96 tokens, which sequences of 64 do not divide: set batch in stage 2, "):
        resolve_stages(odd, None, lambda: 0.5)
    uneven = (replace(stages[0], tokens=96, batch=1), replace(stages[1], batch=None))
    with pytest.raises(ConfigError, match="as batch=2, or batch=2 in the first"):
        resolve_stages(replace(staged, train=replace(staged.train, stages=uneven)), None, lambda: 0.5)


def test_a_rope_of_a_later_stage_is_checked_at_the_start(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    stages = staged.train.stages
    assert stages is not None
    wrong = (*stages[:2], replace(stages[2], rope="theta, rope_theta=100"))
    (end,) = nursery.job(train, replace(staged, train=replace(staged.train, stages=wrong)), tmp_path / "run")
    assert end.code != 0
    assert "stage 3: " in end.err
    assert not RunFolder(tmp_path / "run").read_metrics()


def test_what_changes_between_two_stages_is_said(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    (end,) = nursery.job(killed, staged, tmp_path / "run", 5)
    assert end.code == -signal.SIGKILL
    done(nursery.job(train, replace(staged, train=replace(staged.train, schedule="wsd")), tmp_path / "run"))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "changed since the checkpoint of step 4: train.schedule cosine -> wsd" in log


def test_without_a_batch_it_follows_from_the_ranks(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    """One sequence for each data rank in the first stage, and as many tokens in a step of the others."""
    stages = staged.train.stages
    assert stages is not None
    stages = (stages[1], replace(stages[0], micro_batch=None), replace(stages[0], steps=1))
    config, path = replace(staged, train=replace(staged.train, batch=None, stages=stages)), tmp_path / "run"
    said = done(nursery.job(train, config, path, ranks=2))
    assert re.findall(r"Each step: (\d sequences of \d+ tokens)", said) == [
        "2 sequences of 64 tokens",
        "4 sequences of 32 tokens",
        "4 sequences of 32 tokens",
    ]
    assert [stage.batch for stage in RunFolder(path).saved_config().train.stages or ()] == [2, 4, 4]
    done(nursery.job(train, config, path, ranks=1))  # on other ranks it stays what it was
    assert [stage.batch for stage in RunFolder(path).saved_config().train.stages or ()] == [2, 4, 4]


def killed(config: Config, path: Path, step: int) -> None:
    """Train until a step, in which the process is killed."""
    whole = TrainingRun._backward

    def part(run: TrainingRun, *args: Any) -> Any:
        if run.done + 1 == step:
            run.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(run, *args)

    TrainingRun._backward = part
    train(config, path)


@pytest.fixture(scope="module")
def whole(nursery: Nursery, staged: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has disturbed."""
    path = tmp_path_factory.mktemp("whole") / "run"
    done(nursery.job(train, staged, path))
    return path


def outcome(nursery: Nursery, run: Path, folder: Path) -> tuple[list[tuple[Any, ...]], bytes, dict[str, Any]]:
    """Losses and rates of all steps, the exported weights, and the exported config.json."""
    end = nursery.command("export", str(run), str(folder), folder=folder.parent)
    assert end.code == 0, end.err
    names, metrics = ("step", "stage", "loss", "learning_rate", "tokens"), RunFolder(run).read_metrics()
    lines = [tuple(line[name] for name in names) for line in metrics]
    return lines, (folder / "model.safetensors").read_bytes(), json.loads((folder / "config.json").read_text())


def test_the_first_lines_of_a_stage_are_about_it(nursery: Nursery, whole: Path) -> None:
    said = (whole / "log.txt").read_text()
    assert said.count("; this stage is ") == 3
    assert "the run is" not in said
    assert "at most 0.001 (learning_rate of stage 2); a warm-up of 2 steps, then cosine; 0.001 in step 7\n" in said
    end = nursery.command("train", "--run", str(whole), "--ranks", "1", folder=whole.parent)
    more = f"ithaca train --from {whole} --run DIR trains further"
    assert f"All 9 steps are done, nothing was trained: {more}\n" in end.out


def test_a_run_in_stages(nursery: Nursery, staged: Config, whole: Path, tmp_path: Path) -> None:
    lines, _, exported = outcome(nursery, whole, tmp_path / "out")
    assert [line[:2] for line in lines] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 3), (9, 3)]
    assert [line[4] for line in lines] == [128, 256, 384, 512, 640, 768, 896, 1152, 1408]  # the last two have 256
    config = resolve_stages(staged, None, lambda: 0.5)
    for step, _, _, rate, _ in lines:
        span = span_of(config, step - 1)
        assert rate == learning_rate(stage_config(config, step - 1).train, step - 1 - span.first)
    assert exported["rope_parameters"]["rope_theta"] == 9e6
    assert exported["max_position_embeddings"] >= 128
    files = CheckpointFolder(whole / "checkpoints")
    assert files.steps() == [8, 9]
    recorded = parse_config((files.manifest(9) or {})["config"])
    assert (recorded.train.tokens, recorded.model.rope) == (128, "theta, rope_theta=9e6")
    assert (whole / "loss.png").exists()
    log = (whole / "log.txt").read_text()
    assert "Stage 2 of 3: 64 tokens, steps 5 to 7" in log
    assert "warning" not in log.lower()


@pytest.mark.parametrize("step", [2, 4, 5, 6, 8])
def test_killed_in_any_stage(nursery: Nursery, staged: Config, whole: Path, tmp_path: Path, step: int) -> None:
    """Before the first checkpoint, within stages, and in the first step of one."""
    (end,) = nursery.job(killed, staged, tmp_path / "run", step)
    assert end.code == -signal.SIGKILL
    done(nursery.job(train, staged, tmp_path / "run"))
    assert outcome(nursery, tmp_path / "run", tmp_path / "out") == outcome(nursery, whole, tmp_path / "whole")


def test_started_again_it_has_the_ropes_of_its_stages(nursery: Nursery, whole: Path, tmp_path: Path) -> None:
    """Not that of the last one, which [model] of its configuration has."""
    again = Path(shutil.copytree(whole, tmp_path / "again"))
    end = nursery.command("train", "--run", "again", "--fresh", "--ranks", "1", folder=tmp_path)
    assert end.code == 0, end.err
    assert outcome(nursery, again, tmp_path / "model") == outcome(nursery, whole, tmp_path / "before")


def test_several_ranks_that_share_sequences(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    """Two ranks, by a Plan and a mesh that hold for all stages; killed in the last stage."""
    stages = staged.train.stages
    assert stages is not None
    shared = replace(staged, mesh=replace(staged.mesh, ulysses=2), plan=stages[1].plan)
    done(nursery.job(train, shared, tmp_path / "whole", ranks=2))
    assert {end.code for end in nursery.job(killed, shared, tmp_path / "run", 9, ranks=2)} == {-signal.SIGKILL}
    done(nursery.job(train, shared, tmp_path / "run", ranks=2))
    found = outcome(nursery, tmp_path / "run", tmp_path / "out")
    assert found == outcome(nursery, tmp_path / "whole", tmp_path / "other")


def test_validation_in_stages(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    """At the start and the end of each stage, on sequences of its length."""
    (tmp_path / "a.txt").write_text("tell me, muse " * 30)
    assert nursery.command("data", "a.txt", "--out", "t.tokens", folder=tmp_path).code == 0
    config = replace(
        staged,
        data=replace(staged.data, validation=str(tmp_path / "t.tokens")),
        run=replace(staged.run, validate_every=0),
    )
    done(nursery.job(train, config, tmp_path / "run"))
    lines = RunFolder(tmp_path / "run").read_validations()
    assert [line["step"] for line in lines] == [0, 4, 4, 7, 7, 9]
    assert "have changed" not in (tmp_path / "run" / "log.txt").read_text()


def test_a_damaged_checkpoint_leads_back_into_another_stage(
    nursery: Nursery, staged: Config, whole: Path, tmp_path: Path
) -> None:
    (end,) = nursery.job(killed, staged, tmp_path / "run", 6)
    assert end.code == -signal.SIGKILL
    files = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert files.steps() == [2, 4]
    (part,) = files.path(4).glob("__0_*")
    part.write_bytes(b"x" + part.read_bytes()[1:])
    (end,) = nursery.job(train, staged, tmp_path / "run")
    assert end.code == 0, end.err
    assert "the checkpoint of step 4 is damaged" in end.err
    assert outcome(nursery, tmp_path / "run", tmp_path / "out") == outcome(nursery, whole, tmp_path / "whole")


def test_other_stages_are_another_run(nursery: Nursery, staged: Config, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    stages = staged.train.stages
    assert stages is not None
    longer = replace(staged, train=replace(staged.train, stages=(*stages[:2], replace(stages[2], steps=5))))
    (end,) = nursery.job(train, longer, tmp_path / "run")
    assert end.code != 0
    said = "stage 3 has steps=5, and its checkpoints have steps=2: put it back in [[train.stages]] to continue it"
    assert f"holds a different run: {said}" in end.err
    (end,) = nursery.job(train, replace(staged, train=replace(staged.train, stages=stages[:2])), tmp_path / "run")
    assert (
        "holds a different run: the run has 2 stages, and its checkpoints have 3: put [[train.stages]] back" in end.err
    )
    words = ("train", "--run", "run", "--set", "train.learning_rate=1")
    end = nursery.command(*words, "--ranks", "1", folder=tmp_path)
    assert end.code == 2
    assert "train.learning_rate=1 is set, but the run has stages" in end.err
    for option, said in (("plan.recipe=dense", "its own Plan: write plan"), ("model.rope=linear", "a rope that stays")):
        end = nursery.command("train", "--run", "run", "--set", option, "--ranks", "1", folder=tmp_path)
        assert end.code == 2
        assert f"{option} is set, but the run has stages, each with {said}" in end.err


def test_another_run_starts_from_it(nursery: Nursery, whole: Path, tmp_path: Path) -> None:
    """With the rope of the last stage, which the description in the folder does not have, and without its stages."""
    words = [word for item in ("train.tokens=64", "train.steps=1") for word in ("--set", item)]
    end = nursery.command("train", "--run", "run", "--from", str(whole), "--ranks", "1", *words, folder=tmp_path)
    assert end.code == 0, end.err
    described = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert described["rope_parameters"]["rope_theta"] == 9e6
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 1


def test_stages_begin_with_the_rope_of_the_run_that_they_start_from(
    nursery: Nursery, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "b.toml").write_text(
        "[train]\nbatch = 2\n[run]\ncheckpoint_every = 1\nkeep = 9\n"
        "[[train.stages]]\ntokens = 32\nsteps = 2\n[[train.stages]]\ntokens = 64\nsteps = 2\n"
    )
    words = ("b.toml", "--from", str(whole), "--run", "run", "--ranks", "1", "--set", "train.device=cpu")
    end = nursery.command("train", *words, folder=tmp_path)
    assert end.code == 0, end.err
    files = CheckpointFolder(tmp_path / "run" / "checkpoints")
    ropes = [(files.manifest(step) or {})["model"]["rope"]["theta"] for step in files.steps()]
    assert ropes == [9e6] * 4
    exported = outcome(nursery, tmp_path / "run", tmp_path / "out")[2]
    assert exported["rope_parameters"]["rope_theta"] == 9e6


def test_weights_of_one_stage_never_get_the_rope_of_another(nursery: Nursery, staged: Config, tmp_path: Path) -> None:
    """The newest checkpoint is damaged, and the sound one is of the stage before."""
    (end,) = nursery.job(killed, staged, tmp_path / "run", 7)
    assert end.code == -signal.SIGKILL
    files = CheckpointFolder(tmp_path / "run" / "checkpoints")
    assert files.steps() == [4, 6]
    (part,) = files.path(6).glob("__0_*")
    part.write_bytes(b"x" + part.read_bytes()[1:])
    sets = ("--ranks", "1", "--set", "train.device=cpu")
    said = (
        "is damaged, and that of step 4 is of an earlier stage, with another rope: delete step-00000006 there to take"
    )
    steps = ("--set", "train.steps=1", "--set", "train.tokens=32")
    end = nursery.command("train", "--from", "run", "--run", "new", *steps, *sets, folder=tmp_path)
    assert end.code == 2, end
    assert said in end.err
    (tmp_path / "a.txt").write_text("tell me, muse " * 30)
    assert nursery.command("data", "a.txt", "--out", "t.tokens", folder=tmp_path).code == 0
    end = nursery.command("evaluate", "run", "t.tokens", "--tokens", "32", *sets, folder=tmp_path)
    assert end.code == 2, end
    assert said in end.err
    shutil.rmtree(files.path(6))
    end = nursery.command("evaluate", "run", "t.tokens", "--tokens", "32", *sets, folder=tmp_path)
    assert end.code == 0, end


def test_an_evaluation_has_the_rope_of_the_checkpoint(nursery: Nursery, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tell me, muse " * 30)
    assert nursery.command("data", "a.txt", "--out", "t.tokens", folder=tmp_path).code == 0
    outcome(nursery, whole, tmp_path / "out")
    losses = []
    for model in (str(whole), "out"):
        words = ("t.tokens", "--tokens", "128", "--ranks", "1", "--set", "train.device=cpu", "--json")
        end = nursery.command("evaluate", model, *words, folder=tmp_path)
        assert end.code == 0, end.err
        losses.append(json.loads(end.out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
