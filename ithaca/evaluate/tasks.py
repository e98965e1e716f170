"""Tasks that need a long context, as token sequences from a seed: what is asked, and what the right answer is.

    needle     one fact in noise, at a depth; its value is asked for
    keys       several facts with different keys; one of the values is asked for
    values     several values of one key; all are asked for
    tracking   a chain of assignments, and another one beside it; all variables of one value are asked for
    copy       a passage in noise; it is asked for word by word
    repeat     random tokens that begin again; the end of them is asked for

The first four are RULER's, the last two are plain. A sample has exactly as many tokens as its length says, answer
included: nothing is cut. Samples depend on (seed, task, length, number) and on the language alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ithaca.evaluate.language import Ids, Item, Language

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # where a needle is, as a share of the noise
CANDIDATES = 8  # answers that a likelihood is compared over
FACTS = 4  # keys, values, or variables of a chain
PASSAGE_WORDS = 8


@dataclass(frozen=True)
class Sample:
    """One question."""

    prompt: np.ndarray
    candidates: tuple[Ids, ...]
    right: int  # the number of the right candidate
    items: tuple[Item, ...]  # that the answer must have
    depth: float | None  # of a needle
    share_found: Callable[[Ids], float]  # of the items, in the tokens of an answer

    @property
    def answer(self) -> Ids:
        return self.candidates[self.right]


@dataclass(frozen=True)
class Parts:
    """A sample before it has noise."""

    facts: tuple[Ids, ...]
    depths: tuple[float, ...]  # of each fact, in rising order
    question: Ids
    items: tuple[Item, ...]
    wrong: tuple[tuple[Item, ...], ...]  # other answers


Maker = Callable[[Language, np.random.Generator, float], Parts]


def _needle(words: Language, chance: np.random.Generator, depth: float) -> Parts:
    (key,), (value, *others) = words.keys(chance, 1), words.values(chance, CANDIDATES)
    return Parts((words.fact(key, value),), (depth,), words.ask(key, False), (value,), _each(others))


def _keys(words: Language, chance: np.random.Generator, depth: float) -> Parts:  # noqa: ARG001
    keys, values = words.keys(chance, FACTS), words.values(chance, CANDIDATES)
    facts = tuple(words.fact(key, value) for key, value in zip(keys, values, strict=False))
    asked = int(chance.integers(FACTS))
    others = [value for number, value in enumerate(values) if number != asked]
    return Parts(facts, _depths(chance, FACTS), words.ask(keys[asked], False), (values[asked],), _each(others))


def _values(words: Language, chance: np.random.Generator, depth: float) -> Parts:  # noqa: ARG001
    (key,), values = words.keys(chance, 1), words.values(chance, FACTS + CANDIDATES - 1)
    right, others = tuple(values[:FACTS]), values[FACTS:]
    facts = tuple(words.fact(key, value) for value in right)
    return Parts(facts, _depths(chance, FACTS), words.ask(key, True), right, _replaced(chance, right, others))


def _tracking(words: Language, chance: np.random.Generator, depth: float) -> Parts:  # noqa: ARG001
    names, values = words.keys(chance, 2 * FACTS), words.values(chance, 2)
    chains = names[:FACTS], names[FACTS:]
    links = [zip(chain, [value, *chain], strict=False) for chain, value in zip(chains, values, strict=True)]
    # The first chain is asked for. It mixes with the other at random, so no place in the text gives it away
    order = chance.permutation([0, 1] * FACTS).tolist()
    facts = tuple(words.assign(*next(links[number])) for number in order)
    wrong = _replaced(chance, tuple(chains[0]), [*chains[1], *chains[1]][: CANDIDATES - 1])
    return Parts(facts, _depths(chance, 2 * FACTS), words.ask_names(values[0]), tuple(chains[0]), wrong)


def _copy(words: Language, chance: np.random.Generator, depth: float) -> Parts:  # noqa: ARG001
    chosen = words.words(chance, PASSAGE_WORDS + CANDIDATES - 1)
    passage, others = tuple(chosen[:PASSAGE_WORDS]), chosen[PASSAGE_WORDS:]
    wrong = _replaced(chance, passage, others)
    return Parts((words.passage(passage),), _depths(chance, 1), words.ask_passage(), passage, wrong)


TASKS: dict[str, Maker | None] = {
    "needle": _needle,
    "keys": _keys,
    "values": _values,
    "tracking": _tracking,
    "copy": _copy,
    "repeat": None,  # has no noise
}
HEAT = "needle"  # the task whose score is drawn over depth and length
ASKED = {"needle": "value", "keys": "value", "values": "value", "tracking": "key", "copy": "word", "repeat": "random"}


def make_sample(task: str, words: Language, length: int, seed: int, number: int) -> Sample:
    """Return one sample of `length` tokens, prompt and answer together."""
    parts, chance = make_parts(task, words, length, seed, number)
    room = length - _least(words, parts)
    assert room >= 0, f"task {task} at {length} tokens: check.py refuses it first"
    if parts is None:
        return _repeat(words, chance, length)
    right = words.answer(parts.items)
    noise, cuts = words.noise(chance, room)
    places = [int(cuts[np.abs(cuts - depth * room).argmin()]) for depth in parts.depths]
    pieces = [np.array(words.begin, np.int64)]
    for place, after, fact in zip([0, *places], [*places, room], [*parts.facts, parts.question], strict=True):
        pieces += [noise[place:after], np.array(fact)]
    answers = [words.answer(wrong) for wrong in parts.wrong]
    prompt = np.concatenate(pieces).astype(np.int64)
    assert len(prompt) + len(right) == length
    shown = parts.depths[0] if task == HEAT else None

    def share(tokens: Ids) -> float:
        return words.share_found(tokens, parts.items)

    return _shuffled(chance, prompt, right, answers, parts.items, shown, share)


def make_parts(
    task: str, words: Language, length: int, seed: int, number: int
) -> tuple[Parts | None, np.random.Generator]:
    """Return what one sample has beside noise, None for a task without, and the generator for the rest of it.

    It takes the same time at every length.
    """
    chance, maker = np.random.default_rng([seed, list(TASKS).index(task), length, number]), TASKS[task]
    return maker(words, chance, DEPTHS[number % len(DEPTHS)]) if maker else None, chance


def _least(words: Language, parts: Parts | None) -> int:
    """Return the tokens of a sample without noise."""
    if parts is None:
        return len(words.begin) + 4 * PASSAGE_WORDS
    said = len(parts.question) + len(words.answer(parts.items))
    return len(words.begin) + sum(map(len, parts.facts)) + said


def least_tokens(task: str, words: Language, length: int, seed: int, count: int) -> int:
    """Return the tokens that the largest of a task's samples at a length has without noise."""
    return max(_least(words, make_parts(task, words, length, seed, number)[0]) for number in range(count))


