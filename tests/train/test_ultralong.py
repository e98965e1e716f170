"""The recipe of examples/ultralong/ in small: joined documents, more long ones, yarn, stages, tasks, two ranks."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ithaca.config import Config, read_config
from ithaca.data.preparation.prepare import prepare
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.run import train
from tests.models import make_model, save
from tests.nursery import Nursery
from tests.train.test_validation import done

EXAMPLES = Path(__file__).parents[2] / "examples" / "ultralong"
LENGTHS = {"1m": (2**20,), "4m": (2**22,), "4m-stages": (2**18, 2**20, 2**22)}


@pytest.mark.parametrize("name", LENGTHS)
def test_what_a_configuration_is(name: str) -> None:
    config = read_config(EXAMPLES / f"{name}.toml", [])
    stages = config.train.stages
    assert stages is not None
    assert tuple(stage.tokens for stage in stages) == LENGTHS[name]
    learned = sum(stage.tokens * stage.steps * (stage.batch or config.train.batch or 0) for stage in stages)
    assert learned == pytest.approx(1e9, rel=0.02)
    assert sum((config.data.mix or {}).values()) == pytest.approx(1)


def small(name: str, folder: Path) -> Config:
    """The recipe with a small model, small data and stages of a few steps; 8192 times shorter than 4M is 512."""
    model = save(make_model("llama3.1", vocab_size=256, num_hidden_layers=2), folder / "model")
    sys.argv = ["plain_rope.py", str(model)]
    runpy.run_path(str(EXAMPLES / "plain_rope.py"), run_name="__main__")
    plain = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32}
    (model / "config.json").write_text(json.dumps(plain))
    for kind, text in (("web", "sing, muse "), ("books", "of the man "), ("code", "x = 1; "), ("papers", "we show ")):
        for number in range(6):
            (folder / f"{kind}{number}.txt").write_text(text * (3 + 70 * (number % 2)))
        prepare(sorted(folder.glob(f"{kind}?.txt")), folder / f"{kind}.tokens")
    config = read_config(EXAMPLES / f"{name}.toml", [f"model.source={model}", "data.long=200", "train.device=cpu"])
    mix = {str(folder / file): weight for file, weight in (config.data.mix or {}).items()}
    shrink = 2**22 // 512 if name != "1m" else 2**20 // 512
    stages = tuple(replace(stage, tokens=stage.tokens // shrink, steps=2) for stage in config.train.stages or ())
    return replace(
        config,
        data=replace(config.data, mix=mix),
        mesh=replace(config.mesh, ulysses=2),
        train=replace(config.train, stages=stages),
        evaluate=replace(config.evaluate, tasks=("repeat",), count=2),
    )


@pytest.mark.parametrize("name", ["1m", pytest.param("4m", marks=pytest.mark.full), "4m-stages"])
def test_a_small_run(nursery: Nursery, tmp_path: Path, name: str) -> None:
    config = small(name, tmp_path)
    if name == "4m-stages":  # the rope of its last stage, 512 times the model's length there and 16 times here
        config = replace(config, model=replace(config.model, rope="yarn, factor=16, beta_fast=4"))
    done(nursery.job(train, config, tmp_path / "run", ranks=2))
    run, stages = RunFolder(tmp_path / "run"), config.train.stages or ()
    assert len(run.read_metrics()) == 2 * len(stages)
    ends = [2 * (number + 1) for number, stage in enumerate(stages) if stage.tokens >= 32]
    assert [line["step"] for line in run.read_evaluations()] == ends
    end = nursery.command("export", "run", "out", folder=tmp_path)
    assert end.code == 0, end.err
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = exported["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["beta_fast"]) == ("yarn", 16, 4)
    assert exported["max_position_embeddings"] == 512
    saved = read_config(tmp_path / "run" / "config.toml", [], saved=True)
    assert (saved.data.packing, saved.data.long_share, saved.data.mix) == ("joined", 0.7, config.data.mix)
