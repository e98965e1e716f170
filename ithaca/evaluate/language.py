"""How tasks are spelled: in English, by a tokenizer or byte by byte, or in the ids of a synthetic vocabulary.

A task knows keys, values and noise; a language makes tokens of them. English is that of RULER (arXiv 2404.06654).
The synthetic language is for models that were trained on such sequences from scratch, and it needs no tokenizer:

    a fact         FACT key IS value            a question   ASK key IS       (ids: data/synthetic.py)
    an assignment  SET name IS value or name    a question   WHO value IS
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from ithaca.base.errors import ConfigError, ModelError, first_line
from ithaca.data.preparation.encode import added
from ithaca.data.preparation.tokenizer import Json
from ithaca.data.synthetic import AGAIN, ASK, FACT, IS, PASSAGE, SET, WHO, Vocabulary
from ithaca.model.folder import model_file

Ids = list[int]
Item = int | str  # a key, value or word, as a language has it

SMALLEST = 72  # ids of a synthetic vocabulary

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FIRST = "amber brave calm dark eager fair gentle happy icy jolly kind lucky merry noble odd proud".split()  # noqa: SIM905
SECOND = "anchor bridge castle drum engine forest garden harbor island jewel kettle ladder mirror needle".split()  # noqa: SIM905
WORDS = [*SECOND, "oven", "pillow", "river", "saddle", "table", "valley"]


class Language(Protocol):
    name: str  # for the head of the table
    slack: int  # tokens that an answer may have beyond those expected
    begin: Ids  # what every prompt begins with
    ids: int  # its tokens are below this
    kinds: dict[str, int]  # how many keys, values, words and random tokens a guess would choose from

    def keys(self, chance: np.random.Generator, count: int) -> list[Item]:
        """Return different keys, or names of variables."""
        ...

    def values(self, chance: np.random.Generator, count: int) -> list[Item]:
        """Return different values."""
        ...

    def words(self, chance: np.random.Generator, count: int) -> list[Item]:
        """Return different words."""
        ...

    def fact(self, key: Item, value: Item) -> Ids: ...

    def ask(self, key: Item, several: bool) -> Ids:
        """Return the question for the values of a key, and the beginning of the answer."""
        ...

    def assign(self, name: Item, to: Item) -> Ids: ...

    def ask_names(self, value: Item) -> Ids: ...

    def passage(self, words: Sequence[Item]) -> Ids: ...

    def ask_passage(self) -> Ids: ...

    def answer(self, items: Sequence[Item]) -> Ids: ...

    def noise(self, chance: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return exactly `count` tokens that say nothing, and the places where something may be put between them."""
        ...

    def random(self, chance: np.random.Generator, count: int) -> np.ndarray:
        """Return exactly `count` tokens that cannot be predicted."""
        ...

    def share_found(self, tokens: Ids, items: Sequence[Item]) -> float:
        """Return the share of the items that an answer has."""
        ...


