"""`ithaca train`, `export` and `data` as a user types them."""

import json
import re
import shlex
from pathlib import Path

import pytest
import transformers

from ithaca.base.shell import continue_command
from ithaca.train.folder.run_folder import RunFolder
from tests.nursery import Nursery
from tests.train.conftest import SMALL


def words(*sets: str) -> list[str]:
    return [word for item in (*SMALL, *sets) for word in ("--set", item)]


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in RunFolder(path).read_metrics()]


def test_from_text_to_a_folder_that_transformers_loads(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the wine-dark sea and the rosy-fingered dawn\n" * 300)
    end = nursery.command("data", "text.txt", "--out", "text.tokens", folder=tmp_path)
    assert end.code == 0, end.err
    sets = words(f"model.source={small_model}", "data.source=text.tokens", "train.learning_rate=0.01", "train.steps=30")
    end = nursery.command("train", "--run", "run", "--ranks", "1", *sets, folder=tmp_path)
    assert end.code == 0, end.err
    found = losses(tmp_path / "run")
    assert found[-1] < found[0] - 2
    for name in ("run folder   run", "loss curve   run/loss.png", "next         ithaca export run"):
        assert name in end.out
    end = nursery.command("export", "run", "out", "--dtype", "bfloat16", folder=tmp_path)
    assert end.code == 0, end.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert str(model.dtype) == "torch.bfloat16"


def test_a_file_then_the_folder_alone(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """A run goes on by its folder's name; what the file said is not needed again."""
    (tmp_path / "run.toml").write_text(
        f'model.source = "{small_model}"\nplan.checkpoint = "selective"\ntrain.micro_batch = 2\n'
    )
    end = nursery.command("train", "run.toml", "--run", "run", "--ranks", "1", *words("train.steps=5"), folder=tmp_path)
    assert end.code == 0, end.err
    assert "Each step: 4 sequences of 64 tokens in 2 passes; 5 steps" in end.out
    saved = tmp_path / "run" / "config.toml"  # as runs had it before options were renamed
    old = saved.read_text().replace("micro_batch", "micro").replace("[run]\n", "[run]\npatience = 900.0\n")
    saved.write_text(old)
    end = nursery.command("train", "--run", "run", "--ranks", "1", "--set", "train.steps=9", folder=tmp_path)
    assert end.code == 0, end.err
    assert "Continuing from the checkpoint of step 5" in end.out
    assert end.err == ""
    assert len(losses(tmp_path / "run")) == 9
    end = nursery.command("train", "--run", "run", "--ranks", "1", "--fresh", *words("train.steps=2"), folder=tmp_path)
    assert "Moved the old run to run.old1" in end.out
    assert len(losses(tmp_path / "run.old1")) == 9
    end = nursery.command("train", "--run", "run.old1", "--ranks", "1", "--fresh", folder=tmp_path)
    assert "Moved the old run to run.old1.old1" in end.out  # and this one starts again as it was
    assert f"parameters, weights of {small_model}, in" in end.out
    assert len(losses(tmp_path / "run.old1")) == 9
    assert RunFolder(tmp_path / "run.old1").saved_config() == RunFolder(tmp_path / "run.old1.old1").saved_config()


def test_accumulation_is_one_large_batch(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Of short documents, so that passes have different numbers of valid tokens."""
    lines = [json.dumps({"text": "sea" * (number % 7 + number // 20)}) for number in range(1, 200)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    end = nursery.command("data", "text.jsonl", "--out", "text.tokens", folder=tmp_path)
    assert end.code == 0, end.err
    common = [f"model.source={small_model}", "data.source=text.tokens", "model.dtype=float64", "train.steps=8"]
    for micro_batch in (1, 2, 4):
        sets = words(*common, f"train.micro_batch={micro_batch}")
        end = nursery.command("train", "--run", str(micro_batch), "--ranks", "1", *sets, folder=tmp_path)
        assert end.code == 0, end.err
    whole = losses(tmp_path / "4")
    for micro_batch in ("1", "2"):
        assert losses(tmp_path / micro_batch) == pytest.approx(whole, rel=1e-9)


def test_a_run_under_every_recipe_has_the_same_losses(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    """Three steps by each in turn, in one run, are nine steps by `dense`."""
    # A learning rate that does not depend on the number of steps
    common = [f"model.source={small_model}", "model.dtype=float64", "train.schedule=wsd", "train.decay=0"]
    end = nursery.command("train", "--run", "dense", "--ranks", "1", *words(*common, "train.steps=9"), folder=tmp_path)
    assert end.code == 0, end.err
    for steps, plan in (
        (3, ["plan.checkpoint=selective"]),
        (6, ["plan.recipe=sweep", "plan.chunk=50"]),
        (9, ["plan.recipe=alst"]),
    ):
        sets = words(*common, *plan, "train.micro_batch=2", f"train.steps={steps}")
        end = nursery.command("train", "--run", "mixed", "--ranks", "2", *sets, folder=tmp_path)
        assert end.code == 0, end.err
    assert "Saved activations: in host memory x" in end.out
    assert losses(tmp_path / "mixed") == pytest.approx(losses(tmp_path / "dense"), rel=1e-9)


def test_new_runs_get_new_folders(nursery: Nursery, tmp_path: Path) -> None:
    for _ in range(2):
        sets = words("train.steps=1", "train.batch=1")
        assert nursery.command("train", "--ranks", "1", *sets, folder=tmp_path).code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny-001", "tiny-002"]


def test_no_terminal_still_sees_progress(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    sets = words(f"model.source={small_model}", "train.steps=30")
    end = nursery.command("train", "--ranks", "1", *sets, folder=tmp_path)
    lines = re.findall(r"^Step (\d+)/30  loss [\d.]+  grad norm .* tokens/s/rank", end.out, re.M)
    steps = [int(number) for number in lines]
    assert steps[0] == 1
    assert steps[-1] == 30
    assert 10 <= len(steps) <= 20


def test_the_next_command_of_a_run_with_an_odd_name(nursery: Nursery, tmp_path: Path) -> None:
    """It runs as it is printed."""
    end = nursery.command("train", "--run", "my run", "--ranks", "1", *words("train.steps=1"), folder=tmp_path)
    assert end.code == 0, end.err
    (command,) = re.findall(r"next +ithaca (.*)", end.out)
    assert nursery.command(*shlex.split(command), folder=tmp_path).code == 0
    assert (tmp_path / "my run-model" / "config.json").is_file()
    assert continue_command(Path("my run")) == "ithaca train --run 'my run'"
