"""Tokenizers: one token a byte, or a `tokenizer.json` with the `tokenizers` package.

With a `tokenizer.json`, encoding takes about 120 times the text's bytes of memory; a long text is encoded in pieces
(pieces.py), so that memory is bounded. One token a byte takes none. `begin` and `finish` are the special tokens that
the file's post-processor adds to a text; encode.py adds them once to a document.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from ithaca.base.errors import DataError, first_line
from ithaca.data.preparation import pieces
from ithaca.data.preparation.pieces import LongText
from ithaca.data.tokenfile import Stored
from ithaca.model.folder import model_file, read_bytes

TOKENIZER_BYTES = 512 << 20  # ten times the largest vocabularies

Numbers = np.ndarray | Stored
Text = str | Numbers | LongText  # numbers are the raw bytes of a file, which only `Bytes` takes


class Tokenizer(Protocol):
    """The interface of both tokenizers."""

    fingerprint: str  # 'bytes' or 'sha256:<of tokenizer.json>'
    vocab: int  # ids are below it
    end: int | None  # the id of the eos_token
    begin: tuple[int, ...]  # the ids before a document
    finish: tuple[int, ...]  # the ids behind a document
    raw: bool  # whether `encode` takes raw bytes

    def encode(self, texts: Sequence[Text]) -> Sequence[Numbers]: ...


class Bytes:
    """Each byte of the UTF-8 text is a token. Nothing is added to a document."""

    fingerprint = "bytes"
    vocab = 256
    end: int | None = None
    begin: tuple[int, ...] = ()
    finish: tuple[int, ...] = ()
    raw = True

    def encode(self, texts: Sequence[Text]) -> list[Numbers]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: Text) -> Numbers:
        if isinstance(text, LongText):
            text = b"".join(text.chunks()).decode()
        return np.frombuffer(text.encode(), np.uint8) if isinstance(text, str) else text


class Json:
    """A `tokenizer.json`.

    `begin` and `finish` are what its post-processor adds. If that adds nothing behind a text, `finish` is the
    `eos_token` of the tokenizer_config.json beside it.
    """

    raw = False

    def __init__(self, file: Path):
        content = _read(file)
        try:
            self._inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as problem:  # the package raises nothing narrower
            raise DataError(f"'{file}' is not a tokenizer.json ({first_line(problem)})") from None
        # Truncation and padding in the file are meant for inference, and would cut documents
        self._inner.no_truncation()
        self._inner.no_padding()
        self.fingerprint = "sha256:" + hashlib.sha256(content).hexdigest()
        # Ids may have gaps, and then the largest is above the count
        size = self._inner.get_vocab_size(with_added_tokens=True)
        self.vocab = max(size, max(self._inner.get_vocab(with_added_tokens=True).values(), default=0) + 1)
        self.end = self._end(file.with_name("tokenizer_config.json"))
        self.begin, behind = self._added(file)
        self.finish = behind or (() if self.end is None else (self.end,))

    def encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return the ids of each text, without special tokens that are not written in it."""
        long = {number: text for number, text in enumerate(texts) if len(text) >= pieces.LONG}
        short = iter(self._encode([text for text in texts if len(text) < pieces.LONG]))
        return [
            pieces.encode_in_pieces(str(long[number]), self._encode) if number in long else next(short)
            for number in range(len(texts))
        ]

    def _encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as problem:  # the package raises nothing narrower
            raise DataError(f"the tokenizer cannot encode a text ({first_line(problem)})") from None
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the ids of each text, and [tokens, 2]: the characters that each token stands for."""
        try:
            encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        except Exception as problem:  # the package raises nothing narrower
            raise DataError(f"the tokenizer cannot encode a text ({first_line(problem)})") from None
        for encoding in encodings:
            ids = np.array(encoding.ids, np.uint32)
            offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids))
            yield ids, offsets.reshape(-1, 2)

    def _added(self, file: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor adds before and behind a text."""
        try:
            added = self._inner.encode("").ids
            if not added:
                return (), ()
            plain = self._probe(set(added))
            framed = self._inner.post_process(plain).ids
        except Exception as problem:  # the package raises nothing narrower
            raise DataError(f"'{file}' has a post-processor that fails ({first_line(problem)})") from None
        at = next((at for at in range(len(framed)) if framed[at : at + len(plain.ids)] == plain.ids), 0)
        if framed[:at] + framed[at + len(plain.ids) :] != added:
            raise DataError(
                f"'{file}' has a post-processor that changes the tokens of a text: only adding is supported"
            )
        return tuple(framed[:at]), tuple(framed[at + len(plain.ids) :])

    def _probe(self, added: set[int]) -> tokenizers.Encoding:
        """Return the encoding of a text that has a token or more, and none of the added ones."""
        for text in ("a", *list(self._inner.get_vocab(with_added_tokens=False))[:1000]):
            try:
                found = self._inner.encode(text, add_special_tokens=False)
            except Exception:  # a vocabulary that lacks the text
                continue
            if found.ids and added.isdisjoint(found.ids):
                return found
        raise ValueError("it encodes no text")

    def _end(self, file: Path) -> int | None:
        if model_file(file.parent, file.name) is None:
            return None
        try:
            token = json.loads(_read(file)).get("eos_token")
        except (ValueError, AttributeError, RecursionError):
            raise DataError(
                f"'{file}' is not a JSON object: fix it, or remove it if no token should end documents"
            ) from None
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            return None
        end = self._inner.token_to_id(str(token))
        if end is None:
            raise DataError(f"'{file}' names the eos_token '{token}', which the tokenizer.json beside it does not have")
        return end


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`, or that of a Hugging Face folder."""
    if not os.path.exists(path):  # Path.exists raises an error for a name that the system refuses
        raise DataError(f"--tokenizer '{path}' does not exist: name a tokenizer.json or a folder that holds one")
    if not path.is_dir():
        return Json(path)
    if model_file(path, "tokenizer.json") is None:
        raise DataError(
            f"--tokenizer '{path}' holds no tokenizer.json: transformers writes one with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    return Json(path / "tokenizer.json")


def _read(file: Path) -> bytes:
    if not file.is_file():  # a file that --tokenizer names may be a link to anywhere, but no pipe or device
        raise DataError(f"--tokenizer '{file}' is not a regular file: name a tokenizer.json or a folder that holds one")
    return read_bytes(file, TOKENIZER_BYTES)
