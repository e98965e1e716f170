"""Synthetic documents that teach a small model to find facts far back: `data.source = "needles"`.

    ids 0 to 7     marks        then, of the others: a quarter keys, a quarter values, the rest noise
    a fact         FACT key IS value            a question   ASK key IS value

A document has 8192 tokens in slots of four: one to eight facts, each stated first and then asked for, or stated, again
and again, and noise between them. Only answers to questions are learned: noise cannot be predicted, and its loss would
drown theirs. What matters for long contexts is how often an answer is repeated:

    frequent   gaps between two mentions of a fact are mostly short. A window of 256 tokens has several, so a model
               soon learns where answers come from. Its attention may be spread over many copies
    rare       gaps are long. The only copy in a window stands anywhere, as a needle does, among up to 2047 tokens

In half of the documents facts are frequent, in the others rare. Any window of a document is a shorter one of the same
kind, so one source serves all stages. All follows from a seed: every rank makes the same 12 million tokens, in about a
second.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.reader import TokenFile, in_memory

MARKS = 8
FACT, ASK, IS, SET, WHO, PASSAGE, AGAIN = range(7)

VOCAB, LENGTH, DOCUMENTS, SEED = 128, 8192, 1500, 1  # the tasks of an evaluation have seed 0
ASKED = 0.85  # of the mentions of a fact behind its first


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How long documents are, and how often a fact is mentioned. By default, as in `needles`."""

    length: int = LENGTH  # tokens
    most_facts: int = 8
    # The longest gap between mentions, in slots, from document to document; None: facts are rare in all documents
    frequent: tuple[float, float] | None = (16, 512)
    rare: tuple[float, float] = (64, 1024)  # likewise, in the other half of the documents


class Vocabulary:
    """Which ids are keys, values and noise."""

    def __init__(self, vocab: int):
        quarter = (vocab - MARKS) // 4
        self.keys = range(MARKS, MARKS + quarter)
        self.values = range(MARKS + quarter, MARKS + 2 * quarter)
        self.noise = range(MARKS + 2 * quarter, vocab)


def make_document(words: Vocabulary, chance: np.random.Generator, kind: Kind) -> np.ndarray:
    """Return the tokens of one document, [slots, 4]."""
    count = int(np.exp(chance.uniform(0, np.log(kind.most_facts + 1))))
    keys, values = (chance.choice(ids, count, replace=False) for ids in (words.keys, words.values))
    slots, facts = _mentions(chance, count, kind)
    _, first = np.unique(facts, return_index=True)
    asked = chance.random(len(slots)) < ASKED
    asked[first] = False
    tokens = chance.integers(words.noise.start, words.noise.stop, (kind.length // 4, 4))
    tokens[slots] = np.stack([np.where(asked, ASK, FACT), keys[facts], np.full(len(slots), IS), values[facts]], 1)
    return tokens


def _mentions(chance: np.random.Generator, count: int, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots in which a fact is mentioned, in rising order, and the number of the fact in each."""
    all_slots, frequent = kind.length // 4, None if chance.random() < 0.5 else kind.frequent
    longest = np.exp(chance.uniform(*np.log(frequent or kind.rare)))
    enough = int(3 * all_slots * np.log(longest) / longest) + 8
    gaps = longest ** chance.random((count, enough)) if frequent else chance.uniform(1, longest, (count, enough))
    places = np.cumsum(gaps, 1) - gaps[:, :1] * chance.random((count, 1))
    inside = places < all_slots
    slots, facts = places[inside].astype(int), np.nonzero(inside)[0]
    order = chance.permutation(len(slots))  # where two facts meet, either of them stays
    slots, first = np.unique(slots[order], return_index=True)
    return slots, facts[order][first]


def make_documents(vocab: int, documents: int, seed: int, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of all documents, their bounds, and which tokens are learned: the answers."""
    words, chance = Vocabulary(vocab), np.random.default_rng(seed)
    tokens = np.empty((documents, kind.length // 4, 4), np.min_scalar_type(vocab - 1))
    for number in range(documents):
        tokens[number] = make_document(words, chance, kind)
    learned = np.zeros(tokens.shape, bool)
    learned[..., 3] = tokens[..., 0] == ASK
    return tokens.reshape(-1), np.arange(0, tokens.size + 1, kind.length), learned.reshape(-1)


@cache
def needles() -> TokenFile:
    """Return the documents of `data.source = "needles"`."""
    made = make_documents(VOCAB, DOCUMENTS, SEED, Kind())
    return in_memory(*made, vocab=VOCAB, name="synthetic needles", divisible=True)


SYNTHETIC = {"needles": needles}  # by the name that data.source has for it
PREFIX = "synthetic:"  # before such a name: the documents, also if there is a file of that name


def open_synthetic(name: str) -> TokenFile | None:
    """Return the documents that data.source or data.mix names; None if it names a file."""
    make = SYNTHETIC.get(name.removeprefix(PREFIX))
    if make and not name.startswith(PREFIX) and Path(name).is_file():
        raise DataError(
            f"'{name}' names synthetic documents, and there is a file '{name}' in this folder: write ./{name} for the "
            f"file, or {PREFIX}{name} for the documents"
        )
    return make() if make else None
