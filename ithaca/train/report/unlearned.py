"""Steps and passes in which no token has a label that counts, as in a window that lies within one long prompt.

Such a step has no loss. It changes no weight, no moment and not AdamW's count of updates, and weights do not decay. The
step number and the learning rate go on, because data and schedule depend on the step alone. Such a pass of a step that
has other passes is left out; its loss and gradients would be zero. A run counts both, with warnings.
"""

from collections.abc import Sequence
from typing import Any

from ithaca.base.sizes import format_count
from ithaca.parallel.batch import Batch


def with_labels(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with a label that counts. All ranks get the same: the counts are of whole batches."""
    return [batch for batch in batches if batch.valid_tokens]


class Unlearned:
    """The steps and passes of a run that learned nothing.

    There is a warning about the first of each kind since the start, then whenever their number has doubled.
    """

    def __init__(self, manifest: dict[str, Any]):
        """`manifest`: of the checkpoint that the run continues from; empty if there is none."""
        self._steps = manifest.get("step", 0) - manifest.get("updates", 0)
        self._passes = manifest.get("passes_without_labels", 0)
        self._warned = {"step": 0, "pass": 0}  # their numbers at the last warning

    def note(self, step: int) -> dict[str, Any]:
        """Return the entries of the manifest of a checkpoint after `step` steps."""
        return {"updates": step - self._steps, "passes_without_labels": self._passes}

    def add(self, step: int, batches: Sequence[Batch]) -> list[str]:
        """Count the passes of a step. Return the warnings about them."""
        empty = [batch for batch in batches if not batch.valid_tokens]
        if not empty:
            return []
        tokens = sum(batch.total_tokens for batch in empty)
        if len(empty) == len(batches):
            self._steps += 1
            return self._due(
                "step",
                self._steps,
                f"step {step} learned nothing: none of its {tokens} tokens has a label, so the weights do not change",
            )
        self._passes += len(empty)
        passes = format_count(len(empty), "pass")
        return self._due(
            "pass",
            self._passes,
            f"{passes} of the {len(batches)} in step {step} learned nothing: 0 of {tokens} tokens there have a label "
            "that counts",
        )

    def _due(self, kind: str, count: int, text: str) -> list[str]:
        if count < 2 * self._warned[kind]:
            return []
        self._warned[kind] = count
        return [f"{text} ({format_count(count, f'such {kind}')} so far)"]

    def totals(self, steps: int) -> list[str]:
        """Return the warnings for the end of a run of `steps` steps."""
        none = "no token there had a label that counts"
        found = [f"{self._steps} of {format_count(steps, 'step')} learned nothing: {none}"] if self._steps else []
        if self._passes:
            found.append(f"{format_count(self._passes, 'pass')} of other steps learned nothing: {none}")
        return found
