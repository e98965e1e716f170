"""Where x and o of each layer are saved, in words: one word for all layers, or a list that is repeated over them.

host                    every layer in host memory
host, rebuild*7         every eighth layer; those between are recomputed
rebuild*30, host*2      the last two of 32 layers. x of layer 0 is looked up in the embedding again
device*4, host*28       of 32 layers, the first four on the device
disk*8, host            eight on disk, the ninth in host memory, and so on
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, groupby, islice

from ithaca.base.errors import PlanError, suggestion

IN_MEMORY = ("device", "host")
KEPT = (*IN_MEMORY, "disk")  # the fastest first
# x from x and o of the layer below, or layer 0's by a look-up in the embedding; o by running attention again
REBUILD, RECOMPUTE = "rebuild", "recompute"


@dataclass(frozen=True)
class Placement:
    """Each layer's words: where its x and its o are saved, or that they are recomputed."""

    x: tuple[str, ...]
    o: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise an error if a layer's backward pass could not get its x."""
        for layer in range(1, len(self.x)):
            if self.x[layer] == REBUILD and self.o[layer - 1] == RECOMPUTE:
                raise PlanError(
                    f"x of layer {layer} is to be rebuilt from o of layer {layer - 1}, which is not kept: "
                    "keep that o (o='host'), or this x (x='host')"
                )


@lru_cache(maxsize=4096)  # every Plan reads its own several times
def read_places(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """'host, rebuild*2' -> host, rebuild, rebuild. Other text than a list of known words is an error."""
    words: list[str] = []
    for item in text.split(","):
        word, star, count = (part.strip() for part in item.partition("*"))
        if word not in known:
            raise PlanError(f"{option}={text} does not exist: {suggestion(word, known)}")
        if star and not re.fullmatch("0*[1-9][0-9]{0,3}", count):
            raise PlanError(f"{option}={text} has no number of layers in '{item.strip()[:40]}': write {word}*7")
        words += [word] * (int(count) if star else 1)
    return tuple(words)


@lru_cache(maxsize=4096)  # the planner's search asks for the same values many times
def place_layers(x: tuple[str, ...], o: tuple[str, ...], layers: int) -> Placement:
    """The words of every layer, with both lists repeated over the layers."""
    return Placement(over_layers("x", x, layers), over_layers("o", o, layers))


def over_layers(option: str, words: Sequence[str], layers: int) -> tuple[str, ...]:
    """A list of words repeated over the layers of a model."""
    if len(words) > layers:
        raise PlanError(
            f"{option} names {len(words)} layers, but the model has {layers}: name {layers}, or fewer, to be repeated"
        )
    return tuple(islice(cycle(words), layers))


def split_folders(text: str) -> tuple[str, ...]:
    """'/nvme0, /nvme1' -> ('/nvme0', '/nvme1')."""
    return tuple(folder.strip() for folder in text.split(","))


def spell(words: Sequence[str]) -> str:
    """The shortest text that gives these words when it is repeated over as many layers."""
    return _spelled(tuple(words))


@lru_cache(maxsize=4096)  # the planner's search spells the same ones many times
def _spelled(words: tuple[str, ...]) -> str:
    period = next(n for n in range(1, len(words) + 1) if all(words[i] == words[i % n] for i in range(len(words))))
    runs = [(word, len(list(run))) for word, run in groupby(words[:period])]
    return ", ".join(f"{word}*{count}" if count > 1 else word for word, count in runs)
