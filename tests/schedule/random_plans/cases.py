"""A case from a seed alone: a small model, a mesh, a Plan of any recipe, and the batches of a step.

Most cases are ones that Ithaca accepts: what it would refuse is drawn again. A daring case takes what comes.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ithaca
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import split_heads, usable_rounds
from ithaca.parallel.layout import Layout
from ithaca.plans.places import IN_MEMORY, KEPT, REBUILD, RECOMPUTE
from ithaca.plans.plan import CHECKPOINTS, TRAVELS
from ithaca.plans.recipes import RECIPES
from tests.models import FAMILIES
from tests.schedule.random_plans.uses import DECODING, USES

Options = dict[str, Any]

DARING = 0.08  # the share of cases that may be refused
# How often each is drawn: schedules with more options, and worlds with more meshes, more often
RECIPE_WEIGHTS = {recipe: {"sweep": 5, "fpdt": 3, "tensor": 3, "untied": 3}.get(recipe, 2) for recipe in RECIPES}
WORLD_WEIGHTS = {1: 2, 2: 3, 3: 2, 4: 5, 5: 1, 6: 4, 7: 1, 8: 6}
FROZEN = (
    *("self_attn", "mlp", "embedding", "head", "norm", "blocks", "blocks.0", "blocks.1"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "bias"),
)
MOST_TOKENS = 70  # of a pass, on the ranks that share a sequence; a single row may have a few more


@dataclass(frozen=True)
class BatchSpec:
    """A micro-batch, which `steps.random_batch` makes."""

    rows: int
    length: int
    documents: float  # the share of tokens that begin one
    ignored: float  # the share of labels that are not learned
    seed: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """What runs. Its repr is the line that reproduces it."""

    seed: int
    family: str
    keys: Options  # of the model's configuration
    axes: dict[str, int]  # those with more than one rank
    plan: Options  # but `disk`
    folders: int  # that tapes on disk are striped over; 0: none is there
    batches: tuple[BatchSpec, ...]
    frozen: tuple[str, ...]  # parameters with one of these in their names have no gradient
    late: int | None  # seeds random delays of copies and of the disk
    uses: tuple[str, ...]  # between the steps, and before them
    cache: str  # where K and V of prompts live
    steps: int  # with an optimizer's step between them, at a learning rate of 0

    @property
    def world(self) -> int:
        return math.prod(self.axes.values())

    @property
    def recipe(self) -> str:
        return self.plan["recipe"]


def make_case(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(f"plan {seed}")
    daring = chance.random() < DARING
    recipe = _weighted(chance, RECIPE_WEIGHTS)
    axes = _axes(chance, recipe, daring)
    family, keys = _model(chance, axes, daring)
    plan = _plan(chance, recipe, axes, keys, daring)
    on_disk = any("disk" in str(plan.get(name)) for name in ("x", "o", "lse", "residual", "kv"))
    plan, batches = _sized(chance, plan, axes, daring)
    return Case(
        seed=seed,
        family=family,
        keys=keys,
        axes={name: size for name, size in vars(axes).items() if size > 1},
        plan=plan,
        folders=chance.choice((1, 2)) if on_disk else 0,
        batches=batches,
        frozen=tuple(chance.sample(FROZEN, chance.choice((1, 2, 3)))) if chance.random() < 0.2 else (),
        late=chance.choice((None, chance.randrange(10**6))),
        uses=tuple(use for use in USES if chance.random() < 0.3 and (axes.tensor == 1 or use != DECODING)),
        cache=chance.choice(IN_MEMORY),
        steps=chance.choice((1, 1, 2)),
    )


def _weighted(chance: random.Random, weights: dict[Any, int]) -> Any:
    return chance.choices(list(weights), list(weights.values()))[0]


def _axes(chance: random.Random, recipe: str, daring: bool) -> Axes:
    """The prime factors of a random world, each on some axis that the recipe allows."""
    entry = RECIPES[recipe]
    shared = [name for name in ("ring", "ulysses", "tensor") if daring or getattr(entry, name)]
    # Ranks that share a sequence are the more interesting ones, and recipe `tensor` is for tensor ranks
    names = ["replicate", "shard", *shared, *shared, *(["tensor", "tensor"] if entry.tensor else [])]
    sizes: Counter[str] = Counter()
    for factor in _prime_factors(_weighted(chance, WORLD_WEIGHTS)):
        name = chance.choice(names)
        sizes[name] = max(sizes[name], 1) * factor
    return Axes(**sizes)


def _prime_factors(number: int) -> list[int]:
    first = next((factor for factor in range(2, number + 1) if number % factor == 0), None)
    return [first, *_prime_factors(number // first)] if first else []


def _model(chance: random.Random, axes: Axes, daring: bool) -> tuple[str, Options]:
    """A family of models, and keys of its configuration."""
    family, layers = chance.choice(list(FAMILIES)), chance.choice((1, 2, 3, 4, 4, 6))
    heads, kv_heads = _heads(chance, 1 if daring else axes.by_heads)
    # transformers' class of Llama alone wants a hidden size that heads divide
    hidden = heads * chance.randint(2, 6) if FAMILIES[family][0] == "Llama" else chance.randint(6, 60)
    keys = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": chance.choice((2, 4, 6, 8)),
        "hidden_size": hidden,
        "intermediate_size": chance.randint(3, 48),
        "num_hidden_layers": layers,
        "vocab_size": chance.randint(5, 130),
        "tie_word_embeddings": chance.random() < 0.5,
    }
    if family == "smollm3":
        keys["no_rope_layers"] = [chance.randint(0, 1) for _ in range(layers)]
    if family in ("llama-bias", "qwen3", "smollm3"):
        keys["attention_bias"] = chance.random() < 0.5
    return family, keys


def _heads(chance: random.Random, least: int) -> tuple[int, int]:
    """Query heads, `least` or more, and key/value heads."""
    while True:
        kv_heads, each = chance.randint(1, 8), chance.randint(1, 4)
        if least <= kv_heads * each <= 16:
            return kv_heads * each, kv_heads


def _plan(chance: random.Random, recipe: str, axes: Axes, keys: Options, daring: bool) -> Options:
    """Options of a Plan, but for sizes in tokens."""
    while True:
        options = {"recipe": recipe, **_options(chance, recipe, axes, keys, daring)}
        if daring or _is_possible(options, axes, keys):
            return options


def _options(chance: random.Random, recipe: str, axes: Axes, keys: Options, daring: bool) -> Options:
    """Some of the options that the recipe has."""
    layers, heads = keys["num_hidden_layers"], keys["num_attention_heads"]
    sweeps = RECIPES[recipe].schedule == "sweep"
    split = split_heads(heads, keys["num_key_value_heads"], min(axes.by_heads, heads))
    rounds = list(range(1, heads + 1)) if daring else usable_rounds(split, whole_groups=sweeps)
    draws: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: chance.choice(CHECKPOINTS),
        "heads": lambda: chance.choice(rounds),
        "travel": lambda: chance.choice(TRAVELS),
        "x": lambda: _words(chance, layers, (*KEPT, REBUILD, REBUILD, REBUILD) if sweeps else KEPT),
        "o": lambda: _words(chance, layers, (*KEPT, RECOMPUTE)),
        "lse": lambda: chance.choice(KEPT),
        "residual": lambda: chance.choice(KEPT),
        "kv": lambda: chance.choice(KEPT),
    }
    found = {name: draw() for name, draw in draws.items() if name in RECIPES[recipe].options and chance.random() < 0.6}
    return found | {
        "zero": chance.choice((1, 2, 3)),
        "optimizer": chance.choice(("device", "host")),
        "loss_tile": chance.choice((1, 5, 16, 4096)),
        "kernel": chance.choice(("auto", "auto", "naive")),
    }


def _words(chance: random.Random, layers: int, known: tuple[str, ...]) -> str:
    """Places for some layers, to be repeated over the others."""
    return ", ".join(chance.choice(known) for _ in range(chance.randint(1, layers)))


def _is_possible(options: Options, axes: Axes, keys: Options) -> bool:
    """Whether Ithaca takes these options, as far as that is known without a model."""
    try:
        plan = ithaca.Plan(**options, disk="/" if "disk" in str(options) else None)
        plan.placement(keys["num_hidden_layers"])
    except ithaca.PlanError:
        return False
    return axes.ulysses == 1 or axes.tensor == 1


def _sized(chance: random.Random, plan: Options, axes: Axes, daring: bool) -> tuple[Options, tuple[BatchSpec, ...]]:
    """The Plan with its sizes in tokens, and the micro-batches: some that divide nothing, and one that divides."""
    options = RECIPES[plan["recipe"]].options
    others = [_batch(chance, axes.data, daring) for _ in range(chance.choice((0, 1, 1, 2)))]
    shortest = min((batch.length * max(batch.rows // axes.data, 1) for batch in others), default=MOST_TOKENS // 2)
    sizes: Options = {}
    if "chunks" in options and chance.random() < 0.5:
        sizes["chunks"] = chance.randint(1, min(shortest, 9))
    elif "chunk" in options and chance.random() < 0.9:
        sizes["chunk"] = max(shortest // chance.randint(1, 12), 1) + (shortest if daring else 0)
    if plan.get("checkpoint") != "none" and chance.random() < 0.7:
        sizes["tile"] = chance.randint(1, min(sizes.get("chunk", 12), 30))
    length = _dividing(chance, sizes, axes)
    plain = BatchSpec(axes.data, length, 0.0, ignored=0.0, seed=chance.randrange(10**6))
    others.insert(chance.randint(0, len(others)), plain)
    return plan | sizes, tuple(others)


def _batch(chance: random.Random, data_ranks: int, daring: bool) -> BatchSpec:
    rows = (
        chance.randint(1, data_ranks)
        if daring
        else data_ranks * chance.choice((1, 1, 2)) + chance.choice((0, 0, chance.randrange(data_ranks)))
    )
    most = max(MOST_TOKENS * data_ranks // rows, 2)
    return BatchSpec(
        rows=rows,
        length=chance.choice((chance.randint(1, most), chance.randint(most // 2, most))),
        documents=chance.choice((0.0, 0.05, 0.2, 0.6, 1.0)),
        ignored=chance.choice((0.0, 0.3, 0.9, 1.0)),
        seed=chance.randrange(10**6),
    )


def _dividing(chance: random.Random, sizes: Options, axes: Axes) -> int:
    """A number of tokens that makes chunks of one size, without padding."""
    if "chunks" in sizes:
        return sizes["chunks"] * axes.context * 2 * chance.randint(1, 2)
    if "chunk" not in sizes:
        return axes.context * 2 * chance.randint(1, max(MOST_TOKENS // (2 * axes.context), 1))
    chunk = Layout(10**6, sizes["chunk"], axes.by_heads, axes.ring).chunks.size
    return max(chunk * chance.randint(1, max(MOST_TOKENS // chunk, 1)), 2)
