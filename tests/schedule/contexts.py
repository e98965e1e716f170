"""Ranks that share a sequence: small models of many head counts, Plans of every recipe, and steps under them."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ithaca
from ithaca.parallel.head_split import split_heads, usable_rounds
from tests.models import make_model, save
from tests.schedule.steps import Outcome, Rows, model_step, random_batch

LAYERS = 3

# query/kv heads -> family and keys: between them everything that a block can have. o is wider than x in some, so that
# a rebuilt x finds room on its tapes, and narrower in others
MODELS = {
    "8/8": ("llama-bias", {"head_dim": 4, "hidden_size": 32, "tie_word_embeddings": False}),
    "8/2": ("qwen3", {"head_dim": 4, "hidden_size": 24, "tie_word_embeddings": False}),
    "8/1": ("smollm3", {"head_dim": 2, "hidden_size": 24, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "14/2": ("qwen2", {"hidden_size": 56, "tie_word_embeddings": True}),
    "6/3": ("llama3", {"head_dim": 4, "hidden_size": 36}),
}

Options = dict[str, str | int]


def head_counts(name: str) -> tuple[int, int]:
    heads, kv_heads = map(int, name.split("/"))
    return heads, kv_heads


def save_models(top: Path) -> dict[str, Path]:
    folders = {}
    for number, (name, (family, keys)) in enumerate(MODELS.items()):
        heads, kv_heads = head_counts(name)
        counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": LAYERS}
        model = make_model(family, torch.float64, seed=number, intermediate_size=40, **counts, **keys)
        folders[name] = save(model, top / name.replace("/", "-"))
    return folders


RECIPES: dict[str, Options] = {
    "ulysses-none": {"recipe": "ulysses", "checkpoint": "none"},
    "ulysses-selective": {"recipe": "ulysses", "checkpoint": "selective"},
    "ulysses-full": {"recipe": "ulysses", "checkpoint": "full"},
    "alst": {"recipe": "alst"},
    "alst-selective": {"recipe": "alst", "checkpoint": "selective", "x": "device, host*2"},
    "untied": {"recipe": "untied"},
    "sweep": {"recipe": "sweep"},
    "sweep-recompute": {"recipe": "sweep", "o": "recompute"},
    "sweep-rebuild": {"recipe": "sweep", "x": "rebuild, host, rebuild"},
    "sweep-mixed": {"recipe": "sweep", "x": "device, rebuild, host", "o": "host, recompute, device"},
    "sweep-keys-on-host": {"recipe": "sweep", "kv": "host", "lse": "host"},
    "sweep-all-on-host": {"recipe": "sweep", "kv": "host", "lse": "host", "residual": "host"},
    "sweep-all-on-device": {"recipe": "sweep", "x": "device", "o": "device", "residual": "device"},
    "fpdt": {"recipe": "fpdt"},
}


def with_rounds(recipe: str, heads: str, ranks: int) -> dict[str, Options]:
    """The Plans of a recipe: under `untied` one for each usable number of heads."""
    if recipe != "untied":
        return {recipe: RECIPES[recipe]}
    usable = usable_rounds(split_heads(*head_counts(heads), ranks))
    return {f"untied-{count}": {"recipe": "untied", "heads": count} for count in usable}


def sized(options: Options, chance: random.Random, shortest: int) -> ithaca.Plan:
    """A Plan with chunks and tiles that divide nothing, for sequences of that many tokens at least."""
    sizes: Options = {"loss_tile": chance.choice((5, 16, 4096)), "zero": chance.choice((1, 2, 3))}
    if options["recipe"] in ("sweep", "fpdt"):
        sizes["chunk"] = chance.randint(min(4, shortest), shortest)
        sizes["tile"] = chance.randint(1, int(sizes["chunk"]))
    elif options.get("checkpoint") != "none":
        sizes["tile"] = chance.randint(1, 12)
    return ithaca.Plan(**sizes, **options)  # pyrefly: ignore


def packed(length: int, documents: int, chance: random.Random) -> Rows:
    """One row of so many documents, of one token and more."""
    tokens, labels, _ = random_batch(1, length, documents=False, ignored=0.3, seed=chance.randrange(10**6))
    labels[:, -2:] = tokens[:, -2:]
    ids = torch.zeros_like(tokens)
    ids[0, sorted(chance.sample(range(1, length), documents - 1))] = 1
    return tokens, labels, ids.cumsum(1)


def random_delays(seed: int, longest: float = 0.002) -> Callable[[], None]:
    chance = random.Random(seed)
    return lambda: time.sleep(chance.random() * longest)


def open_model(folder: Path, plan: ithaca.Plan, sizes: dict[str, int]) -> ithaca.Model:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh(**sizes))
    model.engine.poison = True  # a tile that is read too late or too early is NaN
    return model


def context_step(
    folder: Path, plan: ithaca.Plan, sizes: dict[str, int], batches: list[Rows], late: int | None = None
) -> Outcome:
    """A step in every rank; `late` seeds random delays of copies and of the disk."""
    model = open_model(folder, plan, sizes)
    if late is not None:
        model.engine.before_copy = random_delays(late + model.mesh.rank)
        model.engine.before_disk = random_delays(late + model.mesh.rank + 1)
    return model_step(model, batches)
