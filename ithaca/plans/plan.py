"""A Plan is a value: it says everything that decides memory and speed."""

import os
import warnings
from dataclasses import InitVar, dataclass, field, replace

from ithaca.base.errors import ConfigError, PlanError, suggestion
from ithaca.base.sizes import format_tokens, parse_bytes, parse_tokens
from ithaca.model.spec import Spec
from ithaca.parallel.head_split import HeadSplit, Rounds, head_rounds
from ithaca.plans.places import (
    IN_MEMORY,
    KEPT,
    REBUILD,
    RECOMPUTE,
    Placement,
    place_layers,
    read_places,
    spell,
    split_folders,
)
from ithaca.plans.recipes import RECIPES, TILE, Recipe

CHECKPOINTS = ("none", "selective", "full")
CHUNK = 64 * 2**10  # tokens: attention kernels run at their best from here on
TRAVELS = ("around", "gather")
PLACED = ("x", "o", "lse", "residual", "kv")  # the options that say where a tape lives
RECIPE_OPTIONS = ("checkpoint", "heads", "travel", "chunk", "chunks", "tile", "cuda_graph", *PLACED)
MLP_NUMBERS = TILE * (5 * 14336 + 3 * 4096)  # of an MLP's backward pass over a tile of Llama3-8B; 1.4 GB in bf16


