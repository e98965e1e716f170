"""`train.epochs`: the steps follow from the data, the batch and the length."""

from pathlib import Path

import numpy as np
import pytest

from ithaca.base.errors import ConfigError
from ithaca.config import TrainSection, read_config
from ithaca.data.packing import Rows, rows_per_epoch
from ithaca.data.reader import TokenFile, in_memory
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.setup.epochs import count_steps, describe_epochs
from tests.nursery import Nursery
from tests.train.conftest import SMALL


def tokens(count: int) -> TokenFile:
    return in_memory(np.arange(count) % 251, np.array([0, count]))


@pytest.mark.parametrize(
    ("size", "epochs", "batch", "steps"),
    [
        (1000, 1.0, 1, 15),  # windows of 64 tokens; 40 are left out, others in each epoch
        (1000, 1.0, 4, 4),  # 3.75
        (1000, 2.0, 4, 8),  # 7.5
        (640, 0.3, 1, 3),  # as floats, 3.0000000000000004 of 10
        (640, 0.1, 1, 1),
        (640, 1e-9, 1, 1),
        (10, 3.0, 1, 3),  # shorter than a window
        (6400, 1e6, 10, 10**7),
    ],
)
def test_steps(size: int, epochs: float, batch: int, steps: int) -> None:
    rows = rows_per_epoch(tokens(size), 64, "cut", "truncate")
    assert count_steps(TrainSection(tokens=64, batch=batch, epochs=epochs), rows) == steps


@pytest.mark.parametrize(("packing", "count", "tokens"), [("cut", 15, 960), ("joined", 15, 960), ("whole", 20, 1000)])
def test_an_epoch_is_what_the_rows_are_drawn_from(packing: str, count: int, tokens: int) -> None:
    """So many rows hold every window or document once; the next one begins to repeat them."""
    data, length = in_memory(np.arange(1000), np.arange(0, 1001, 50)), 64
    rows = rows_per_epoch(data, length, packing, "truncate")
    assert rows == count
    drawn = Rows(data, length, 0, packing)
    seen = [drawn.draw(1, row)[0].flatten().tolist() for row in range(rows + 1)]
    once = {token for row in seen[:-1] for token in row}
    assert len(once) == tokens
    assert once & set(seen[-1])


def test_the_line() -> None:
    options = TrainSection(tokens=64, batch=4, steps=3)
    assert describe_epochs(options, 1000, 15) == (
        "Each epoch: 1,000 tokens, 15 sequences, 3.75 steps; the run is 0.8 epochs"
    )
    assert describe_epochs(TrainSection(tokens=64, batch=1, steps=1), 100, 1).endswith("1 step; the run is 1 epoch")
    assert describe_epochs(options, 1000, 15, "this stage").endswith("; this stage is 0.8 epochs")


def test_both_are_refused_and_the_command_line_wins(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"^train.steps=3 and train.epochs=1.5 both say how long the run is: set one$"
    ):
        read_config(None, ["train.steps=3", "train.epochs=1.5"])
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 3\n")
    options = read_config(file, ["train.epochs=2"]).train
    assert (options.steps, options.epochs) == (None, 2.0)
    assert capsys.readouterr().err == "Ignoring train.steps=3: train.epochs=2 is set\n"
    assert read_config(file, ["train.epochs=2"], saved=True).train.epochs == 2.0
    assert capsys.readouterr().err == ""
    file.write_text("[train]\nepochs = 3\n")
    options = read_config(file, ["train.steps=2"]).train
    assert (options.steps, options.epochs) == (2, None)
    file.write_text("[train]\nepochs = nan\n")
    with pytest.raises(ConfigError, match="epochs is nan: a number above 0"):
        read_config(file, ["train.steps=2"])


def test_a_run_of_some_epochs_and_more_of_them(nursery: Nursery, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 1000)
    assert nursery.command("data", "text.txt", "--out", "t", folder=tmp_path).code == 0
    options = [option for option in SMALL if not option.startswith("train.steps")]
    options += [f"model.source={small_model}", "data.source=t"]
    words = [word for option in options for word in ("--set", option)]
    end = nursery.command("train", "--run", "run", "--ranks", "1", *words, "--set", "train.epochs=1", folder=tmp_path)
    assert end.code == 0, end.err
    assert "Each epoch: 1,000 tokens, 15 sequences, 3.75 steps; the run is 1.07 epochs\n" in end.out
    run = RunFolder(tmp_path / "run")
    assert (len(run.read_metrics()), run.saved_config().train.steps) == (4, 4)
    end = nursery.command("train", "--run", "run", "--ranks", "1", "--set", "train.epochs=2", folder=tmp_path)
    assert end.code == 0, end.err
    assert "changed since the checkpoint of step 4: train.steps 4 -> 8\n" in end.out
    assert len(run.read_metrics()) == 8
    end = nursery.command("train", "--run", "run", "--ranks", "1", "--set", "train.epochs=1", folder=tmp_path)
    assert end.code == 2
    assert "the run has done 8 steps already, and train.steps is 4: 8 or more continues it" in end.err
