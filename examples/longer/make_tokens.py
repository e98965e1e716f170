"""Make a token file of synthetic documents of 256K tokens, in which facts are stated and asked for again, near and far.

    python examples/longer/make_tokens.py longer.tokens          # 600 documents, 157M tokens, about 0.2 GB

Half of them are as those of `data.source = "needles"` (ithaca/data/synthetic.py), but longer: a window of 256 tokens
has many answers. In the others a fact is mentioned once in 4K tokens, 8K and so on, up to once in the whole document,
and there are many facts, so that far answers are not drowned by near ones. Of the answers that a window has, those from
further back than a quarter of it are one in 9 at 256 tokens, one in 60 at 16K, and one in 270 at 256K.
"""

import sys
from pathlib import Path

import numpy as np

from ithaca.data.reader import save_tokens
from ithaca.data.synthetic import ASK, Kind, Vocabulary, make_document

VOCAB, LENGTH, DOCUMENTS, SEED = 1024, 2**18, 600, 1  # the tasks of an evaluation have seed 0
SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 2)  # of a document: half of its longest gap


def main(out: Path, documents: int = DOCUMENTS, length: int = LENGTH) -> None:
    words, chance = Vocabulary(VOCAB), np.random.default_rng(SEED)
    near, facts, slots = Kind(length=length), len(words.keys), length / 4
    far = [
        Kind(length=length, most_facts=facts, frequent=None, rare=(share * slots, 2 * share * slots))
        for share in SHARES
    ]
    kinds = [near if number % 2 else far[number // 2 % len(far)] for number in range(documents)]
    tokens = np.stack([make_document(words, chance, kind).astype(np.uint16) for kind in kinds])
    learned = np.zeros(tokens.shape, bool)
    learned[..., 3] = tokens[..., 0] == ASK
    save_tokens(out, tokens.reshape(-1), np.arange(0, tokens.size + 1, length), learned.reshape(-1), VOCAB)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "longer.tokens"), *map(int, sys.argv[2:3]))
