"""Names from other programs: each is refused with what to write here, and what is suggested exists."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer

from ithaca.base.aliases import ALIASES
from ithaca.base.errors import ConfigError
from ithaca.cli import app, main
from ithaca.config import option_defaults, read_config
from tests.printed import settings

# What people type, and the words that they are told to write
FLAGS = {
    "--lr 1e-5": "--set train.learning_rate=1e-5",
    "--lr=1e-5": "--set train.learning_rate=1e-5",
    "--lr": "--set train.learning_rate=1e-5",
    "--lr fast": "--set train.learning_rate=1e-5",
    "--learning-rate 3e-4": "--set train.learning_rate=3e-4",
    "--learning_rat 3e-4": "--set train.learning_rate=3e-4",
    "--num_train_epochs 3": "--set train.epochs=3",
    "--batch-size 4": "--set train.batch=4 ",
    "--per_device_train_batch_size 1": "--set train.micro_batch=1 ",
    "--max_seq_length 64K": "--set train.tokens=64K",
    "--block_size 1024": "--set train.tokens=1024",
    "--gradient_accumulation_steps 4": "--set train.batch=4 with --set train.micro_batch=1 (a step has",
    "--warmup_ratio 0.03": "--set train.warmup=10 (steps, not a share of them)",
    "--wd 0.1": "--set train.weight_decay=0.1",
    "--max_steps 20": "--set train.steps=20",
    "--save_steps 20": "--set run.checkpoint_every=20",
    "--save_total_limit 3": "--set run.keep=3",
    "--output_dir 'my run'": "--run 'my run'",
    "--model_name_or_path 'my model'": "--set 'model.source=my model'",
    "--dataset x.tokens": "--set data.source=x.tokens",
    "--bf16": "--set model.dtype=bfloat16",
    "--fsdp full_shard": "--set plan.zero=3",
    "--cp 8": "--set mesh.ulysses=8",
    "--context-parallel-size 8": "--set mesh.ulysses=8",
    "--nproc_per_node 8": "--ranks 8",
    "--steps 5": "--set train.steps=5",
    "--train.steps 5": "--set train.steps=5",
    "--seed 5": "--set model.seed=5 or --set train.seed=5",
}
OTHERS = {
    "plan tiny --seq_len 64K": "write --tokens 64K",
    "plan tiny --num_gpus 8": "write --gpus 8xH100-80GB",
    "rehearse tiny --cp 8": "write --set mesh.ulysses=8",
    "rehearse tiny --context-length 5K": "write --tokens 5K",
    "data books --output b.tokens": "write --out b.tokens",
    "train steps=5": "an option is given as --set steps=5",
    "train tiny": "a model is given as --set model.source=tiny",
}
OPTIONS = {
    "lr=1e-5": "'lr' is not an option: write train.learning_rate=1e-05",
    "train.lr=3": "'train.lr' is not an option: write train.learning_rate=3",
    "optim.lr=3": "'optim' is not an option: write train.learning_rate=3",
    "train.epoch=2": "write train.epochs=2",
    "batch_size=8": "write train.batch=8 (sequences in a step, counted over all ranks)",
    "train.gradient_accumulation_steps=8": "train.batch=8 with train.micro_batch=1 (a step has batch / mic",
    "train.save_steps=10": "write run.checkpoint_every=10",
    "train.bf16=true": "write model.dtype=bfloat16",
    "output_dir=x": "write --run x",
    "steps=3": "write train.steps=3",
    "learning-rate=3": "write train.learning_rate=3",
    "train.source=x": "write model.source=x or data.source=x",
    "model=tiny": "'model' is a table of options, not 'tiny': write model.source=tiny",
    "data=x.tokens": "'data' is a table of options, not 'x.tokens': write data.source=x.tokens",
    "train.lora_r=8": "'train.lora_r' is not an option: all weights are trained, without LoRA or quantization",
    "train.optimizer=adamw": "AdamW is the optimizer, and plan.optimizer says where its moments live",
    "seq_lenght=4096": "write train.tokens=4096",
}


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, folder: Path) -> str:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["ithaca", *shlex.split(words)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert [*folder.iterdir()] == []
    return said.err


@pytest.mark.parametrize("words", [*(f"train {flag}" for flag in FLAGS), *OTHERS])
def test_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str) -> None:
    wanted = OTHERS.get(words) or f"is not an option of ithaca train: write {FLAGS[words.removeprefix('train ')]}"
    assert wanted in refused(monkeypatch, capsys, words, tmp_path)


@pytest.mark.parametrize("option", OPTIONS)
def test_options(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(OPTIONS[option])):
        read_config(None, [option])
    name, _, value = option.partition("=")
    value = value if re.fullmatch(r"[\d.e-]+|true", value) else f'"{value}"'
    (tmp_path / "run.toml").write_text(f"{name} = {value}\n")
    with pytest.raises(ConfigError, match=re.escape(OPTIONS[option])):
        read_config(tmp_path / "run.toml", [])


def test_other_files_in_the_place_of_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "here").mkdir()
    words = f"train {shlex.quote(str(tmp_path / 'run'))}"
    assert f"a run continues with --run {tmp_path / 'run'}" in refused(monkeypatch, capsys, words, tmp_path / "here")


def test_every_suggestion_works() -> None:
    """Each setting is one that a configuration takes, each flag one of `ithaca train`; and no name is an option."""
    flags = {flag for item in typer.main.get_command(app).commands["train"].params for flag in item.opts}  # pyrefly: ignore
    for name, alias in ALIASES.items():
        assert f"--{name}" not in flags
        assert not any(f"{table}.{name}" in option_defaults() for table in ("train", "data", "model", "run")), name
        written = alias.write(None)
        assert written or alias.note
        assert bool(alias.example) == any("{}" in setting for setting in alias.settings), name
        for setting in written:
            known = flags if setting.startswith("--") else option_defaults()
            assert setting.replace("=", " ").split()[0] in known, name
        sets = [setting for setting in written if not setting.startswith("--")]
        if any(setting.startswith("plan.") and not setting.startswith("plan.recipe") for setting in sets):
            sets.append("plan.recipe=sweep")
        read_config(None, sets, tell=lambda _: None)


def test_the_words_that_are_suggested_are_words_of_a_command() -> None:
    """`--set` in a suggestion stands before its setting."""
    for wanted in FLAGS.values():
        if "--set" in wanted:
            assert settings(shlex.split(wanted.partition(" (")[0]))
