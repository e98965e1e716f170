from pathlib import Path

import pytest

from ithaca.config import Config, read_config
from tests.models import make_model, save

SMALL = [
    "train.tokens=64",
    "train.batch=4",
    "train.steps=18",
    "train.warmup=3",
    "train.learning_rate=0.003",
    "run.checkpoint_every=4",
    "train.device=cpu",
]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes a step in some milliseconds, with a vocabulary for bytes."""
    return save(make_model("qwen3", vocab_size=256, num_hidden_layers=1), tmp_path_factory.mktemp("model") / "in")


@pytest.fixture(scope="session")
def small_config(small_model: Path) -> Config:
    return read_config(None, [*SMALL, f"model.source={small_model}", "model.dtype=float32"])


@pytest.fixture(scope="session")
def three_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with three layers."""
    return save(make_model("qwen3", vocab_size=256), tmp_path_factory.mktemp("model") / "in")
