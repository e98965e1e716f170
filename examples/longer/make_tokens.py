"""Make a token file of synthetic documents of 256K tokens, in which facts are stated and asked for again, near and far.

    python examples/longer/make_tokens.py longer.tokens          # 600 documents, 157M tokens, about 0.2 GB

A document is in the synthetic language of the tasks (ithaca/evaluate/language.py), in slots of four tokens: facts, each
stated first and then asked for or stated again and again, and noise between them. Only answers are learned: noise
cannot be predicted, and its loss would drown theirs. The longest gap between two mentions of a fact goes, from document
to document, from 16 slots to a quarter of the document. In half of the documents short gaps are frequent, so that a
window of 2K tokens has many answers; in the others the only copy of a fact stands anywhere, as a needle does. A window
of a document is a shorter one of the same kind, so one file serves all stages.
"""

import sys
from pathlib import Path

import numpy as np

from ithaca.data.reader import save_tokens
from ithaca.evaluate.language import ASK, FACT, IS, Synthetic

VOCAB, LENGTH, DOCUMENTS, SEED = 1024, 2**18, 600, 1  # the tasks of an evaluation have seed 0
MOST_FACTS = 100
ASKED = 0.85  # of the mentions of a fact behind its first
SHORTEST_GAP = 16  # slots; of the longest gap in a document


def make_document(words: Synthetic, chance: np.random.Generator, length: int = LENGTH) -> np.ndarray:
    """Return the tokens of one document, [slots, 4]."""
    slots, count = length // 4, int(np.exp(chance.uniform(0, np.log(MOST_FACTS + 1))))
    keys, values = (np.array(items) for items in (words.keys(chance, count), words.values(chance, count)))
    places, facts = _mentions(chance, count, slots)
    _, first = np.unique(facts, return_index=True)
    asked = chance.random(len(places)) < ASKED
    asked[first] = False
    noise, _ = words.noise(chance, length)
    tokens = noise.reshape(slots, 4)
    tokens[places] = np.stack([np.where(asked, ASK, FACT), keys[facts], np.full(len(places), IS), values[facts]], 1)
    return tokens


def _mentions(chance: np.random.Generator, count: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots in which a fact is mentioned, in rising order, and the number of the fact in each."""
    rare, longest = chance.random() < 0.5, np.exp(chance.uniform(np.log(SHORTEST_GAP), np.log(slots / 4)))
    mean = longest / 2 if rare else longest / np.log(longest)
    enough = int(1.5 * slots / mean) + 8
    gaps = chance.uniform(1, longest, (count, enough)) if rare else longest ** chance.random((count, enough))
    places = np.cumsum(gaps, 1) - gaps[:, :1] * chance.random((count, 1))
    inside = places < slots
    found, facts = places[inside].astype(int), np.nonzero(inside)[0]
    order = chance.permutation(len(found))  # where two facts meet, either of them stays
    found, first = np.unique(found[order], return_index=True)
    return found, facts[order][first]


def main(out: Path, documents: int = DOCUMENTS, length: int = LENGTH) -> None:
    words, chance = Synthetic(VOCAB), np.random.default_rng(SEED)
    tokens = np.empty((documents, length // 4, 4), np.uint16)
    for number in range(documents):
        tokens[number] = make_document(words, chance, length)
    learned = np.zeros(tokens.shape, bool)
    learned[..., 3] = tokens[..., 0] == ASK
    save_tokens(out, tokens.reshape(-1), np.arange(0, tokens.size + 1, length), learned.reshape(-1), VOCAB)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "longer.tokens"), *map(int, sys.argv[2:3]))
