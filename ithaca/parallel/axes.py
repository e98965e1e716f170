"""The axes of a job's ranks as one value, always in the order replicate, shard, ring, ulysses, tensor."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """How many ranks each axis has. Ranks along the last axis have neighbouring numbers, so they often share a node."""

    replicate: int = 1  # copies of the parameters
    shard: int = 1  # data ranks that a copy is cut over
    ring: int = 1  # groups of Ulysses ranks that share a sequence by tokens
    ulysses: int = 1  # ranks that share a sequence by heads
    tensor: int = 1  # ranks that share a sequence and cut the weights by heads and features; ulysses is 1 then

    @property
    def size(self) -> int:
        """All ranks of the job."""
        return self.replicate * self.shard * self.context

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.by_heads

    @property
    def by_heads(self) -> int:
        """Ranks that divide the heads among them."""
        return self.ulysses * self.tensor

    @property
    def grid(self) -> dict[str, int]:
        """The axes of one copy of the parameters, by name."""
        return {name: size for name, size in vars(self).items() if name != "replicate"}

    @property
    def data(self) -> int:
        """Groups of ranks that each take sequences of their own."""
        return self.replicate * self.shard

    @property
    def parameter(self) -> int:
        """Ranks that FSDP2 shards one copy of the parameters over, or one copy of a tensor rank's parameters."""
        return self.shard * self.ring * self.ulysses

    def __str__(self) -> str:
        """'shard 2 × ulysses 4': the axes with more than one rank; 'one rank' where there is none."""
        named = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return " × ".join(named) or "one rank"


def runs_alone(axes: Axes, zero: int) -> bool:
    """Whether weights need no FSDP2 (one_rank.py): no other rank has the same weights, and they stay gathered."""
    return axes.replicate * axes.parameter == 1 and zero < 3
