"""A line about the rate with tensor parallelism beside an answer without it, or the reverse. No torch.

Only tensor parallelism divides weights instead of gathering them, and many expect it of a large model. So the answer
says how fast it is and what it waits for."""

from typing import TYPE_CHECKING

from ithaca.base.sizes import format_count, format_number, format_seconds
from ithaca.planner.search import LEAST_MEMORY, Answer, search

if TYPE_CHECKING:
    from ithaca.planner.answer.report import Question

FAR = 0.75  # share of the answer's rate: a slower alternative gets no line


def tensor_lines(question: "Question", answer: Answer, hidden: float) -> list[str]:
    """The line, or nothing if the alternative is far slower. Waits of less than `hidden` of a step are left out."""
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
