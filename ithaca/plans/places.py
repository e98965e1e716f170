"""Where the x and o of each layer are kept, in words: one for all layers, or a list that is repeated over them.

host                    every layer's on the host
host, rebuild*7         every eighth layer's, and those between are made again
device*4, host*28       of 32 layers, the first four on the device
disk*8, host            the first eight on the disk, the ninth on the host, and so on
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, groupby, islice

from ithaca.base.errors import PlanError, suggestion

IN_MEMORY = ("device", "host")
KEPT = (*IN_MEMORY, "disk")  # the fastest first
REBUILD, RECOMPUTE = "rebuild", "recompute"  # of x, from the x and o of the layer below; of o, by attention again


@dataclass(frozen=True)
class Placement:
    """Each layer's word: where its x and its o are kept, or that they are not."""

    x: tuple[str, ...]
    o: tuple[str, ...]

    def __post_init__(self) -> None:
        """What a layer's backward pass needs can be had."""
        if self.x[0] == REBUILD:
            raise PlanError(f"x='{spell(self.x)}' keeps nothing that layer 0 could be rebuilt from: begin with 'host'")
        for layer in range(1, len(self.x)):
            if self.x[layer] == REBUILD and self.o[layer - 1] == RECOMPUTE:
                raise PlanError(
                    f"x of layer {layer} is to be rebuilt from o of layer {layer - 1}, which is not kept: "
                    "keep that o (o='host'), or this x (x='host')"
                )


@lru_cache(maxsize=4096)  # every Plan reads its own, several times
def read_places(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """'host, rebuild*2' -> host, rebuild, rebuild. Refuses what is not a list of known words."""
    words: list[str] = []
    for item in text.split(","):
        word, star, count = (part.strip() for part in item.partition("*"))
        if word not in known:
            raise PlanError(f"{option}={text} does not exist: {suggestion(word, known)}")
        if star and not re.fullmatch("0*[1-9][0-9]{0,3}", count):
            raise PlanError(f"{option}={text} has no number of layers in '{item.strip()[:40]}': write {word}*7")
        words += [word] * (int(count) if star else 1)
    return tuple(words)


@lru_cache(maxsize=4096)  # a search asks for the same ones again and again
def place_layers(x: tuple[str, ...], o: tuple[str, ...], layers: int) -> Placement:
    """Where a model's layers have their x and o, when the lists are repeated over them."""
    return Placement(over_layers("x", x, layers), over_layers("o", o, layers))


def over_layers(option: str, words: Sequence[str], layers: int) -> tuple[str, ...]:
    """A list of words repeated over the layers of a model."""
    if len(words) > layers:
        raise PlanError(
            f"{option} names {len(words)} layers, but the model has {layers}: name {layers}, or fewer, to be repeated"
        )
    return tuple(islice(cycle(words), layers))


def spell(words: Sequence[str]) -> str:
    """The shortest text that `read_places`, repeated over as many layers, gives these words for."""
    return _spelled(tuple(words))


@lru_cache(maxsize=4096)  # a search spells the same ones again and again
def _spelled(words: tuple[str, ...]) -> str:
    period = next(n for n in range(1, len(words) + 1) if all(words[i] == words[i % n] for i in range(len(words))))
    runs = [(word, len(list(run))) for word, run in groupby(words[:period])]
    return ", ".join(f"{word}*{count}" if count > 1 else word for word, count in runs)
