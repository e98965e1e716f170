"""Some of a model's heads, by index: what is projected, attended with, or kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from ithaca.model.spec import Spec


@dataclass(frozen=True)
class Heads:
    """Some of the heads, by index: query heads, and the key/value heads that they read."""

    q: Sequence[int]
    kv: Sequence[int]

    @staticmethod
    def all(spec: Spec) -> "Heads":
        return Heads(range(spec.heads), range(spec.kv_heads))

    @staticmethod
    def keys_only(spec: Spec) -> "Heads":
        """No query: what K and V cost alone."""
        return Heads(range(0), range(spec.kv_heads))
