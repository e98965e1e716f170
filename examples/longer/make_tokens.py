"""Make a token file of synthetic documents of 256K tokens, in which facts are stated and asked for again, near and far.

    python examples/longer/make_tokens.py longer.tokens          # 600 documents, 157M tokens, about 0.2 GB

They are as those of `data.source = "needles"` (ithaca/data/synthetic.py), but longer and with more facts. In half of
the documents most gaps between two mentions of a fact are short, at most 4K tokens, so even a window of 256 tokens has
answers. In the others the longest gap goes, from document to document, from 256 tokens to the whole document: there
are answers that stand as far back as a needle can.
"""

import sys
from pathlib import Path

from ithaca.data.reader import save_tokens
from ithaca.data.synthetic import Kind, make_documents

VOCAB, LENGTH, DOCUMENTS, SEED = 1024, 2**18, 600, 1  # the tasks of an evaluation have seed 0


def main(out: Path, documents: int = DOCUMENTS, length: int = LENGTH) -> None:
    slots = length / 4
    kind = Kind(length=length, most_facts=100, frequent=(16, min(1024, slots)), rare=(64, slots))
    save_tokens(out, *make_documents(VOCAB, documents, SEED, kind), VOCAB)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "longer.tokens"), *map(int, sys.argv[2:3]))
