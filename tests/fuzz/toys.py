"""The sound things that inputs damage copies of, made by the commands themselves."""

import contextlib
import io
import json
from pathlib import Path

from tests.fuzz.recipe import Toys

TEXT = "the wine-dark sea bore us home past the island where the sun's cattle graze; ünïcödé, 雪\n"
END = "<end>"
STEPS = 3


def make_toys(folder: Path) -> Toys:
    """Make every toy; runs in a process of its own, since transformers and tokenizers start threads."""
    import transformers

    from tests.models import make_model, save

    transformers.logging.disable_progress_bar()
    model = make_model("qwen3", vocab_size=256, num_hidden_layers=1)
    save(model, folder / "model")
    save(model, folder / "sharded", max_shard_size="100KB")
    _documents(folder)
    _tokenizer(folder / "tokenizer")
    _say("data", "books", "--out", "good.tokens")
    _say("data", "prompts.jsonl", "--out", "prompts.tokens")
    _say("data", "books", "--out", "bpe.tokens", "--tokenizer", "tokenizer")
    _run(folder)
    return Toys(folder)


def _documents(folder: Path) -> None:
    (folder / "books").mkdir()
    for number in range(3):
        (folder / "books" / f"{number}.txt").write_text(TEXT * (number + 1), encoding="utf-8")
    lines = [{"prompt": "Sing: ", "completion": TEXT}, {"prompt": "", "completion": "home"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([TEXT], trainer)
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))


def _run(folder: Path) -> None:
    """Three steps in `run`, and six of the same job in `whole-run`; the rate does not depend on the number of steps."""
    job = ("--ranks", "1", "--set", "model.source=model", "--set", "data.source=good.tokens")
    job = (*job, "--set", "train.tokens=16", "--set", "run.checkpoint_every=1", "--set", "train.device=cpu")
    job = (*job, "--set", "train.final_rate=1", "--set", "train.learning_rate=0.003", "--set", "train.warmup=4")
    for name, steps in (("run", STEPS), ("whole-run", 2 * STEPS)):
        _say("train", "--run", name, *job, "--set", f"train.steps={steps}")
    _say("export", "run", "exported")
    assert (folder / "exported" / "model.safetensors").is_file()


def _say(*words: str) -> None:
    """A command that must succeed."""
    from tests.fuzz.forked import in_this_process

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = in_this_process(words)
    assert code == 0, f"{words}: {code}\n{said.getvalue()}"
