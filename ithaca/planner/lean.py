"""`ithaca plan --lean`: the fastest Plan with hardly more GPU memory than the least that any Plan needs.

The least memory is found by asking for less and less: K and V, log-sum-exps, residual, x, o and the optimizer's moments
leave the device one after the other, and chunks become small. Attention runs twice only if it must. The Plan with the
very least has the smallest chunks, which can cost much time for little memory: Llama3-8B at 128K on 8 GPUs takes 1.62
times the fastest step in 14.1 GiB, and 1.03 times in 15.3 GiB (predicted). So a Plan may take a tenth more.
"""

from dataclasses import dataclass
from typing import Any

from ithaca.base.sizes import format_bytes, format_seconds
from ithaca.model.spec import Spec
from ithaca.planner.documents import Documents
from ithaca.planner.hardware import Cluster
from ithaca.planner.search import LEAST_MEMORY, Answer, fits, search, widest_meshes
from ithaca.schedule.variants import Effort

ACCURACY = 2**26  # bytes, of the least memory
ROOM = 1.1  # a faster Plan may take this many times the least memory


@dataclass(frozen=True)
class Lean:
    """The lean Plan, the fastest one, and the least GPU memory with which any fits, in bytes."""

    answer: Answer
    fastest: Answer
    least: int

    def lines(self) -> list[str]:
        """Lines that compare memory and time with those of the fastest Plan, and name the least memory."""
        mine, other = (format_bytes(answer.memory.total) for answer in (self.answer, self.fastest))
        least, more = format_bytes(self.least), f"{100 * (ROOM - 1):.0f} %"
        now, then = (answer.seconds.step / answer.batch for answer in (self.answer, self.fastest))
        return [
            f"Lean: {mine} of GPU memory instead of {other}, {format_seconds(now)} a sequence instead of "
            f"{format_seconds(then)} ({now / then:.3g} ×)",
            f"  The least that fits is {least}; up to {more} more is taken to be faster",
        ]

    def as_object(self) -> dict[str, Any]:
        """The entries of `--json` about the fastest Plan."""
        fastest = self.fastest
        return {
            "least_memory_total": self.least,
            "fastest_memory_total": fastest.memory.total,
            "fastest_seconds_per_step": fastest.seconds.step,
            "fastest_tokens_per_second_per_gpu": fastest.rate,
        }


def leanest(
    spec: Spec, cluster: Cluster, tokens: int, recipe: str | None = None, documents: Documents | None = None
) -> Lean | None:
    """The Plan with the least GPU memory and the fastest, for this length; None if nothing fits."""
    fastest = search(spec, cluster, tokens, recipe, documents=documents)
    if fastest is None:
        return None
    name = recipe or LEAST_MEMORY  # others may fit as well, but would recompute attention
    least = _least_memory(spec, cluster, tokens, name, fastest.memory.total)
    found = search(spec, cluster.limited(int(ROOM * least)), tokens, name, documents=documents)
    leaner = min((answer for answer in (found, fastest) if answer), key=lambda answer: answer.memory.total)
    return Lean(leaner, fastest, min(least, leaner.memory.total))  # the search for the least is not exact


def _least_memory(spec: Spec, cluster: Cluster, tokens: int, recipe: str, enough: int) -> int:
    """The fewest bytes of a GPU with which a Plan fits, to `ACCURACY`; `enough`: bytes with which one fits."""
    meshes = widest_meshes(spec, cluster, recipe, tokens)

    def fit(size: int, effort: Effort) -> bool:
        return any(fits(spec, cluster.limited(size), tokens, recipe, mesh, effort) for mesh in meshes)

    effort = Effort.LEAST_ONCE if fit(enough, Effort.LEAST_ONCE) else Effort.LEAST
    low, high = 0, enough
    while high - low > ACCURACY:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle, effort) else (middle, high)
    return high
