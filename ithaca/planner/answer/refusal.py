"""Why nothing fits, in one sentence: with both numbers and a value that works."""

from collections.abc import Callable, Sequence

from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.planner.answer.report import Question, longest_recomputed
from ithaca.planner.hardware import Cluster
from ithaca.planner.search import STEP, binding, longest
from ithaca.schedule.job import FP32

MOST_TRIED = 4096  # GPUs up to which enough of them are looked for
ONE_BY_ONE = 8  # numbers of GPUs that are tried one after the other, before steps grow


def refusal(question: Question, most: int) -> str:
    """Why nothing fits. `most`: the longest context if attention runs once, 0 if there is none."""
    name = f"{question.model} on {question.gpus}"
    if question.tokens and most:
        option = "train.tokens=" if question.running else "--tokens "
        limit = binding(question.spec, question.cluster, question.recipe, most)
        return (
            f"{format_tokens(question.tokens)} tokens of {name} do not fit: {option}{format_tokens(most)} is the "
            f"longest{_if_recomputed(question, most)} limited by {_usable(question, limit)}"
        )
    enough = _enough(question)
    hint = f": use {question.cluster.resized(enough).gpus}" if enough else ""
    capacity, states = question.cluster.capacity, _least_states(question)
    if states > question.cluster.count * capacity:
        return (
            f"{name} does not fit: weights and gradients alone take {format_bytes(states / question.cluster.count)} "
            f"of each GPU, even with the moments in host memory, and {format_bytes(capacity)} can be used{hint}"
        )
    return (
        f"{name} does not fit at any length with {format_bytes(capacity)} on each GPU, "
        f"{_usable(question, 'host')} and {_usable(question, 'disk')}{hint}"
    )


def _if_recomputed(question: Question, most: int) -> str:
    """The condition under which `most` is the longest, and the longest without it; a comma if there is none."""
    again = longest_recomputed(question, most)
    return f" if attention runs once, {format_tokens(again)} if it is recomputed;" if again > most else ","


def _usable(question: Question, limit: str) -> str:
    """The bytes of a memory that a Plan may use, of a node where it is the node's."""
    budget, gpus = question.cluster.budget, question.cluster.machine.gpus
    have = {"GPU": budget.device, "host": budget.host * gpus, "disk": budget.disk * gpus}[limit]
    usable = "" if limit == "disk" else "usable "
    return f"{format_bytes(have)} of {usable}{question.name_limit(limit)}"


def _least_states(question: Question) -> int:
    """Bytes of all weights and gradients, which are on the GPUs under every Plan; moments may be in host memory."""
    return 2 * FP32 * question.spec.parameters()


def _enough(question: Question) -> int | None:
    """The smallest larger number of GPUs, in whole nodes, on which it fits; None if there is none up to MOST_TRIED."""
    least = _least_states(question) / max(question.cluster.capacity, 1)

    def fits(count: int) -> bool:
        spec, cluster, tokens = question.spec, question.cluster.resized(count), question.tokens or 1
        recomputing, steps = question.tokens is not None, -(-tokens // STEP)
        return longest(spec, cluster, question.recipe, recomputing, from_=steps * STEP) >= tokens

    return _first([count for count in _larger(question.cluster) if count >= least], fits)


def _larger(cluster: Cluster) -> list[int]:
    """The larger numbers of GPUs there can be: any within a node, then whole nodes."""
    node = cluster.node_gpus
    within = range(cluster.count + 1, node)
    return [*within, *range((cluster.count // node + 1) * node, MOST_TRIED + 1, node)]


def _first(counts: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first number that fits, found by bisection: after a number that fits, all fit."""
    below, step = -1, 1
    while (above := below + step) < len(counts) and not fits(counts[above]):
        below, step = above, step if above < ONE_BY_ONE else 2 * step
    if above >= len(counts):
        return None
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fits(counts[middle]) else (middle, above)
    return counts[above]
