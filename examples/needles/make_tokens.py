"""Make a token file of synthetic documents in which facts are stated and asked for again, near and far.

    python examples/needles/make_tokens.py needles.tokens
    ithaca train examples/needles/needles.toml --run runs/needles
    ithaca evaluate runs/needles --task needle --tokens 2K --count 200

A document has 2048 tokens in the synthetic language of the tasks (ithaca/evaluate/language.py): facts and questions,
and noise between them, in slots of four tokens. A question has its answer behind it, and a fact may be stated again.
Documents have from one to thirty facts, which are stated often or rarely. A window of a document is a shorter one of
the same kind, so one file serves all stages.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from ithaca.data.preparation.prepare import prepare
from ithaca.evaluate.language import ASK, FACT, IS, Synthetic

VOCAB, LENGTH, DOCUMENTS, SEED = 128, 2048, 6000, 1  # the tasks of an evaluation have seed 0
MOST_FACTS = 30
STATED = 0.01, 0.2  # shares of the slots that state a fact, from document to document
ASKED = 0.2, 0.7  # shares of the others that ask for one


def make_document(words: Synthetic, chance: np.random.Generator) -> np.ndarray:
    """Return the tokens of one document."""
    slots, count = LENGTH // 4, int(np.exp(chance.uniform(0, np.log(MOST_FACTS + 1))))
    keys, values = (np.array(items) for items in (words.keys(chance, count), words.values(chance, count)))
    tokens = words.random(chance, LENGTH).reshape(slots, 4)
    draw, which = chance.random(slots), chance.integers(0, count, slots)
    stated = draw < np.exp(chance.uniform(*np.log(STATED)))
    stated[0] = True
    # Half of the questions are for the fact that was stated last, the others for any that was stated before
    places, so_far = np.flatnonzero(stated), np.cumsum(stated)
    chosen = np.where(chance.random(slots) < 0.5, so_far - 1, (chance.random(slots) * so_far).astype(int))
    which = np.where(stated, which, which[places[chosen]])
    asked = ~stated & (chance.random(slots) < chance.uniform(*ASKED))
    for mark, here in ((FACT, stated), (ASK, asked)):
        facts = which[here]
        tokens[here] = np.stack([np.full(len(facts), mark), keys[facts], np.full(len(facts), IS), values[facts]], 1)
    return tokens.flatten()


def main(out: Path) -> None:
    words, chance = Synthetic(VOCAB), np.random.default_rng(SEED)
    documents = np.stack([make_document(words, chance) for _ in range(DOCUMENTS)])
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "documents.npy", documents.astype(np.uint16))
        prepare([Path(folder) / "documents.npy"], out)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "needles.tokens"))
