"""`ithaca train` as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import make_model, save

SMALL = ["train.tokens=64", "train.batch=4", "train.steps=12", "train.warmup=2"]


def run(*words: str, sets: list[str] = ()) -> subprocess.CompletedProcess[str]:
    options = [word for item in sets for word in ("--set", item)]
    command = [sys.executable, "-m", "ithaca", *words, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]


def test_two_ranks_learn_what_one_learns() -> None:
    by_ranks = {}
    for ranks in ("1", "2"):
        done = run("train", "--ranks", ranks, sets=SMALL)
        assert done.returncode == 0, done.stderr
        by_ranks[ranks] = losses(done.stdout)
        assert by_ranks[ranks][-1] < by_ranks[ranks][0] - 0.5
    assert by_ranks["1"] == pytest.approx(by_ranks["2"], abs=2e-3)


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", vocab_size=300), tmp_path / "in")
    (tmp_path / "run.toml").write_text(f'model.source = "{folder}"\nplan.checkpoint = "selective"\n')
    done = run("train", str(tmp_path / "run.toml"), "--ranks", "1", sets=SMALL)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout)


@pytest.mark.parametrize(
    ("words", "sets", "sentence"),
    [
        (["train", "missing.toml"], [], "'missing.toml' cannot be read"),
        (["train"], ["train.stepps=1"], "did you mean 'steps'"),
        (["train"], ["model.source=nowhere"], "'nowhere' is neither a folder nor a preset"),
        (["train", "--ranks", "2"], ["mesh.shard=3"], "is 3, but the job has 2 ranks; shard=2 would fit"),
        (["train", "--ranks", "2"], ["mesh.ulysses=2"], "recipe 'dense' has no context parallelism"),
        (["train", "--ranks", "2"], ["train.batch=1"], "the batch has 1 rows for 2 data ranks"),
        (["train", "--ranks", "1"], ["plan.kernel=fa9"], "kernel 'fa9' does not exist"),
        (["train", "--ranks", "0"], [], "--ranks 0 cannot be started"),
        (["train", "--ranks", "-1"], [], "--ranks -1 cannot be started: 1 or more can"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sets: list[str], sentence: str) -> None:
    done = run(*words, sets=[*SMALL, *sets])
    assert done.returncode == 2
    errors = done.stderr.strip().splitlines()
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert sentence in errors[0]


def test_a_vocabulary_too_small_for_bytes(tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path / "in")
    done = run("train", "--ranks", "1", sets=[*SMALL, f"model.source={folder}"])
    assert done.returncode == 2
    assert "the data are bytes, 256 tokens, but the model's vocabulary is 97" in done.stderr