def _repeat(words: Language, chance: np.random.Generator, length: int) -> Sample:
    """A sample that asks for the last tokens of a sequence that is written a second time."""
    half = (length - len(words.begin)) // 2
    left = length - len(words.begin) - 2 * half  # an odd token stands before both
    once = words.random(chance, half)
    right = once[-PASSAGE_WORDS:].tolist()
    others = words.random(chance, 16 * CANDIDATES).tolist()
    wrong = _replaced(chance, tuple(right), [other for other in others if other not in right][: CANDIDATES - 1])
    ahead = [*words.begin, *words.random(chance, left).tolist()]
    prompt = np.concatenate((np.array(ahead, np.int64), once, once[:-PASSAGE_WORDS])).astype(np.int64)
    expected = tuple(right)

    def share(tokens: Ids) -> float:
        return sum(map(int.__eq__, tokens, expected)) / len(expected)

    return _shuffled(chance, prompt, right, [[*map(int, other)] for other in wrong], expected, None, share)


def _shuffled(
    chance: np.random.Generator,
    prompt: np.ndarray,
    right: Ids,
    wrong: list[Ids],
    items: tuple[Item, ...],
    depth: float | None,
    share: Callable[[Ids], float],
) -> Sample:
    """A sample with the right answer at a random place among the others, so that ties favor none."""
    place = int(chance.integers(len(wrong) + 1))
    candidates = (*wrong[:place], right, *wrong[place:])
    return Sample(prompt, candidates, place, items, depth, share)


def _each(others: Sequence[Item]) -> tuple[tuple[Item, ...], ...]:
    return tuple((other,) for other in others)


def _replaced(
    chance: np.random.Generator, right: tuple[Item, ...], others: Sequence[Item]
) -> tuple[tuple[Item, ...], ...]:
    """The right answer with one item exchanged, once for each of the others."""
    places = chance.integers(0, len(right), len(others))
    return tuple(
        (*right[:place], other, *right[place + 1 :]) for place, other in zip(places.tolist(), others, strict=True)
    )


def _depths(chance: np.random.Generator, count: int) -> tuple[float, ...]:
    return tuple(sorted(chance.random(count).tolist()))


def chances(task: str, words: Language) -> tuple[float, float]:
    """The scores of a guess: among the candidates, and of items of the right kind."""
    return 1 / CANDIDATES, 1 / words.kinds[ASKED[task]]
