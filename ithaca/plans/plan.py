"""A Plan is a value: everything that decides memory and speed, and nothing else does."""

import warnings
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from ithaca.base.errors import PlanError, suggestion
from ithaca.base.sizes import format_tokens, parse_bytes, parse_tokens
from ithaca.plans.places import IN_MEMORY, KEPT, REBUILD, RECOMPUTE, Placement, place_layers, read_places

CHECKPOINTS = ("none", "selective", "full")
CHUNK = 64 * 2**10  # what a sweep takes when it is not told: attention kernels are at their best from here on

# What each recipe may be told, and what it does when it is not; None is left to the length of the batch
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {"checkpoint": "full", "tile": None, "x": "device"},
    "ulysses": {"checkpoint": "full", "tile": None, "x": "device"},
    "alst": {"checkpoint": "full", "tile": 8192, "x": "host"},
    "untied": {"heads": None, "tile": 8192, "x": "host"},
    "ring": {"checkpoint": "full", "tile": None, "x": "device", "travel": "around"},
    "hybrid": {"checkpoint": "full", "tile": None, "x": "device", "travel": "around"},
    "sweep": {
        "chunk": None,
        "tile": 8192,
        "x": "host",
        "o": "host",
        "lse": "device",
        "residual": "host",
        "kv": "device",
    },
}
TRAVELS = ("around", "gather")
RECIPE_OPTIONS = ("checkpoint", "heads", "travel", "chunk", "tile", "x", "o", "lse", "residual", "kv")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is run. Under every Plan the numbers are the same; memory and time differ.

    Options that are not given are the recipe's (`settled`); options that mean nothing to a recipe are refused.
    """

    recipe: str = "dense"
    """`dense`: blocks run over whole sequences, each on one rank. The others can share a sequence among Ulysses ranks.
    `ulysses`: blocks run over all tokens of a rank. `alst`: the same with a tiled MLP and block inputs on the host.
    `untied`: the same, with a few heads at a time. `ring`: the same, over ring ranks, where K and V travel. `hybrid`:
    over both. `sweep`: blocks run over chunks of a sequence; of its length only K,
    V and their gradients stay on the device."""

    checkpoint: str | None = None
    """What a block keeps for its backward pass. `none`: everything. `selective`: its input and the attention's output,
    so that attention runs once. `full`: its input. (dense, ulysses, alst, ring, hybrid)"""

    heads: int | None = None
    """Query heads, over all Ulysses ranks, that are attended with at a time; not given: one on each rank. (untied)"""

    travel: str | None = None
    """How K and V come to the other ring ranks. `around`: from each to the next, in steps. `gather`: all at once, in as
    many times their memory as there are ring ranks; backward takes three times that. (ring, hybrid)"""

    chunk: int | None = field(default=None, metadata={"read": parse_tokens})
    """Tokens of a sequence, over all ranks that share it, that go through a block together; not given: 64K, or all
    where there are fewer. (sweep)"""

    tile: int | None = field(default=None, metadata={"read": parse_tokens})
    """Tokens of a rank that go through an MLP together; not given: 8K under `alst`, `untied` and `sweep`, else all."""

    x: str | None = None
    """Where block inputs are kept: `device`, `host` or `disk`; or `rebuild`, made again from o (sweep). One word, or a
    list that is repeated over the layers: `host, rebuild*7` keeps every eighth."""

    o: str | None = None
    """Where attention outputs are kept: `device`, `host` or `disk`; or `recompute`, by attention again. A word or a
    list, as for x. (sweep)"""

    lse: str | None = None
    """Where the attention's log-sum-exps are kept. (sweep)"""

    residual: str | None = None
    """Where the gradient between blocks is kept. (sweep)"""

    kv: str | None = None
    """Where K and V of a block, and their gradients, are kept while it runs. (sweep)"""

    zero: int = 3
    """What is cut over ranks: 1 optimizer states, 2 gradients too, 3 parameters too."""

    optimizer: str = "device"
    """Where AdamW's moments are kept: `device`, or `host`, from where each step takes them through the device."""

    kernel: str = "auto"
    """The attention kernel; `auto` takes the fastest that the device and dtype allow."""

    loss_tile: int = field(default=4096, metadata={"read": parse_tokens})
    """Tokens whose logits exist at a time."""

    host_memory: int | None = field(default=None, metadata={"read": parse_bytes})
    """Bytes of host memory that tapes may take on a node, as 96GB; not given: what is free, within the limit of the
    control group. Optimizer states come beside them."""

    disk: str | None = None
    """The folder of each node, on a disk of its own, that x and o go to where they say `disk`; nothing stays there."""

    gradient: InitVar[str | None] = None
    """The old name of `residual`."""

    def __post_init__(self, gradient: str | None) -> None:
        if gradient is not None:
            if self.residual is not None:
                raise PlanError(
                    f"gradient={gradient} and residual={self.residual} are one option, which was renamed: keep residual"
                )
            warnings.warn("Plan(gradient=…) is now Plan(residual=…): the old name still works", stacklevel=3)
            object.__setattr__(self, "residual", gradient)
        if not isinstance(self.recipe, str) or self.recipe not in RECIPES:
            raise PlanError(f"recipe '{self.recipe}' does not exist: {suggestion(str(self.recipe), list(RECIPES))}")
        if not isinstance(self.kernel, str):
            raise PlanError(f"kernel={self.kernel} is no name: 'auto' is")
        for name in RECIPE_OPTIONS:
            self._check_known(name)
        self._check_words("checkpoint", CHECKPOINTS)
        self._check_words("travel", TRAVELS)
        for name in ("lse", "residual", "kv"):
            self._check_words(name, IN_MEMORY)
        self._words("x")
        self._words("o")
        numbers = {"heads": 8, "chunk": CHUNK, "tile": 8192, "loss_tile": 4096, "host_memory": 64 * 10**9}
        for name, works in numbers.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                what = {"host_memory": "bytes", "heads": "heads"}.get(name, "tokens")
                raise PlanError(f"{name}={value} is no number of {what}: {works} is")
        if type(self.zero) is not int or self.zero not in (1, 2, 3):
            raise PlanError(f"zero={self.zero} does not exist: 1, 2 and 3 do")
        if self.optimizer not in IN_MEMORY:
            raise PlanError(f"optimizer={self.optimizer} does not exist: {suggestion(str(self.optimizer), IN_MEMORY)}")
        self._check_together()

    def settled(self) -> "Plan":
        """The Plan with every option said: what was not given is the recipe's."""
        options = {name: value for name, value in RECIPES[self.recipe].items() if getattr(self, name) is None}
        if self.checkpoint == "none":
            options.pop("tile", None)  # of which there is none where every tile is kept
        if self.chunk is not None and options.get("tile") is not None:
            options["tile"] = min(options["tile"], self.chunk)
        return replace(self, **options) if options else self

    @property
    def sweeps(self) -> bool:
        return self.recipe == "sweep"

    @property
    def shares(self) -> bool:
        """Whether several ranks can share a sequence."""
        return self.recipe != "dense"

    @property
    def shares_heads(self) -> bool:
        """Whether they can be Ulysses ranks."""
        return self.shares and self.recipe != "ring"

    @property
    def rings(self) -> bool:
        """Whether they can be ring ranks."""
        return self.recipe in ("ring", "hybrid", "sweep")

    def heads_at_once(self, ranks: int) -> int | None:
        """Query heads that are attended with at a time, over so many Ulysses ranks; None: all."""
        return (self.heads or ranks) if self.recipe == "untied" else None

    def placement(self, layers: int) -> Placement:
        """Where a model's layers have their x and o. A block that runs whole keeps its o by its checkpoint, or not."""
        return place_layers(self._words("x"), self._words("o") if self.sweeps else (RECOMPUTE,), layers)

    @property
    def named_layers(self) -> int:
        """How many layers x or o names one by one: a model needs as many."""
        return max(len(self._words("x")), len(self._words("o")))

    def _words(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        value = RECIPES[self.recipe].get(name) if value is None else value
        extra = {"x": REBUILD, "o": RECOMPUTE}[name] if self.sweeps else None
        if value is None:
            return ()
        if not isinstance(value, str):
            raise PlanError(f"{name}={value} is no text: '{KEPT[1]}' is")
        if name == "x" and not self.sweeps and REBUILD in value:
            raise PlanError(
                f"x={value} means nothing under recipe '{self.recipe}', which keeps no o to rebuild x from: "
                "use recipe 'sweep'"
            )
        return read_places(name, value, (*KEPT, extra) if extra else KEPT)

    def chunk_of(self, tokens: int, shorten: bool) -> int:
        """Tokens in a chunk of a sequence that has so many. A longer chunk is shortened only where that is said."""
        if self.chunk is not None and self.chunk > tokens and not shorten:
            raise PlanError(
                f"chunk={self.chunk} is longer than the {tokens} tokens there are: chunk={tokens} works, and so "
                f"does none, which takes {format_tokens(CHUNK)} or what there is"
            )
        return min(self.chunk or CHUNK, tokens)

    def _check_known(self, name: str) -> None:
        """An option that the recipe has no use for is refused."""
        value = getattr(self, name)
        if value is not None and name not in RECIPES[self.recipe]:
            others = " or ".join(f"'{recipe}'" for recipe, known in RECIPES.items() if name in known)
            raise PlanError(
                f"{name}={value} means nothing under recipe '{self.recipe}': leave it out, or use recipe {others}"
            )

    def _check_words(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value is not None and value not in known:
            raise PlanError(f"{name}={value} does not exist: {suggestion(str(value), known)}")

    def _check_together(self) -> None:
        self._check_disk()
        away = next((word for word in self._words("x") if word in ("host", "disk")), None)
        if self.checkpoint == "none" and away:
            raise PlanError(
                f"x='{away}' of recipe '{self.recipe}' means nothing with checkpoint='none', which keeps everything: "
                "use 'full'"
            )
        if self.checkpoint == "none" and self.tile is not None:
            raise PlanError(
                f"tile={self.tile} saves nothing with checkpoint='none', which keeps every tile: use 'full'"
            )
        if self.chunk is not None and self.tile is not None and self.tile > self.chunk:
            raise PlanError(f"tile={self.tile} is longer than chunk={self.chunk}: a tile of {self.chunk} fits")

    def _check_disk(self) -> None:
        if self.disk is not None and (not isinstance(self.disk, str) or not self.disk):
            raise PlanError(f"disk={self.disk!r} is no folder: '/scratch' would be one")
        using = next((name for name in ("x", "o") if "disk" in self._words(name)), None)
        if using and self.disk is None:
            raise PlanError(
                f"{using}='{getattr(self, using)}' needs a folder on a disk: name it, as disk='/scratch', or use 'host'"
            )
        if self.disk is not None and not using:
            raise PlanError(f"disk='{self.disk}' does nothing without x='disk' or o='disk': use one, or leave it out")
