"""What can be wrong with the samples of an evaluation, told before it begins: room, tokens and answers of each.

Samples follow from a seed, so the check sees those that will be measured. They are made without their noise, in the
same time at every length. Only if a tokenizer has more ids than the model are they made whole.
"""

from collections.abc import Iterable

from ithaca.base.errors import ConfigError, ModelError
from ithaca.base.sizes import format_tokens
from ithaca.evaluate.language import Language
from ithaca.evaluate.long_context import SEED, TaskOptions
from ithaca.evaluate.tasks import least_tokens, make_parts, make_sample


def check_samples(options: TaskOptions, words: Language, lengths: Iterable[int], vocab: int, said: str) -> None:
    """Raise an error unless every sample has room, tokens that a model of `vocab` ids knows, and a right answer.

    `said`: how the sentence about a short length begins, with the option that names it.
    """
    for length in lengths:
        for task in options.tasks:
            needed = least_tokens(task, words, length, SEED, options.samples)
            if needed > length:
                raise ConfigError(
                    f"{said} {length}, and task '{task}' needs {needed} tokens in this language: "
                    f"{format_tokens(2 ** (needed - 1).bit_length())} leaves room for noise"
                )
            for number in range(options.samples):
                _check_answer(task, words, length, number)
                if words.ids > vocab:
                    _check_tokens(task, words, length, number, vocab)


def _check_answer(task: str, words: Language, length: int, number: int) -> None:
    """Raise an error if the right answer would not be found in its own tokens."""
    parts, _ = make_parts(task, words, length, SEED, number)
    share = words.share_found(words.answer(parts.items), parts.items) if parts else 1
    if share < 1:
        raise ModelError(
            f"the right answer of task '{task}' would score {share:.0%}, not 100%, because tokenizer.json does not "
            f"decode its tokens to the same text: leave this task out, or give tokenizer.json the decoder it lacks"
        )


def _check_tokens(task: str, words: Language, length: int, number: int, vocab: int) -> None:
    sample = make_sample(task, words, length, SEED, number)
    largest = max(int(sample.prompt.max()), *map(max, sample.candidates))
    if largest >= vocab:
        raise ModelError(
            f"task '{task}' has token {largest} by tokenizer.json, and the model has a vocabulary of {vocab} ids: "
            "use the tokenizer.json that the model was trained with"
        )
