"""The axes of a job's ranks as one value, always in the order replicate, shard, ring, ulysses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """How many ranks each axis has. Ulysses ranks are neighbours, so they lie within a node where they can."""

    replicate: int = 1  # copies of the parameters
    shard: int = 1  # data ranks that a copy is cut over
    ring: int = 1  # groups of Ulysses ranks that share a sequence by tokens
    ulysses: int = 1  # ranks that share a sequence by heads

    @property
    def size(self) -> int:
        """All ranks of the job."""
        return self.replicate * self.shard * self.ring * self.ulysses

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """Groups of ranks that each take sequences of their own."""
        return self.replicate * self.shard

    @property
    def parameter(self) -> int:
        """Ranks that one copy of the parameters is cut over."""
        return self.shard * self.ring * self.ulysses

    def __str__(self) -> str:
        """'shard 2 × ulysses 4': the axes with more than one rank; 'one rank' where there is none."""
        named = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return " × ".join(named) or "one rank"


def runs_alone(axes: Axes, zero: int) -> bool:
    """Whether weights do without FSDP2 (one_rank.py): one rank is all there is, and keeps them gathered in a step."""
    return axes.size == 1 and zero < 3
