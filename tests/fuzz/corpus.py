"""All inputs: every mutator in turn, so that any first part of the list has some of each."""

import itertools
import random

from tests.fuzz import (
    arrays,
    commands,
    configurations,
    documents,
    gpus,
    modelfolders,
    runfolders,
    tokenfiles,
    tokenizerfiles,
    weightfiles,
)
from tests.fuzz.recipe import Input, Mutator

FILES = (commands, configurations, documents, arrays, tokenizerfiles, tokenfiles, modelfolders, weightfiles)
FILES += (runfolders, gpus)
MUTATORS: list[Mutator] = [mutator for file in FILES for mutator in file.MUTATORS]


def inputs(seed: int = 0, count: int | None = None) -> list[Input]:
    """The first `count` inputs; another seed changes values, bytes and order."""
    made = []
    for mutator in MUTATORS:
        chance = random.Random(f"{seed} {mutator.__module__} {mutator.__name__}")
        made.append(mutator(chance))
        chance.shuffle(made[-1])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*made))
    return [item for item in turns if item is not None][:count]
