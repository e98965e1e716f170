"""Whether a model can learn a token file: its vocabulary covers the ids, and its tokenizer made them."""

import hashlib
from pathlib import Path
from typing import Protocol

from ithaca.model.folder import model_file


class Tokens(Protocol):
    """The properties that a token file, its header and a mixture share."""

    @property
    def vocab(self) -> int: ...
    @property
    def tokenizer(self) -> str: ...


def byte_tokens(data: Tokens, folder: Path | None, trains: bool = True) -> str | None:
    """Return a warning if the data have one token a byte, and the model was made for its tokenizer's tokens.

    `trains`: the model is to be trained on the data, not only measured.
    """
    if data.tokenizer != "bytes" or folder is None or model_file(folder, "tokenizer.json") is None:
        return None
    so = "the model must learn bytes anew; to train on" if trains else "unless it was trained on bytes, measure it on"
    how = "prepare them with" if trains else "prepared with"
    return (
        f"the data have one token a byte, not the tokens of the tokenizer in '{folder}': {so} your documents, "
        f"{how} ithaca data --tokenizer {folder}"
    )


def misfit(data: Tokens, name: str, vocab: int, folder: Path | None) -> str | None:
    """Return why a model cannot learn the tokens, in one sentence; None if it can.

    `name`: the token file as a sentence names it; `vocab`, `folder`: of the model, None for a preset.
    """
    if data.vocab > vocab:
        return (
            f"the data have token ids below {data.vocab}, but the model's vocabulary is {vocab}: "
            "prepare them with the model's tokenizer (ithaca data --tokenizer), or name the model that they were "
            "prepared for (model.source)"
        )
    file = model_file(folder, "tokenizer.json") if folder else None
    if file is None or data.tokenizer in ("bytes", "unknown"):
        return None
    wanted = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    if data.tokenizer == wanted:
        return None
    return (
        f"{name} was made with another tokenizer ({data.tokenizer[:15]}…) than the model's "
        f"({wanted[:15]}…): prepare it with --tokenizer {folder}"
    )
