"""The commands that `ithaca data` ends with: they run as they are printed."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ithaca.base.errors import ModelError
from ithaca.base.shell import token_setting, train_command
from ithaca.data.misfit import misfit
from ithaca.data.tokenfile import Header
from ithaca.model.extend import context_length
from ithaca.model.families import read_spec
from ithaca.model.folder import has_weights, model_file, read_json
from ithaca.model.presets import PRESETS

TOKENS = 8 * 2**10  # the longest context that is offered: it takes minutes on a CPU, and little memory anywhere


def next_lines(path: Path, header: Header, tokenizer: Path | None) -> list[str]:
    """Return the commands that look at a token file and train on it; `tokenizer`: as the user named it."""
    look = f"Next: {shlex.join(['ithaca', 'data', str(path), '--stats'])}"
    if not header.labels:
        return [look, "No token in it counts in the loss: documents of 2 tokens or more are needed, with completions"]
    try:
        folder = _model_folder(tokenizer)
        return [look, *(_with_folder(path, header, folder) if folder else _with_preset(path, header))]
    except ModelError as problem:  # the token file is made, so this is no error of the command
        return [look, f"The model that '{tokenizer}' belongs to cannot be trained: {problem}"]


def _model_folder(tokenizer: Path | None) -> Path | None:
    """Return the model folder that a tokenizer belongs to; None for a tokenizer alone."""
    folder = None if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    return folder if folder and model_file(folder, "config.json") else None


def _with_folder(path: Path, header: Header, folder: Path) -> list[str]:
    config = read_json(folder, "config.json")
    if problem := misfit(header, f"'{path}'", read_spec(config).vocab, folder):
        raise ModelError(problem)
    line = _train(path, header, folder, config)
    return [f"      {line}"] if has_weights(folder) else [f"Once '{folder}' has its weights: {line}"]


def _with_preset(path: Path, header: Header) -> list[str]:
    """Return the line for the smallest preset whose vocabulary covers the tokens."""
    specs = {name: read_spec(config) for name, config in PRESETS.items()}
    fit = [name for name, spec in specs.items() if spec.vocab >= header.vocab]
    if not fit:
        most = max(spec.vocab for spec in specs.values())
        return [
            f"No preset has a vocabulary of {header.vocab} (the largest is {most}): train a model folder whose "
            "tokenizer made these tokens"
        ]
    smallest = min(fit, key=lambda name: specs[name].parameters())
    return [f"      {_train(path, header, smallest, PRESETS[smallest])}"]


def _train(path: Path, header: Header, model: Path | str, config: Mapping[str, Any]) -> str:
    """Return the command, at a length that the model was made for and that the data fill."""
    tokens = min(context_length(read_spec(config)), TOKENS, header.tokens)
    return train_command({"model.source": model, "data.source": path, "train.tokens": token_setting(tokens)})
