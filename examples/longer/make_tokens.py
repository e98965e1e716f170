"""Make a token file of synthetic documents of 256K tokens, in which facts are stated and asked for again, near and far.

    python examples/longer/make_tokens.py longer.tokens          # 600 documents, 157M tokens, about 0.2 GB

Half of them are as those of `data.source = "needles"` (ithaca/data/synthetic.py), but longer: facts are mentioned again
and again, so a model soon learns where answers come from. But it may spread its attention over many copies. In the
others a fact is stated once and asked for once, both anywhere in a block of 256 tokens, of 2K, and so on up to the
whole document, so only one place has the answer. A window of any stage is such a block. Half of these have no blocks of
256, so that far answers are not drowned by near ones.
"""

import sys
from pathlib import Path

import numpy as np

from ithaca.data.reader import save_tokens
from ithaca.data.synthetic import ASK, FACT, IS, Kind, Vocabulary, make_document

VOCAB, LENGTH, DOCUMENTS, SEED = 1024, 2**18, 600, 1  # the tasks of an evaluation have seed 0
Blocks = dict[int, int]  # by their tokens: the facts of each block
EVERY: Blocks = {256: 6, 2048: 12, 2**14: 32, 2**16: 48, 2**18: 48}
FAR: Blocks = {2048: 16, 2**14: 48, 2**16: 60, 2**18: 60}


def make_single(words: Vocabulary, chance: np.random.Generator, length: int, blocks: Blocks) -> np.ndarray:
    """Return the tokens of a document, [slots, 4], whose facts are stated once and asked for once in their block."""
    tokens = chance.integers(words.noise.start, words.noise.stop, (length // 4, 4))
    free = np.ones(len(tokens), bool)
    keys, values = chance.permutation(words.keys), chance.permutation(words.values)
    # Blocks of each size have keys of their own, in turn, so that the next use of a key is many blocks later
    for own, (size, facts) in zip(np.array_split(np.arange(len(keys)), len(blocks)), blocks.items(), strict=True):
        for number, begin in enumerate(range(0, len(tokens), size // 4)):
            room = begin + np.flatnonzero(free[begin : begin + size // 4])
            stated, asked = np.sort(chance.choice(room, (facts, 2), replace=False), axis=1).T
            fact = own.take(range(number * facts, (number + 1) * facts), mode="wrap")
            for places, mark in ((stated, FACT), (asked, ASK)):
                tokens[places] = np.stack(np.broadcast_arrays(mark, keys[fact], IS, values[fact]), 1)
                free[places] = False
    return tokens


def main(out: Path, documents: int = DOCUMENTS, length: int = LENGTH) -> None:
    words, chance = Vocabulary(VOCAB), np.random.default_rng(SEED)
    made = []
    for number in range(documents):
        if number % 2 == 0:
            document = make_document(words, chance, Kind(length=length))
        else:
            blocks = EVERY if number % 4 == 1 else FAR
            fitting = {size: facts for size, facts in blocks.items() if size <= length}
            document = make_single(words, chance, length, fitting)
        made.append(document.astype(np.uint16))
    tokens = np.stack(made)
    learned = np.zeros(tokens.shape, bool)
    learned[..., 3] = tokens[..., 0] == ASK
    save_tokens(out, tokens.reshape(-1), np.arange(0, tokens.size + 1, length), learned.reshape(-1), VOCAB)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "longer.tokens"), *map(int, sys.argv[2:]))
