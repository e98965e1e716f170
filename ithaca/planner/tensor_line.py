"""What tensor parallelism would give beside an answer that does without it, or the reverse. No torch.

It is the one way that cuts weights instead of gathering them, which many expect of a large model: so the answer says
what it gives and what it waits for."""

from typing import TYPE_CHECKING

from ithaca.base.sizes import format_count, format_number, format_seconds
from ithaca.planner.search import LEAST_MEMORY, Answer, search

if TYPE_CHECKING:
    from ithaca.planner.report import Question

FAR = 0.75  # of the rate of the answer: a way that gives less is not spoken of


def tensor_lines(question: "Question", answer: Answer, hidden: float) -> list[str]:
    """A line, or nothing if the other way is far off. Waiting for less than `hidden` of a step is not said."""
    if question.recipe or question.batched or question.running or answer.axes.size == 1:
        return []
    chosen = answer.plan.entry.tensor
    name = LEAST_MEMORY if chosen else "tensor"
    other = search(question.spec, question.cluster, answer.tokens, name, documents=question.documents)
    if other is None or other.axes.context == 1 or other.rate < FAR * answer.rate:
        return []
    waits = other.seconds.step - other.seconds.computing - other.seconds.optimizer
    again = other.recomputed(question.spec)
    reasons = [f"attention runs again in {format_count(again, 'layer')}"] if again else []
    reasons += [f"computing waits {format_seconds(waits)}"] if waits >= hidden * other.seconds.step else []
    why = f" ({', '.join(reasons)})" if reasons else ""
    how = "Without tensor parallelism" if chosen else "With tensor parallelism"
    return [f"  {how} (--recipe {name}): {format_number(other.rate)} tokens/s per GPU{why}"]
