"""Every shipped configuration runs, with its own options, on a tiny model of its family and a little data."""

import json
from pathlib import Path

import pytest

from ithaca.config import read_config
from ithaca.train.folder.run_folder import RunFolder
from tests.models import make_model, save
from tests.nursery import Nursery

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.toml"))
FAMILIES = {"llama": "llama3.1", "qwen3": "qwen3", "smollm2": "smollm2", "smollm3": "smollm3"}


def prepare(nursery: Nursery, folder: Path, chats: bool) -> Path:
    if chats:
        lines = [json.dumps({"prompt": "sing, ", "completion": f"muse, of {number}. "}) for number in range(200)]
        (folder / "in.jsonl").write_text("\n".join(lines))
    else:
        (folder / "in.txt").write_text("sing, muse, of the man of many turns. " * 99)
    assert nursery.command("data", f"in.{'jsonl' if chats else 'txt'}", "--out", "tokens", folder=folder).code == 0
    return folder / "tokens"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(nursery: Nursery, example: Path, tmp_path: Path) -> None:
    family = next(value for key, value in FAMILIES.items() if example.name.startswith(key))
    config = read_config(example, [])
    plan, ulysses = config.plan, min(config.mesh.ulysses, 2)
    ranks = ulysses * config.mesh.ring
    layers = 32 if plan.x else 2  # a list of layers is made for a model's own number of them
    ropes = {"no_rope_layers": [1, 0]} if family == "smollm3" else {}
    model = save(make_model(family, vocab_size=256, num_hidden_layers=layers, **ropes), tmp_path / "m")
    data = prepare(nursery, tmp_path, "finetune" in example.name)
    sets = [f"model.source={model}", f"data.source={data}", "train.tokens=48", "train.steps=2", "train.warmup=1"]
    sets += ["plan.chunk=16"] if plan.chunk else []
    sets += ["train.batch=1"] if layers > 2 else []  # a deep model takes its time
    sets += [f"mesh.ulysses={ulysses}"] if ulysses > 1 else []
    words = [word for item in (*sets, "train.device=cpu") for word in ("--set", item)]
    end = nursery.command("train", str(example), "--run", "run", "--ranks", str(ranks), *words, folder=tmp_path)
    assert end.code == 0, end.err
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 2


def test_the_matrix_of_examples() -> None:
    names = [example.stem for example in EXAMPLES]
    for part in ("llama", "qwen3", "smollm", "continue", "finetune", "1gpu", "8gpu", "2x8gpu"):
        assert any(part in name for name in names), part
