"""The recipes: every method of the field as one entry, a schedule with options, defaults and limits.

A recipe that only combines options of a schedule needs no other code than its entry here. The planner prefers them in
this order where they are equally fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ithaca.parallel.axes import Axes

TILE = 8192  # tokens: an MLP's matrix products of a large model run at their best from here on


@dataclass(frozen=True)
class Recipe:
    """One entry. An option that is not in `options` is refused under this recipe."""

    summary: str
    schedule: str  # the folder in schedule/ that runs it and says what it costs
    options: Mapping[str, Any]  # each with its default; None: follows from the batch, or from the model
    ulysses: bool  # Ulysses ranks can share a sequence
    ring: bool  # ring ranks can share a sequence
    tensor: bool = False  # tensor ranks can, in place of Ulysses ranks
    head_rounds: bool = False  # attention takes a few query heads at a time, also if the Plan names no `heads`
    tiled: bool = False  # the MLP runs in tiles if the Plan names none; their size follows from the model
    tries: tuple[Mapping[str, Any], ...] = ()
    """Options that the planner tries, from least computing to least memory, with the model's tile where blocks are
    checkpointed, and under schedule `sweep` with several sizes of chunks. Empty, for schedule `sweep` alone: the
    planner also places x, o, K and V of each layer itself."""

    @property
    def places(self) -> bool:
        """Whether the planner places x, o, K and V of each layer. With `tries` their places are given."""
        return self.schedule == "sweep" and not self.tries

    def axes(self, by_heads: int, ring: int, shard: int = 1) -> Axes:
        """The axes on which ranks share a sequence by heads, as tensor or Ulysses ranks, and over a ring."""
        kind = "tensor" if self.tensor else "ulysses"
        return Axes(shard=shard, ring=ring, **{kind: by_heads})

    def allows(self, by_heads: int, ring: int) -> bool:
        """Whether this many Ulysses or tensor ranks × ring ranks can share a sequence."""
        return (by_heads == 1 or self.ulysses or self.tensor) and (ring == 1 or self.ring)


_KEPT = {"checkpoint": "full", "tile": None, "x": "device"}
_KEPT_TRIES = (
    {"checkpoint": "none", "x": "device"},
    {"checkpoint": "selective", "x": "device"},
    {"checkpoint": "full", "x": "device"},
    {"checkpoint": "full", "x": "host"},
)
_RING = {**_KEPT, "travel": "around"}

RECIPES: dict[str, Recipe] = {
    "sweep": Recipe(
        "blocks run over chunks of a sequence; of its full length only K, V and their gradients stay on the device",
        schedule="sweep",
        options={
            "heads": None,
            "chunk": None,
            "tile": None,
            "x": "host",
            "o": "host",
            "lse": "device",
            "residual": "host",
            "kv": "device",
        },
        ulysses=True,
        ring=True,
        tiled=True,
    ),
    "dense": Recipe(
        "blocks run over whole sequences, each on one rank",
        schedule="whole",
        options={**_KEPT, "cuda_graph": False},
        ulysses=False,
        ring=False,
        tries=_KEPT_TRIES,
    ),
    "ulysses": Recipe(
        "ranks exchange all heads at once (Ulysses)",
        schedule="whole",
        options=_KEPT,
        ulysses=True,
        ring=False,
        tries=_KEPT_TRIES,
    ),
    "untied": Recipe(
        "Ulysses with a few heads at a time (UPipe), also within ring ranks",
        schedule="whole",
        options={"heads": None, "travel": "around", "tile": None, "x": "host"},
        ulysses=True,
        ring=True,
        head_rounds=True,
        tiled=True,
        tries=({"x": "device"}, {"x": "host"}),
    ),
    "hybrid": Recipe(
        "Ulysses within ring ranks, whose K and V travel",
        schedule="whole",
        options=_RING,
        ulysses=True,
        ring=True,
        tries=_KEPT_TRIES,
    ),
    "ring": Recipe(
        "K and V travel around ring ranks",
        schedule="whole",
        options=_RING,
        ulysses=False,
        ring=True,
        tries=_KEPT_TRIES,
    ),
    "alst": Recipe(
        "Ulysses with a tiled MLP and block inputs in host memory (ALST)",
        schedule="whole",
        options={"checkpoint": "full", "tile": None, "x": "host"},
        ulysses=True,
        ring=False,
        tiled=True,
        tries=_KEPT_TRIES,
    ),
    "tensor": Recipe(
        "ranks hold parts of every weight, by heads and features, and tokens in between (Megatron)",
        schedule="tensor",
        options=_RING,
        ulysses=False,
        ring=True,
        tensor=True,
        tries=_KEPT_TRIES,
    ),
    "fpdt": Recipe(
        "chunks of a sequence, with K and V in host memory; attention runs again in backward (FPDT)",
        schedule="sweep",
        options={
            "chunk": None,
            "chunks": None,
            "tile": None,
            "x": "host",
            "o": "recompute",
            "lse": "device",
            "residual": "host",
            "kv": "host",
        },
        ulysses=True,
        ring=True,
        tiled=True,
        tries=({},),
    ),
}
