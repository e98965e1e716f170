"""Text that a model generates, through `transformers`: a few prompts, small models, one process.

The model is loaded whole, on the CPU, from its Hugging Face folder. Generation is greedy, so the same model gives the
same text. Prompts are encoded as `ithaca data` encodes the beginning of a document, with the special tokens before it.
Ithaca trains: to serve a model, other engines are faster by far.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch

from ithaca.base.errors import ConfigError, ModelError, first_line
from ithaca.base.sizes import format_count
from ithaca.data.preparation.encode import added
from ithaca.data.preparation.tokenizer import Json
from ithaca.model.folder import model_file
from ithaca.model.spec import Spec

NEW_TOKENS = 64  # for each prompt
MOST_PROMPT = 4096  # tokens
MOST_PARAMETERS = 8e9  # of a model that one process can be expected to hold and run

Coder = tuple[Callable[[str], list[int]], Callable[[list[int]], str]]  # encode and decode


def check_samples(prompts: Sequence[str], spec: Spec, folder: Path | None, tokenizer: str) -> None:
    """Raise an error for prompts that this model cannot answer here. `folder`: where its tokenizer.json is."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("--sample needs a package: pip install 'transformers>=5.17'")
    if spec.parameters() > MOST_PARAMETERS:
        raise ModelError(
            f"--sample generates with models of up to {MOST_PARAMETERS / 1e9:.0f}B parameters, and this one has "
            f"{spec.parameters() / 1e9:.1f}B: leave it out, and serve the exported folder with an inference engine"
        )
    encode, _ = _coder(folder, tokenizer)
    for prompt in prompts:
        count = len(encode(prompt))
        if not 1 <= count <= MOST_PROMPT:
            raise ConfigError(f"--sample has a prompt of {format_count(count, 'token')}: 1 to {MOST_PROMPT} are needed")


def generate(folder: Path, prompts: Sequence[str], tokenizer: str) -> list[dict[str, str]]:
    """Return each prompt with the text that the model in a Hugging Face folder continues it by."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    encode, decode = _coder(folder, tokenizer)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as problem:  # whatever it is, the user has one sentence
        raise ModelError(f"transformers cannot load '{folder}' ({first_line(problem)})") from None
    options = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=model.config.eos_token_id, pad_token_id=0
    )
    return [{"prompt": prompt, "text": decode(_continue(model, encode(prompt), options))} for prompt in prompts]


@torch.no_grad()
def _continue(model: Any, prompt: list[int], options: Any) -> list[int]:
    """Return the new tokens."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return found[0, len(prompt) :].tolist()


def _coder(folder: Path | None, tokenizer: str) -> Coder:
    """Return how text becomes tokens and tokens text: by the model's tokenizer.json, or one token a byte."""
    file = model_file(folder, "tokenizer.json") if folder else None
    if file is None:
        if tokenizer != "bytes":
            raise ModelError(
                f"--sample needs a tokenizer, and '{folder}' holds no tokenizer.json: put the model's there"
            )
        return lambda text: list(text.encode()), lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace")
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as problem:  # the package raises nothing narrower
        raise ModelError(f"'{file}' is not a tokenizer.json ({first_line(problem)})") from None
    return partial(_encode, Json(file)), inner.decode


def _encode(tokenizer: Json, text: str) -> list[int]:
    (ids,) = tokenizer.encode([text])
    begin, _ = added(ids[:0], ids, tokenizer)
    return [*begin.tolist(), *ids.tolist()]
