"""Long-context tasks during a run: no number of training changes, none is lost or made twice, memory, and refusals."""

import json
import os
import re
import shlex
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.errors import ConfigError
from ithaca.base.owners import HOST, KEYS, TAPES
from ithaca.config import Config, EvaluateSection, Stage, parse_config, read_config
from ithaca.evaluate.language import English, Synthetic
from ithaca.evaluate.long_context import SEED, TaskOptions, measure_tasks
from ithaca.evaluate.score import score
from ithaca.evaluate.tasks import least_tokens, make_sample
from ithaca.plans.plan import Plan
from ithaca.rehearsal.memory_meter import Meter, mark_gradients
from ithaca.schedule import memory_check
from ithaca.train import tasks as run_tasks
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.sampling import sampled
from tests.train.conftest import SMALL
from tests.train.test_validation import done

VOCAB = 300
SAME = ("step", "loss", "gradient_norm", "learning_rate")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tasks are in synthetic tokens."""
    keys = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "num_hidden_layers": 2}
    return save(make_model("qwen3", **keys), tmp_path_factory.mktemp("model") / "in")


@pytest.fixture(scope="module")
def config(model: Path) -> Config:
    words = [*SMALL, f"model.source={model}", "model.dtype=float32", "train.steps=5", "run.checkpoint_every=2"]
    return read_config(None, words)


def with_tasks(config: Config, **options: Any) -> Config:
    return replace(
        config, evaluate=EvaluateSection(**{"tasks": ("needle", "repeat"), "tokens": (40, 64), "count": 5} | options)
    )


def evaluated(run: Path) -> list[int]:
    return [line["step"] for line in RunFolder(run).read_evaluations()]


def losses(run: Path) -> list[list[Any]]:
    return [[line[name] for name in SAME] for line in RunFolder(run).read_metrics()]


PLANS: dict[str, tuple[Plan, dict[str, int]]] = {
    "dense": (Plan(recipe="dense"), {}),
    "ulysses": (Plan(recipe="ulysses"), {"ulysses": -1}),
    "sweep": (Plan(recipe="sweep", chunk=24, tile=7), {"ulysses": -1}),
    "alst": (Plan(recipe="alst", tile=9), {"ulysses": -1}),
}


@pytest.mark.parametrize(
    ("name", "world"),
    sampled(
        [(name, world) for name in PLANS for world in (1, 2, 4)],
        lambda *case: case in {("dense", 1), ("sweep", 2), ("ulysses", 4)},
    ),
)
def test_a_run_with_tasks(nursery: Nursery, config: Config, tmp_path: Path, name: str, world: int) -> None:
    """Training is the same bit for bit, and scores are those of `ithaca evaluate` on the last checkpoint."""
    plan, axes = PLANS[name]
    config = replace(config, plan=plan, mesh=replace(config.mesh, **dict.fromkeys(axes, world)))
    said = done(nursery.job(train, with_tasks(config, every=2), tmp_path / "run", ranks=world))
    plain = done(nursery.job(train, config, tmp_path / "plain", ranks=world))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert "Task" not in plain
    assert evaluated(tmp_path / "plain") == []
    assert evaluated(tmp_path / "run") == [2, 4, 5]
    words = ["--task", "needle", "--task", "repeat", "--tokens", "40,64", "--count", "5", "--out", "found", "--json"]
    words += ["--set", "train.device=cpu", "--ranks", str(world)]
    end = nursery.command("evaluate", "run", *words, folder=tmp_path)
    assert end.code == 0, end.err
    wanted = json.loads(end.out)
    written = json.loads((tmp_path / "run" / "evaluation" / "step-5" / "tasks.json").read_text())
    for key in ("tasks", "language", "trained_length", "effective_length", "step"):
        assert written[key] == wanted[key], key
    last = RunFolder(tmp_path / "run").read_evaluations()[-1]
    for task in wanted["tasks"]:
        for row in task["lengths"]:
            for score_name in ("greedy", "likelihood"):
                assert last[f"{task['task']}_{score_name}_{row['tokens']}"] == row[score_name]
    for picture in ("tasks.png", "needle.png"):
        assert (tmp_path / "run" / "evaluation" / "step-5" / picture).read_bytes()[:4] == b"\x89PNG"
    for text in (said, (tmp_path / "run" / "log.txt").read_text()):
        assert (
            "Tasks: needle, repeat at 40, 64 tokens, 5 samples each, every 2 steps and at the end, in synthetic" in text
        )
        assert "Task needle after step 2: " in text
        assert "Tasks in synthetic tokens, 300 ids, 5 samples each; trained length 64" in text
    assert not (tmp_path / "run" / "evaluation" / "step-2").exists()


def test_scores_reach_tensorboard(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(config, run=replace(config.run, report="tensorboard"))
    done(nursery.job(train, with_tasks(config, tasks=("needle",), every=3), tmp_path / "run"))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("needle_greedy_64")] == [3, 5]


def broken(config: Config, path: Path, step: int, how: str) -> None:
    """Train; in an evaluation after a step the rank is killed, or a user asks to stop."""
    whole = run_tasks.Tasks.measure

    def part(tasks: run_tasks.Tasks, model: Any, *args: Any) -> Any:
        if here[0].done == step:
            if how == "killed":
                here[0].checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            here[0].stop.ask()
        return whole(tasks, model, *args)

    here: list[TrainingRun] = []
    allocate = TrainingRun._allocate

    def allocated(run: TrainingRun) -> None:
        here[:] = [run]
        allocate(run)

    run_tasks.Tasks.measure, TrainingRun._allocate = part, allocated
    train(config, path)


@pytest.mark.parametrize(
    ("step", "how"),
    sampled(
        [(step, how) for step in (2, 3, 5) for how in ("killed", "stopped") if (step, how) != (5, "stopped")],
        lambda *case: case in {(3, "killed"), (2, "stopped")},
    ),
)
def test_none_is_lost_and_none_is_made_twice(nursery: Nursery, config: Config, tmp_path: Path, step: int, how: str):
    """Evaluations after steps with and without a checkpoint, and after the last one."""
    config, path = with_tasks(config, tasks=("repeat",), every=1), tmp_path / "run"
    (end,) = nursery.job(broken, config, path, step, how)
    assert end.code == (0 if how == "stopped" else -signal.SIGKILL), end.err
    assert step not in evaluated(path)
    done(nursery.job(train, config, path))
    assert evaluated(path) == [1, 2, 3, 4, 5]
    done(nursery.job(train, config, tmp_path / "whole"))
    assert losses(path) == losses(tmp_path / "whole")
    scores = [
        [{name: value for name, value in line.items() if "seconds" not in name} for line in found.read_evaluations()]
        for found in (RunFolder(path), RunFolder(tmp_path / "whole"))
    ]
    assert scores[0] == scores[1]
    said = done(nursery.job(train, config, path))  # nothing is left to do
    assert evaluated(path) == [1, 2, 3, 4, 5]
    assert "Tasks in" not in said


def test_other_tasks_on_a_finished_run(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """They are not run, and the run says so, with the command that runs them. First tasks are run, and once."""
    sentence = r"warning: the run is finished, so nothing was evaluated with the new options of \[evaluate\]: `(.*?)` m"
    config, path = replace(config, train=replace(config.train, steps=2)), tmp_path / "run"
    done(nursery.job(train, config, path))
    for _ in range(2):  # the checkpoint's record is from before the tasks, also when they have been run
        said = done(nursery.job(train, with_tasks(config, tasks=("repeat",)), path))
        assert not re.search(sentence, said)
        assert evaluated(path) == [2]
    other = with_tasks(config, tokens=(48,), count=7, every=1)
    said, log = done(nursery.job(train, other, path)), (path / "log.txt").read_text()
    assert evaluated(path) == [2]
    for text in (said, log):
        found = re.search(sentence, text)
        assert found
        assert found[1] == f"ithaca evaluate {path} --task needle --task repeat --tokens 48 --count 7"
    end = nursery.command(*shlex.split(found[1])[1:], "--ranks", "1", "--json", folder=tmp_path)
    assert end.code == 0, end.err
    assert [row["samples"] for task in json.loads(end.out)["tasks"] for row in task["lengths"]] == [7, 7]
    every = with_tasks(config, tasks=("repeat",), every=1)  # the steps between are done: nothing is missing at the end
    assert not re.search(sentence, done(nursery.job(train, every, path)))


def staged(config: Config, *lengths: int) -> Config:
    stages = tuple(Stage(tokens=length, steps=2, batch=2) for length in lengths)
    return replace(config, train=replace(config.train, tokens=None, steps=None, warmup=None, stages=stages))


def test_stages(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    """Each stage measures what fits it, and says what does not."""
    config = with_tasks(staged(config, 16, 64, 128), tokens=(40, 64, 128), every=0)
    done(nursery.job(train, config, tmp_path / "run"))
    lines = RunFolder(tmp_path / "run").read_evaluations()
    assert [line["step"] for line in lines] == [4, 6]
    lengths = [{int(name.rpartition("_")[2]) for name in line if name.startswith("needle_greedy")} for line in lines]
    assert lengths == [{40, 64}, {40, 64, 128}]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Tasks: none in this stage; 40, 64, 128 wait for a longer stage than 16" in log
    assert "40, 64 tokens, 5 samples each, at the end, in synthetic tokens, 300 ids; 128 wait for a longer stage" in log
    assert {path.name for path in (tmp_path / "run" / "evaluation").iterdir()} == {"step-4", "step-6"}
    default = with_tasks(staged(config, 16, 64), tokens=None, tasks=("repeat",), every=0)
    done(nursery.job(train, default, tmp_path / "default"))
    assert evaluated(tmp_path / "default") == [4]
    assert "none in this stage; they need 32 tokens, and the stage has 16" in (tmp_path / "default/log.txt").read_text()


@pytest.mark.parametrize("every", [0, 1])
def test_a_stop_at_the_end_of_a_stage(nursery: Nursery, config: Config, tmp_path: Path, every: int) -> None:
    """The next stage does not measure it at its own lengths, and the user hears that it is left out."""
    config = with_tasks(staged(config, 64, 128), tokens=(40, 64, 128), tasks=("repeat",), every=every)
    (end,) = nursery.job(broken, config, tmp_path / "run", 2, "stopped")
    assert end.code == 0, end.err
    assert f"the tasks after step 2 are left out, because they were interrupted at the end of a stage; before the run continues, `ithaca evaluate {tmp_path / 'run'} --task repeat --tokens 40,64 --count 5` runs them on that checkpoint" in end.err + end.out  # fmt: skip  # noqa: E501
    done(nursery.job(train, config, tmp_path / "run"))
    assert evaluated(tmp_path / "run") == ([4] if every == 0 else [1, 3, 4])


def test_the_section() -> None:
    read = lambda *words: read_config(None, list(words)).evaluate  # noqa: E731
    assert read("evaluate.tasks=needle,keys", "evaluate.tokens=2K,512") == EvaluateSection(
        tasks=("needle", "keys"), tokens=(512, 2048)
    )
    assert read('evaluate.tasks=["needle", "needle"]', "evaluate.tokens=64").tokens == (64,)
    assert len(read("evaluate.tasks=all").tasks or ()) == 6
    assert read("evaluate.tasks=").tasks is None
    config = read_config(None, ["evaluate.tasks=needle", "evaluate.tokens=2K", "evaluate.every=7"])
    assert parse_config(config.toml()) == config


WRONG = {
    "no such task": ("evaluate.tasks=needles", "'needles' is not a task: needle, keys"),
    "no list": ("evaluate.tasks=3", "3 is not a list of tasks"),
    "no samples": ("evaluate.count=0", "evaluate.count is 0: 1 or more samples are needed"),
    "a negative number": ("evaluate.every=-1", "evaluate.every is -1: 0 or more is needed"),
    "no task": ("evaluate.tasks=", "evaluate.tokens is 64, but evaluate.tasks names none"),
    "too long": ("evaluate.tokens=65", "evaluate.tokens has 65, but train.tokens is 64: tasks run at up to"),
    "too short": ("evaluate.tokens=20", "evaluate.tokens has 20, and task 'repeat' needs 32 tokens"),
    "unknown": ("evaluate.length=9", "'evaluate.length' is not an option"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(nursery: Nursery, config: Config, tmp_path: Path, name: str) -> None:
    word, said = WRONG[name]
    words = [*SMALL, f"model.source={config.model.source}", "evaluate.tasks=repeat", "evaluate.tokens=64", word]
    sets = [item for word in words for item in ("--set", word)]
    end = nursery.command("train", "--run", "run", "--ranks", "2", *sets, folder=tmp_path)
    assert end.code == 2
    assert said in end.err
    assert end.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def open_with(*words: str, vocab: int = 256, folder: Path | None = None) -> run_tasks.Tasks:
    """The tasks of a run by these options, of a model with so many ids."""
    source = SimpleNamespace(folder=folder, spec=SimpleNamespace(vocab=vocab))
    found = run_tasks.open_tasks(read_config(None, [*words]), source)  # pyrefly: ignore
    assert found
    return found


def test_a_length_that_is_too_short_for_a_run() -> None:
    with pytest.raises(ConfigError, match=r"train\.tokens is 16, and task 'repeat' needs 32 tokens in this language"):
        open_with("evaluate.tasks=repeat", "train.tokens=16")


def test_each_sample_is_checked_before_the_run_starts() -> None:
    """Samples differ in length, and the longest one failed after all steps, before the last checkpoint."""
    words = English("bytes", lambda text: [*text.encode()], lambda ids: bytes(ids).decode(errors="replace"), [])
    needed = least_tokens("needle", words, 230, SEED, 50)
    assert needed > 230 >= least_tokens("needle", words, 230, SEED, 1)
    asked = "evaluate.tasks=needle", "evaluate.tokens=230", "train.tokens=512"
    open_with(*asked, "evaluate.count=1")
    with pytest.raises(ConfigError, match=f"evaluate.tokens has 230, and task 'needle' needs {needed} tokens"):
        open_with(*asked)


def test_the_data_and_the_tasks_have_other_tokens() -> None:
    asked = "evaluate.tasks=needle", "train.tokens=1024"
    for source in ("data.source=needles", "data.source=synthetic:needles", 'data.mix={"needles" = 1.0}'):
        assert "warning" not in open_with(*asked, source, vocab=128).describe()
        for vocab, language in ((300, "synthetic tokens, 300 ids"), (256, "English, byte by byte")):
            line, warning = open_with(*asked, source, vocab=vocab).describe().split("\n")
            assert line.startswith("Tasks: needle at ")
            assert warning.startswith("warning: the data are synthetic documents of 128 ids, but the model has a voc")
            assert f"a vocabulary of {vocab}, and its tasks are in {language}, so" in warning
    assert "warning" not in open_with(*asked, vocab=300).describe()


def without_memory(config: Config, path: Path) -> None:
    """A node that has room for the tapes of training, and not for K and V of prompts."""
    memory_check.host_budget = lambda: (9000, "free memory")
    train(config, path)


def test_a_cache_that_does_not_fit_is_refused_at_the_start(nursery: Nursery, config: Config, tmp_path: Path) -> None:
    config = replace(config, plan=Plan(recipe="dense"))
    (end,) = nursery.job(without_memory, with_tasks(config), tmp_path / "run")
    assert "evaluate.tokens 64 does not fit: K and V of all layers for prompts of 64 tokens need" in end.err
    assert "free memory is 8.79 KiB" in end.err
    assert not (tmp_path / "run").exists()


STORED = (TAPES, KEYS, HOST)  # owners of tapes


def peaks(folder: Path, plan: Plan, sizes: dict[str, int]) -> tuple[Counter[str], Counter[str], int]:
    """The most bytes of tensors in a training step and in an evaluation at its length, and those left after it."""
    grid, length = ithaca.mesh(**sizes), 96
    with Meter(torch.device("cpu"), torch.float32) as meter:
        model = ithaca.apply(ithaca.load_model(folder, "float32"), plan, grid)
        mark_gradients(model.decoder)
        optimizer = ithaca.make_optimizer(model, learning_rate=1e-3)
        rows = torch.randint(0, VOCAB, (grid.data_ranks, length), generator=torch.Generator().manual_seed(0))

        def step() -> Counter[str]:
            meter.restart()
            model(model.shard(rows, rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
            return Counter(meter.peak)

        step()
        training = step()
        before = sum(meter.now.values())
        meter.restart()
        measure_tasks(model, Synthetic(VOCAB), TaskOptions(tasks=("needle", "keys"), count=3), (48, length))
        evaluating, left = Counter(meter.peak), sum(meter.now.values()) - before
        step()
        return training, evaluating, left


@pytest.mark.parametrize(
    ("name", "world"),
    sampled(
        [(name, world) for name in PLANS for world in (1, 2)],
        lambda *case: case in {("dense", 2), ("alst", 1), ("sweep", 2), ("sweep", 1)},
    ),
)
def test_it_takes_no_more_memory_than_training(ranks, model: Path, name: str, world: int) -> None:
    """Counted tensor by tensor, at the trained length; tapes of training are not there meanwhile, and none are left."""
    plan, axes = PLANS[name]
    for training, evaluating, left in ranks(world).run(peaks, model, plan, dict.fromkeys(axes, world)):
        assert 0 < evaluating.total() <= training.total()
        if plan.sweeps:
            assert sum(evaluating[owner] for owner in STORED) < sum(training[owner] for owner in STORED)
        # The tapes of training come back with the next step. A thread of gloo may still hold a small message
        assert left < training.total() / 100


def test_a_stop_ends_scores() -> None:
    class Empty:
        mesh = ithaca.mesh()

    samples = [make_sample("needle", Synthetic(VOCAB), 30, 0, 0)]
    assert score(Empty(), samples, 30, 0, stopped=lambda: True) is None  # pyrefly: ignore
