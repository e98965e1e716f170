"""The README's program and its quickstart run as they are printed, and its commands exist."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.models import make_model, save, save_tokenizer
from tests.nursery import Nursery

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=400)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_quickstart(nursery: Nursery, tmp_path: Path) -> None:
    """The five lines with a small model, a short context, few steps and one process; all else as it is printed.

    The first one needs a hub. A folder takes its place: with the name that it gives, and a tokenizer as a model has.
    """
    (printed,) = re.findall(r"^pip install \.\n(.*?)```", README, flags=re.DOTALL | re.MULTILINE)
    download, *lines = [shlex.split(line, comments=True) for line in printed.replace("\\\n", " ").splitlines()]
    assert download[:2] == ["hf", "download"]
    assert [words[:2] for words in lines] == [["ithaca", name] for name in ("data", "plan", "train", "export")]
    name = download[download.index("--local-dir") + 1]
    save_tokenizer(save(make_model("smollm2", vocab_size=256), tmp_path / name))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "odyssey.txt").write_text("sing, muse, of the man of many turns. " * 20)
    smaller = {"train.tokens=1M": "train.tokens=512", "train.steps=100": "train.steps=2"}
    assert smaller.keys() <= set(itertools.chain(*lines))
    more = {"train": ["--ranks", "1", "--set", "train.device=cpu"]}
    for words in lines:
        given = [smaller.get(word, word) for word in words[1:]] + more.get(words[1], [])
        end = nursery.command(*given, folder=tmp_path)
        assert end.code == 0, (words, end.err)
    config = json.loads((tmp_path / "my-model-1m" / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("llama", 512)
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "runs/mine/metrics.jsonl").open()]
    assert 0 < max(rates) <= 2e-5  # of trained weights, though no line names a rate


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (\S+)", README, flags=re.MULTILINE))
    assert targets == {"train", "test"}
    for target in targets:
        subprocess.run(["make", "-n", target], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
