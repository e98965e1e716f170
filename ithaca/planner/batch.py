"""`ithaca plan --batch`: how many sequences a step has, in how many passes, and what that gives.

    --batch 32          32 sequences in a step, over all GPUs
    --batch max         as many as fit at once, without recomputing attention
    --batch 4M-tokens   as many as have 4M tokens together: longer contexts, fewer sequences, as Llama 3.1 was trained

Sequences that do not fit at once go in several passes, which share one update (gradient accumulation); a pass is what
`train.micro_batch` says. Passes are compared by tokens per second: memory that is left goes to more sequences in a
pass, or to fewer recomputations, whichever is faster.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ithaca.base.errors import ConfigError, PlanError
from ithaca.base.sizes import format_count, format_number, format_tokens, parse_tokens
from ithaca.model.spec import Spec
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import Cluster
from ithaca.planner.meshes import ranked_meshes
from ithaca.planner.search import HARDLY, LEAST_MEMORY, LONGEST, Answer, fits, search
from ithaca.plans.plan import Plan
from ithaca.schedule.variants import Effort

EXAMPLES = "write 32 (sequences), 4M-tokens, or max"
MOST = 2**20  # sequences in a step
AT_ONCE = 2**10  # sequences of a group of GPUs in a pass: more would hardly be faster
DOCUMENTS = 2**16  # documents of a group of GPUs in a pass
TRIED = 8  # numbers of sequences in a pass
LATER_PASSES = "from the second pass on, gradients take memory beside a pass"


@dataclass(frozen=True)
class Batch:
    """The answer with its sequences and passes, and what it is compared with."""

    answer: Answer
    one: Answer | None  # one sequence in a step; None if it does not fit
    most: int | None = None  # the most sequences that fit at once, if that was asked
    more: bool = False  # whether twice as many fit in several passes
    faster: Answer | None = None  # fewer sequences with a higher rate
    capped: bool = False  # more may fit than are planned for

    @property
    def over_one(self) -> float | None:
        """The rate, divided by the rate with one sequence in a step."""
        return self.answer.rate / self.one.rate if self.one else None

    def lines(self) -> list[str]:
        """The arithmetic of a step, and what its sequences gain."""
        found = [f"Batch: {self._arithmetic()}", f"  A pass: {self._groups()}"]
        if self.one and self.over_one:
            rates = f"{format_number(self.answer.rate)} against {format_number(self.one.rate)} tokens/s per GPU"
            found.append(f"  {self.over_one:.3g} × the rate of one sequence a step: {rates}")
        if self.most:
            known = "planned for" if self.capped else "that fit"
            option = f"(--batch {2 * self.most})"
            more = f"more take several passes {option}" if self.more else f"more {option} do not fit: {LATER_PASSES}"
            found.append(f"  {self.most} are the most {known} at once; {more}")
        if self.faster:
            gain = self.faster.rate / self.answer.rate
            found.append(f"  Faster: {format_count(self.faster.sequences, 'sequence')} at once, {gain:.3g} × this rate")
        return found

    def _arithmetic(self) -> str:
        """'4M tokens a step: 32 sequences of 128K, in 4 passes of 8'"""
        answer = self.answer
        total = format_tokens(answer.batch * answer.tokens)
        passes = f"in {answer.passes} passes of {answer.sequences}" if answer.passes > 1 else "in one pass"
        count = format_count(answer.batch, "sequence")
        return f"{total} tokens a step: {count} of {format_tokens(answer.tokens)}, {passes}"

    def _groups(self) -> str:
        """'8 sequences, 1 for each of 8 GPUs'"""
        answer, axes = self.answer, self.answer.axes
        count = format_count(answer.sequences, "sequence")
        if axes.data == 1:
            return f"{count}, shared by {axes.context} GPUs" if axes.context > 1 else f"{count} on one GPU"
        groups = f"{axes.data} groups of {axes.context} GPUs" if axes.context > 1 else f"{axes.data} GPUs"
        most = "" if answer.sequences % axes.data == 0 else "at most "
        return f"{count}, {most}{answer.rows} for each of {groups}"

    def as_object(self) -> dict[str, Any]:
        """The entries of `--json` that only a batch has."""
        return {
            "rate_over_one": self.over_one,
            "most_at_once": self.most,
            "faster_at_once": self.faster.sequences if self.faster else None,
        }


def read_batch(text: str, tokens: int) -> int | None:
    """The sequences in a step that `--batch` names, of this many tokens each; None: as many as fit."""
    given = text.strip()
    if given.lower() == "max":
        return None
    if match := re.fullmatch(r"(.*?)[ -]?tokens", given, re.IGNORECASE):
        return _sequences_of(text, match[1], tokens)
    if not re.fullmatch(r"[0-9]{1,20}", given) or int(given) < 1:
        try:
            meant = f"{format_tokens(parse_tokens(given))}-tokens"
        except ConfigError:
            raise PlanError(f"--batch {text} is not a number of sequences: {EXAMPLES}") from None
        raise PlanError(f"--batch {text} could be sequences or tokens: write {meant} for tokens, or a whole number")
    return _checked(text, int(given), tokens)


def _sequences_of(text: str, total: str, tokens: int) -> int:
    try:
        together = parse_tokens(total)
    except ConfigError:
        raise PlanError(f"--batch {text} is not a number of tokens: write 4M-tokens") from None
    sequences, rest = divmod(together, tokens)
    if rest:
        nearest = max(round(together / tokens), 1)
        works = f"{format_tokens(nearest * tokens)}-tokens ({nearest} of them) works"
        raise PlanError(f"--batch {text} is not a whole number of sequences of {format_tokens(tokens)} tokens: {works}")
    return _checked(text, sequences, tokens)


def _checked(text: str, sequences: int, tokens: int) -> int:
    most = min(MOST, LONGEST // tokens)
    if sequences > most:
        length = format_tokens(tokens)
        raise PlanError(f"--batch {text} is out of range for sequences of {length} tokens: give at most {most}")
    return sequences


def plan_batch(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    sequences: int | None,
    recipe: str | None = None,
    documents: Documents | None = None,
) -> Batch | None:
    """The fastest way to a step of this many sequences (None: the most that fit at once); None if none fits."""

    def planned(count: int, passes: int = 1) -> Answer | None:
        several = replace(cluster, passes=passes)
        answer = search(spec, several, tokens, recipe, sequences=count, documents=documents)
        return answer and replace(answer, passes=passes, seconds=answer.seconds.repeated(passes))

    one = planned(1)
    most = most_sequences(spec, cluster, tokens, recipe, documents)
    if sequences is not None:
        answer = _in_passes(planned, sequences, max(most, 1))
        return Batch(answer, one) if answer else None
    answer = planned(most) if most else None
    if answer is None:
        return None
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    fewer = [other for count in powers[-TRIED:] if (other := planned(count))]
    fastest = max(fewer, key=lambda other: other.worth, default=answer)
    faster = fastest if fastest.worth > HARDLY * answer.worth else None
    more = any(planned(count, 2 * most // count) for count in _pass_sizes(2 * most, most))
    return Batch(answer, one, most, more, faster, answer.rows >= _at_once(tokens, documents))


def _pass_sizes(sequences: int, most: int) -> list[int]:
    """Numbers of sequences in a pass that are tried, the largest first."""
    return [count for count in range(min(most, sequences), 0, -1) if sequences % count == 0][:TRIED]


def _in_passes(planned: Callable[[int, int], Answer | None], sequences: int, most: int) -> Answer | None:
    """The answer with the most sequences in a pass that is hardly slower than the fastest. `most`: of these."""
    numbers = _pass_sizes(sequences, most)
    found = [answer for count in numbers if (answer := planned(count, sequences // count))]
    fastest = max((answer.worth for answer in found), default=0.0)
    return next((answer for answer in found if answer.worth * HARDLY >= fastest), None)


def most_sequences(
    spec: Spec, cluster: Cluster, tokens: int, recipe: str | None = None, documents: Documents | None = None
) -> int:
    """The most sequences that fit at once, over all GPUs: without recomputing attention, if at least one then fits.

    A group of GPUs has at most `AT_ONCE`, and fewer if they have many documents.
    """
    name = recipe or LEAST_MEMORY
    sizes = cluster.sharing() if Plan(recipe=name).shares else [1]
    at_once = _at_once(tokens, documents)
    for effort in (Effort.LEAST_ONCE, Effort.LEAST):
        most = 0
        for sharing in sizes:
            groups = cluster.count // sharing
            for mesh in ranked_meshes(spec, cluster, name, tokens, sharing):

                def fit(rows: int) -> bool:
                    return fits(spec, cluster, rows * tokens, name, mesh, effort)  # noqa: B023

                most = max(most, groups * _most(fit, most // groups, at_once))
        if most:
            return most
    return 0


def _at_once(tokens: int, documents: Documents | None) -> int:
    """The most sequences of a group of GPUs that are planned for."""
    pieces = len(documents.lengths(tokens)) if documents else 1
    return max(min(AT_ONCE, DOCUMENTS // pieces, LONGEST // tokens), 1)


def _most(fit: Callable[[int], bool], known: int, limit: int) -> int:
    """The largest number that fits, up to a limit; `known` if the next does not."""
    low, high = known, known + 1
    while high <= limit and fit(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
