import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = "the wine-dark sea bore us home past the island where the sun's cattle graze; ünïcödé, 雪, 🜚\n" * 4


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer.json that ends documents with <end>, and truncates if it is let to."""
    folder = tmp_path_factory.mktemp("bpe")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.enable_truncation(5)
    inner.enable_padding(length=9)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return folder


@pytest.fixture(scope="session")
def plain_bpe(bpe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer.json alone, without an end of documents."""
    file = tmp_path_factory.mktemp("plain") / "tokenizer.json"
    file.write_bytes((bpe / "tokenizer.json").read_bytes())
    return file