class Synthetic:
    """The ids of a vocabulary without words."""

    slack = 0

    def __init__(self, vocab: int):
        if vocab < SMALLEST:
            raise ModelError(
                f"the model has a vocabulary of {vocab} ids and no tokenizer.json: tasks in synthetic tokens need "
                f"{SMALLEST} ids or more"
            )
        self.name, self.begin, self.ids = f"synthetic tokens, {vocab} ids", list[int](), vocab
        words = Vocabulary(vocab)
        self._keys, self._values, self._noise = words.keys, words.values, words.noise
        values = len(self._values)
        self.kinds = {"key": len(self._keys), "value": values, "word": values, "random": len(self._noise)}

    def keys(self, chance: np.random.Generator, count: int) -> list[Item]:
        return chance.choice(self._keys, count, replace=False).tolist()

    def values(self, chance: np.random.Generator, count: int) -> list[Item]:
        return chance.choice(self._values, count, replace=False).tolist()

    def words(self, chance: np.random.Generator, count: int) -> list[Item]:
        return self.values(chance, count)

    def fact(self, key: Item, value: Item) -> Ids:
        return [FACT, int(key), IS, int(value)]

    def ask(self, key: Item, several: bool) -> Ids:  # noqa: ARG002
        return [ASK, int(key), IS]

    def assign(self, name: Item, to: Item) -> Ids:
        return [SET, int(name), IS, int(to)]

    def ask_names(self, value: Item) -> Ids:
        return [WHO, int(value), IS]

    def passage(self, words: Sequence[Item]) -> Ids:
        return [PASSAGE, *map(int, words)]

    def ask_passage(self) -> Ids:
        return [AGAIN]

    def answer(self, items: Sequence[Item]) -> Ids:
        return [*map(int, items)]

    def noise(self, chance: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.random(chance, count), np.arange(count + 1)

    def random(self, chance: np.random.Generator, count: int) -> np.ndarray:
        return chance.integers(self._noise.start, self._noise.stop, count)

    def share_found(self, tokens: Ids, items: Sequence[Item]) -> float:
        """Each item counts at its own place."""
        return sum(map(int.__eq__, tokens, map(int, items))) / len(items)


class English:
    """Sentences, encoded by a function from text to ids."""

    slack = 4

    def __init__(
        self, name: str, encode: Callable[[str], Ids], decode: Callable[[Ids], str], begin: Ids, ids: int = 256
    ):
        pairs = len(FIRST) * len(SECOND)
        self.kinds = {"key": pairs, "value": 9_000_000, "word": len(WORDS), "random": pairs}
        self.name, self.begin, self.ids, self._encode, self._decode = name, begin, ids, encode, decode
        self._sentences = [encode(f" {sentence}") for sentence in NOISE]

    def keys(self, chance: np.random.Generator, count: int) -> list[Item]:
        numbers = chance.choice(len(FIRST) * len(SECOND), count, replace=False).tolist()
        return [f"{FIRST[number % len(FIRST)]}-{SECOND[number // len(FIRST)]}" for number in numbers]

    def values(self, chance: np.random.Generator, count: int) -> list[Item]:
        return [*map(str, chance.choice(9_000_000, count, replace=False) + 1_000_000)]

    def words(self, chance: np.random.Generator, count: int) -> list[Item]:
        return [WORDS[number] for number in chance.choice(len(WORDS), count, replace=False)]

    def fact(self, key: Item, value: Item) -> Ids:
        return self._encode(f" One of the special magic numbers for {key} is: {value}.")

    def ask(self, key: Item, several: bool) -> Ids:
        what, are = ("are all the special magic numbers", "are") if several else ("is the special magic number", "is")
        numbers = "special magic numbers" if several else "special magic number"
        return self._encode(
            f" What {what} for {key} mentioned in the provided text? The {numbers} for {key} mentioned in the "
            f"provided text {are}"
        )

    def assign(self, name: Item, to: Item) -> Ids:
        return self._encode(f" VAR {name} = {to if str(to).isdigit() else f'VAR {to}'}.")

    def ask_names(self, value: Item) -> Ids:
        return self._encode(
            f" Question: find all variables that are assigned the value {value} in the text above. Answer: the "
            f"variables that are assigned the value {value} are, in order,"
        )

    def passage(self, words: Sequence[Item]) -> Ids:
        return self._encode(f" The secret passage is: {' '.join(map(str, words))}.")

    def ask_passage(self) -> Ids:
        return self._encode(" Repeat the secret passage. The secret passage is:")

    def answer(self, items: Sequence[Item]) -> Ids:
        between = ", " if any("-" in str(item) or str(item).isdigit() for item in items) else " "
        return self._encode(f" {between.join(map(str, items))}")

    def noise(self, chance: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The same sentences in a cycle that starts at random, cut at its beginning to exactly `count` tokens."""
        first = int(chance.integers(len(NOISE)))
        sentences = [self._sentences[(first + number) % len(NOISE)] for number in range(len(NOISE))]
        once = np.concatenate(sentences)
        rounds = count // len(once) + 1
        over = rounds * len(once) - count
        cuts = np.cumsum(np.tile([*map(len, sentences)], rounds)) - over
        return np.tile(once, rounds)[over:], np.array([0, *cuts[cuts > 0]])

    def random(self, chance: np.random.Generator, count: int) -> np.ndarray:
        found: Ids = []
        while len(found) < count:
            words = [str(word) for word in (*self.keys(chance, 64), *self.values(chance, 16))]
            found += self._encode(f" {' '.join(words[number] for number in chance.permutation(80))}")
        return np.array(found[:count])

    def share_found(self, tokens: Ids, items: Sequence[Item]) -> float:
        """Each item counts if the answer has it, as in RULER."""
        text = self._decode(tokens)
        return sum(str(item) in text for item in items) / len(items)


def read_language(folder: Path | None, vocab: int) -> Language:
    """Return the language of a model: by its tokenizer.json; without one, bytes if it has 256 ids, else synthetic.

    `folder`: with the model's files; None for a preset, which has none.
    """
    file = model_file(folder, "tokenizer.json") if folder else None
    if file is None:
        if vocab != 256:
            return Synthetic(vocab)
        decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
        return English("English, byte by byte", lambda text: [*text.encode()], decode, [])
    try:
        inner, outer = tokenizers.Tokenizer.from_file(str(file)), Json(file)
    except ConfigError:
        raise
    except Exception as problem:  # the package raises nothing narrower
        raise ModelError(f"'{file}' is not a tokenizer.json ({first_line(problem)})") from None

    def encode(text: str) -> Ids:
        (ids,) = outer.encode([text])
        return ids.tolist()

    (ids,) = outer.encode(["The"])
    begin, _ = added(ids[:0], ids, outer)
    largest = max(inner.get_vocab().values(), default=0)
    return English("English, by tokenizer.json", encode, inner.decode, begin.tolist(), largest + 1)