def mlp_tile(spec: Spec) -> int:
    """Tokens of an MLP's tile if the Plan names none: as many as take the memory of a tile of Llama3-8B.

    8K tokens of a narrow model are little work, and each tile costs launches. At least TILE, however wide the model,
        and at most a chunk, however narrow.
    """
    tokens = MLP_NUMBERS // (5 * spec.mlp + 3 * spec.hidden)
    return min(max(tokens // 1024 * 1024, TILE), CHUNK)


def read_folders(value: object) -> str:
    """Folders as a configuration names them, '/a, /b' or ["/a", "/b"], as one text."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{value!r} names no folder: write '/scratch', or several as '/nvme0, /nvme1'")
    return ", ".join(items)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a model is run. Losses and gradients are the same under every Plan; memory and time differ.

    An option that is not given takes the recipe's default (`settled`), or follows from the model (`settled_for`). An
    option that the recipe does not have is an error. plans/recipes.py has the recipes.
    """

    recipe: str = "dense"
    """The method: `dense` (one rank per sequence), `ulysses`, `alst` (Ulysses, tiled MLP, block inputs in host memory),
    `untied` (Ulysses, a few heads at a time), `ring`, `hybrid` (Ulysses and ring), `tensor` (ranks hold parts of every
    weight), `fpdt` (chunks of a sequence, K and V in host memory, attention recomputed), or `sweep` (chunks of a
    sequence; of its full length only K, V and their gradients stay on the device)."""

    checkpoint: str | None = None
    """What a block saves for its backward pass. `none`: everything. `selective`: its input and the attention's output,
    so that attention runs once. `full`: its input. (dense, ulysses, alst, ring, hybrid, tensor)"""

    heads: int | None = None
    """Query heads over all Ulysses ranks that attend at a time. Default: one on each rank (untied), all (sweep). Under
    `sweep` a block runs over its chunks several times, and holds K and V of these heads alone."""

    travel: str | None = None
    """How K and V reach the other ring ranks. `around`: from each rank to the next, in steps. `gather`: all at once,
    which takes their memory once per ring rank, and three times that in backward. (ring, hybrid, untied, tensor)"""

    chunk: int | None = field(default=None, metadata={"read": parse_tokens})
    """Tokens of a sequence, over all ranks that share it, that go through a block together. Default: 64K, or all if
    there are fewer. (sweep, fpdt)"""

    chunks: int | None = None
    """Into how many chunks a sequence is cut, in place of `chunk`: each has tokens / chunks, rounded up. (fpdt)"""

    tile: int | None = field(default=None, metadata={"read": parse_tokens})
    """Tokens of a rank that go through an MLP together. Default under `alst`, `untied`, `fpdt`, `sweep`: from 8K for
    Llama3-8B and larger models to 64K for narrow ones (`mlp_tile`); otherwise all."""

    x: str | None = None
    """Where block inputs are saved: `device`, `host` or `disk`; or `rebuild`: recomputed from o, layer 0's looked up in
    the embedding (sweep). One word, or a list repeated over the layers: `host, rebuild*7` saves every eighth."""

    o: str | None = None
    """Where attention outputs are saved: `device`, `host` or `disk`; or `recompute`: attention runs again. A word or a
    list, as for x. (sweep, fpdt)"""

    lse: str | None = None
    """Where the log-sum-exps of attention are saved: `device`, `host` or `disk`. (sweep, fpdt)"""

    residual: str | None = None
    """Where the residual between blocks lives, x forward and its gradient backward: `device`, `host` or `disk`.
    (sweep, fpdt)"""

    kv: str | None = None
    """Where K and V of a block, and their gradients, live while it runs: `device`, `host` or `disk`. (sweep, fpdt)"""

    cuda_graph: bool | None = None
    """Launch all GPU operations of a pass at once, as a CUDA graph: for small models, whose steps wait for the host. It
    needs one rank, zero=1 or 2, and a kernel that reads the documents' bounds on the GPU (flash4, flash). (dense)"""

    zero: int = 3
    """What is sharded over ranks. 1: optimizer states. 2: gradients too. 3: parameters too."""

    optimizer: str = "device"
    """Where AdamW's moments live: `device`, or `host`; from there each step streams them through the device."""

    kernel: str = "auto"
    """The attention kernel. `auto`: the fastest that runs on the device, dtype and head size."""

    loss_tile: int = field(default=4096, metadata={"read": parse_tokens})
    """Tokens whose logits exist at the same time."""

    host_memory: int | None = field(default=None, metadata={"read": parse_bytes})
    """Host memory of a node that tapes may take, as 96GB. Default: what is free, within the limit of the control group.
    Optimizer states come on top."""

    disk: str | None = field(default=None, metadata={"read": read_folders})
    """The folder on each node's own disk for tensors with the word `disk`; several, as `/nvme0, /nvme1`, share them
    evenly. Nothing is left there after the run."""

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
            raise PlanError(f"kernel must be a name, e.g. 'auto'; it is {self.kernel}")
        for name in RECIPE_OPTIONS:
            self._check_known(name)
        self._check_words("checkpoint", CHECKPOINTS)
        if self.cuda_graph is not None and type(self.cuda_graph) is not bool:
            raise PlanError(f"cuda_graph must be true or false; it is {self.cuda_graph}")
        self._check_words("travel", TRAVELS)
        for name in ("lse", "residual", "kv"):
            self._check_words(name, KEPT)
        self._words("x")
        self._words("o")
        numbers = {"heads": 8, "chunk": CHUNK, "chunks": 16, "tile": TILE}
        numbers |= {"loss_tile": 4096, "host_memory": 64 * 10**9}
        for name, works in numbers.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                what = {"host_memory": "bytes", "heads": "heads", "chunks": "chunks"}.get(name, "tokens")
                raise PlanError(f"{name} must be a number of {what}, e.g. {works}; it is {value}")
        if type(self.zero) is not int or self.zero not in (1, 2, 3):
            raise PlanError(f"zero must be 1, 2 or 3; it is {self.zero}")
        if self.optimizer not in IN_MEMORY:
            raise PlanError(f"optimizer={self.optimizer} does not exist: {suggestion(str(self.optimizer), IN_MEMORY)}")
        self._check_together()

    def settled(self) -> "Plan":
        """The Plan with the recipe's defaults for options that were not given. `tile` stays open: no model is known."""
        options = {name: value for name, value in RECIPES[self.recipe].options.items() if getattr(self, name) is None}
        return replace(self, **options) if options else self

    def settled_for(self, spec: Spec) -> "Plan":
        """The Plan with every option set, for a model."""
        plan = self.settled()
        return replace(plan, tile=min(mlp_tile(spec), plan.chunk or CHUNK)) if plan.tiles_by_default else plan

    @property
    def tiles_by_default(self) -> bool:
        """Whether the MLP runs in tiles whose size follows from the model. They save nothing if everything is kept."""
        return self.tile is None and self.entry.tiled and self.checkpoint != "none"

    @property
    def entry(self) -> Recipe:
        """The recipe: its schedule, options and limits."""
        return RECIPES[self.recipe]

    @property
    def sweeps(self) -> bool:
        """Whether blocks run over chunks (schedule `sweep`), not over all tokens of a rank (`whole`)."""
        return self.entry.schedule == "sweep"

    @property
    def shares(self) -> bool:
        """Whether several ranks can share a sequence."""
        return self.entry.ulysses or self.entry.ring or self.entry.tensor

    def rounds(self, split: HeadSplit) -> Rounds:
        """The rounds in which the ranks attend with these heads. Raises an error if `heads` cannot make them."""
        if self.sweeps:
            return head_rounds(split, self.heads, whole_groups=True)
        return head_rounds(split, (self.heads or len(split.q)) if self.entry.head_rounds else None)

    def placement(self, layers: int) -> Placement:
        """Where each layer's x and o are saved. Under `whole`, `checkpoint` decides about o instead."""
        return place_layers(self._words("x"), self._words("o") if self.sweeps else (RECOMPUTE,), layers)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """The options that put something on the disk."""
        lists = {name: self._words(name) for name in ("x", "o")}
        return tuple(name for name in PLACED if "disk" in lists.get(name, (getattr(self, name),)))

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that tapes on disk are striped over."""
        return split_folders(self.disk) if self.disk else ()

    def first_layers(self, layers: int) -> "Plan":
        """The Plan of a model's first layers, each with the x and o that it has in the whole model."""
        words = {name: self._words(name) for name in ("x", "o")}
        return replace(self, **{name: spell(each[:layers]) for name, each in words.items() if len(each) > layers})

    def _words(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        value = RECIPES[self.recipe].options.get(name) if value is None else value
        extra = {"x": REBUILD, "o": RECOMPUTE}[name] if self.sweeps else None
        if value is None:
            return ()
        if not isinstance(value, str):
            raise PlanError(f"{name} must be text, e.g. '{KEPT[1]}'; it is {value}")
        if name == "x" and not self.sweeps and REBUILD in value:
            raise PlanError(
                f"x={value} has no effect under recipe '{self.recipe}', which keeps no o to rebuild x from: "
                "use recipe 'sweep'"
            )
        return read_places(name, value, (*KEPT, extra) if extra else KEPT)

    def chunk_of(self, tokens: int, shorten: bool) -> int:
        """Tokens of a chunk of a sequence with `tokens` tokens. A longer chunk is an error unless `shorten`."""
        if self.chunks is not None:
            if self.chunks > tokens and not shorten:
                raise PlanError(f"chunks={self.chunks} is more than the {tokens} tokens of a sequence: use {tokens}")
            return -(-tokens // self.chunks)
        if self.chunk is not None and self.chunk > tokens and not shorten:
            raise PlanError(
                f"chunk={self.chunk} is longer than the {tokens} tokens of a sequence: use chunk={tokens}, or leave it "
                f"out, which takes at most {format_tokens(CHUNK)}"
            )
        return min(self.chunk or CHUNK, tokens)

    def _check_known(self, name: str) -> None:
        """Raise an error for an option that the recipe does not have."""
        value = getattr(self, name)
        if value is not None and name not in RECIPES[self.recipe].options:
            others = " or ".join(f"'{recipe}'" for recipe, entry in RECIPES.items() if name in entry.options)
            shown = str(value).lower() if isinstance(value, bool) else value  # as users write it
            shown = format_tokens(value) if name in ("chunk", "tile") else shown
            raise PlanError(
                f"{name}={shown} has no effect under recipe '{self.recipe}': leave it out, or use recipe {others}"
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
                f"x='{away}' of recipe '{self.recipe}' has no effect with checkpoint='none', which keeps everything: "
                "use 'full'"
            )
        if self.checkpoint == "none" and self.tile is not None:
            raise PlanError(
                f"tile={self.tile} saves nothing with checkpoint='none', which keeps every tile: use 'full'"
            )
        if self.cuda_graph and away:
            raise PlanError(
                f"x='{away}' cannot be copied within a CUDA graph (cuda_graph=true): use x='device', or leave "
                "cuda_graph out"
            )
        if self.cuda_graph and self.zero == 3:
            raise PlanError(
                "zero=3 frees weights between blocks, and a CUDA graph (cuda_graph=true) needs them where they are: "
                "use zero=2, or leave cuda_graph out"
            )
        if self.sweeps and self.heads is not None and RECOMPUTE in self._words("o"):
            raise PlanError(
                f"heads={self.heads} needs the o of every layer between its rounds, which o='{self.o}' does not save: "
                "use o='host', or leave heads out"
            )
        if self.chunk is not None and self.chunks is not None:
            raise PlanError(
                f"chunk={self.chunk} and chunks={self.chunks} both say how a sequence is cut: leave one out"
            )
        if self.chunk is not None and self.tile is not None and self.tile > self.chunk:
            raise PlanError(f"tile={self.tile} is longer than chunk={self.chunk}: a tile of {self.chunk} fits")

    def _check_disk(self) -> None:
        if self.disk is not None and (not isinstance(self.disk, str) or not all(self.folders) or not self.disk):
            raise PlanError(f"disk must name a folder, e.g. '/scratch'; it is {self.disk!r}")
        names = [os.path.normpath(folder) for folder in self.folders]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise PlanError(f"disk='{self.disk}' names '{twice}' twice: name it once, or a folder on another disk")
        using = next(iter(self.on_disk), None)
        if using and self.disk is None:
            raise PlanError(
                f"{using}='{getattr(self, using)}' needs a folder on a disk: name it, as --set plan.disk=/scratch "
                "(in Python disk='/scratch'), or use 'host'"
            )
        if self.disk is not None and not using:
            uses = " or ".join(f"{name}='disk'" for name in PLACED if name in self.entry.options)
            raise PlanError(f"disk='{self.disk}' does nothing without {uses}: use one, or leave it out")
