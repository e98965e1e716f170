"""Synthetic documents that teach a small model to find facts far back: `data.source = "needles"`.

    ids 0 to 7     marks        then, of the others: a quarter keys, a quarter values, the rest noise
    a fact         FACT key IS value            a question   ASK key IS value

A document has 8192 tokens in slots of four: one to eight facts, each stated first and then asked for, or stated, again
and again, and noise between them. Only answers to questions are learned: noise cannot be predicted, and its loss would
drown theirs. What matters for long contexts is how often an answer is repeated:

    frequent   gaps between two mentions of a fact are mostly short. A window of 256 tokens has several, so a model
               soon learns where answers come from. It may look at many copies at once, and need not look sharply
    rare       gaps are long. The only copy in a window stands anywhere, as a needle does, among up to 2047 tokens

Half of the documents are of each kind. Any window of a document is a shorter one of the same kind, so one source serves
all stages. All follows from a seed: every rank makes the same 12 million tokens, in about a second.
"""

from functools import cache
from pathlib import Path

import numpy as np

from ithaca.base.errors import DataError
from ithaca.data.reader import TokenFile, in_memory

MARKS = 8
FACT, ASK, IS, SET, WHO, PASSAGE, AGAIN = range(7)

VOCAB, LENGTH, DOCUMENTS, SEED = 128, 8192, 1500, 1  # the tasks of an evaluation have seed 0
SLOTS = LENGTH // 4
MOST_FACTS = 8
ASKED = 0.85  # of the mentions of a fact behind its first
FREQUENT, RARE = (16, 512), (64, 1024)  # the longest gap between two mentions, in slots, from document to document


class Vocabulary:
    """Which ids are keys, values and noise."""

    def __init__(self, vocab: int):
        quarter = (vocab - MARKS) // 4
        self.keys = range(MARKS, MARKS + quarter)
        self.values = range(MARKS + quarter, MARKS + 2 * quarter)
        self.noise = range(MARKS + 2 * quarter, vocab)


def make_document(words: Vocabulary, chance: np.random.Generator) -> np.ndarray:
    """Return the tokens of one document, [SLOTS, 4]."""
    count = int(np.exp(chance.uniform(0, np.log(MOST_FACTS + 1))))
    keys, values = (chance.choice(kind, count, replace=False) for kind in (words.keys, words.values))
    slots, facts = _mentions(chance, count)
    _, first = np.unique(facts, return_index=True)
    asked = chance.random(len(slots)) < ASKED
    asked[first] = False
    tokens = chance.integers(words.noise.start, words.noise.stop, (SLOTS, 4))
    tokens[slots] = np.stack([np.where(asked, ASK, FACT), keys[facts], np.full(len(slots), IS), values[facts]], 1)
    return tokens


def _mentions(chance: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots in which a fact is mentioned, in rising order, and the number of the fact in each."""
    rare = chance.random() < 0.5
    longest = np.exp(chance.uniform(*np.log(RARE if rare else FREQUENT)))
    enough = int(3 * SLOTS * np.log(longest) / longest) + 8
    gaps = chance.uniform(1, longest, (count, enough)) if rare else longest ** chance.random((count, enough))
    places = np.cumsum(gaps, 1) - gaps[:, :1] * chance.random((count, 1))
    inside = places < SLOTS
    slots, facts = places[inside].astype(int), np.nonzero(inside)[0]
    order = chance.permutation(len(slots))  # where two facts meet, either of them stays
    slots, first = np.unique(slots[order], return_index=True)
    return slots, facts[order][first]


@cache
def needles() -> TokenFile:
    """Return the documents, of which only the answers are learned."""
    words, chance = Vocabulary(VOCAB), np.random.default_rng(SEED)
    tokens = np.stack([make_document(words, chance) for _ in range(DOCUMENTS)])
    learned = np.zeros(tokens.shape, bool)
    learned[..., 3] = tokens[..., 0] == ASK
    bounds = np.arange(0, tokens.size + 1, LENGTH)
    return in_memory(tokens.flatten(), bounds, learned.flatten(), vocab=VOCAB, name="synthetic needles", divisible=True)


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
