"""Token files that a model cannot learn, or should not."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ithaca.data.misfit import byte_tokens, misfit


def tokens(tokenizer: str, vocab: int = 256) -> SimpleNamespace:
    return SimpleNamespace(vocab=vocab, tokenizer=tokenizer)


@pytest.mark.parametrize(("tokenizer", "has_file", "warns"), [("bytes", True, True), ("bytes", False, False)])
def test_a_token_for_each_byte(tmp_path: Path, tokenizer: str, has_file: bool, warns: bool) -> None:
    """`--tokenizer` was forgotten. Ready tokens do not say who made them, and a preset has no tokenizer."""
    if has_file:
        (tmp_path / "tokenizer.json").write_text("{}")
    found = byte_tokens(tokens(tokenizer), tmp_path)
    assert (found is not None) == warns
    assert not warns or f"prepare them with ithaca data --tokenizer {tmp_path}" in str(found)
    assert byte_tokens(tokens("unknown"), tmp_path) is None
    assert byte_tokens(tokens("bytes"), None) is None


def test_ids_beyond_the_vocabulary() -> None:
    found = misfit(tokens("bytes", vocab=300), "'x'", 256, None)
    assert found is not None
    assert "token ids below 300, but the model's vocabulary is 256" in found
    assert "model.source" in found
