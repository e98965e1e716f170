"""The example of a long curriculum, examples/longer/: its data, and a small run of it in pieces with its tasks."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ithaca.config import Config, read_config
from ithaca.data.reader import open_tokens
from ithaca.data.synthetic import ASK, FACT
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.train.test_validation import done, stopping

EXAMPLE = Path(__file__).parents[2] / "examples" / "longer"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("longer", EXAMPLE / "make_tokens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("longer") / "longer.tokens"
    script().main(path, 12, 4096)
    return path


def test_documents(tokens: Path, tmp_path: Path) -> None:
    """Every question has been answered before, the same each time; answers alone are learned, near and far."""
    file = open_tokens(tokens)
    assert (file.tokens, file.documents, file.vocab) == (12 * 4096, 12, 1024)
    far = []
    for start in range(0, file.tokens, 4096):
        window, known, last = file.read(start, start + 4096), dict[int, int](), dict[int, int]()
        assert window.learned is not None
        learned = window.learned.reshape(-1, 4)
        for slot, (mark, key, _, value) in enumerate(window.tokens.reshape(-1, 4).tolist()):
            assert learned[slot].tolist() == [False, False, False, mark == ASK]
            if mark in (FACT, ASK):
                assert known.setdefault(key, value) == value
                assert mark == FACT or key in last
                far += [slot - last[key]] if key in last else []
                last[key] = slot
    assert max(far) > 100
    assert np.median(far) < 100
    script().main(tmp_path / "again", 12, 4096)
    assert file.identity() == open_tokens(tmp_path / "again").identity()


def test_one_place_has_the_answer() -> None:
    """In each block a fact is stated once, and asked for once behind that."""
    module = script()
    blocks = {256: 6, 2048: 12, 4096: 20}
    tokens = module.make_single(module.Vocabulary(1024), np.random.default_rng(0), 4096, blocks)
    for size, facts in blocks.items():
        found = 0
        for block in tokens.reshape(-1, size // 4, 4):
            for key in set(block[np.isin(block[:, 0], (FACT, ASK)), 1]):
                mentions = block[block[:, 1] == key]
                found += len(mentions) == 2 and mentions[:, 0].tolist() == [FACT, ASK]
                assert len(set(mentions[:, 3])) == 1
        assert found >= facts * 4096 // size


def test_the_model() -> None:
    spec = read_spec(PRESETS["needles-28m"])
    assert 20e6 < spec.parameters() < 40e6
    config = read_config(EXAMPLE / "longer.toml", [])
    assert config.model.source == "needles-28m"
    assert config.train.stages is not None
    assert config.train.stages[-1].tokens == spec.max_position_embeddings == 2**18


def small(tokens: Path, folder: Path) -> Config:
    """The example with a small model, short stages and few samples."""
    model = save(make_model("llama3", vocab_size=1024, num_hidden_layers=1), folder / "model")
    config = read_config(EXAMPLE / "longer.toml", [f"data.source={tokens}", f"model.source={model}"])
    assert config.train.stages is not None
    stages = tuple(
        replace(stage, tokens=32 << number, steps=3, batch=2) for number, stage in enumerate(config.train.stages)
    )
    return replace(
        config,
        train=replace(config.train, stages=stages, device="cpu"),
        evaluate=replace(config.evaluate, tokens=(64, 128, 256, 512), count=5),
    )


def test_in_pieces(nursery: Nursery, tokens: Path, tmp_path: Path) -> None:
    """Stopped in two stages as by Ctrl-C, the run ends as one that was not; each stage has its tasks once."""
    config = small(tokens, tmp_path)
    for step in (2, 8):
        assert f"Stopped after step {step}" in done(nursery.job(stopping, config, tmp_path / "run", step))
    done(nursery.job(train, config, tmp_path / "run"))
    done(nursery.job(train, config, tmp_path / "whole"))
    found = []
    for run in (RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")):
        # The first stage is shorter than all tasks
        assert [line["step"] for line in run.read_evaluations()] == [6, 9, 12, 15]
        found.append([line["loss"] for line in run.read_metrics()])
    assert found[0] == found[1]
    assert (tmp_path / "run" / "evaluation" / "step-15" / "needle.png").exists()
