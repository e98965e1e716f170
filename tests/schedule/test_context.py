"""Ranks that share a sequence against the naive twin in float64: every recipe, head count and number of ranks."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ithaca
from tests.schedule.contexts import (
    MODELS,
    RECIPES,
    context_step,
    head_counts,
    packed,
    save_models,
    sized,
    with_rounds,
)
from tests.schedule.steps import assert_same, naive_step, random_batch

WORLDS = (1, 2, 3, 4, 5, 7, 8)
FEW = ("ulysses-selective", "alst", "untied", "sweep", "sweep-recompute")  # one of each way to go


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def is_sampled(world: int, heads: str, recipe: str) -> bool:
    """Two ranks with every recipe, the others with some, eight with one; head counts in turn."""
    number, place = list(RECIPES).index(recipe), WORLDS.index(world)
    every = {1: 4, 2: 1, 3: 3, 4: 4, 5: 13, 7: 13, 8: 13}[world]
    fitting = [name for name in MODELS if head_counts(name)[0] >= world]
    return (number + place) % every == 0 and heads == fitting[(number // every + place) % len(fitting)]


def matrix() -> Iterator[object]:
    for world in WORLDS:
        for heads in MODELS:
            if head_counts(heads)[0] < world:
                continue  # refused
            for recipe in RECIPES:
                plans = with_rounds(recipe, heads, world)
                for place, (name, options) in enumerate(plans.items()):
                    sampled = is_sampled(world, heads, recipe) and place == len(plans) // 2
                    marks = () if sampled else (pytest.mark.full,)
                    yield pytest.param(world, heads, name, options, id=f"{world}-{heads}-{name}", marks=marks)


@pytest.mark.parametrize(("world", "heads", "name", "options"), list(matrix()))
def test_equals_naive(ranks, folders, world: int, heads: str, name: str, options: dict) -> None:
    chance = random.Random(f"{world} {heads} {name}")
    batches = [
        # Few valid labels in the one and many in the other
        packed(chance.choice((37, 41, 53)), chance.choice((1, 2, 5, 20)), chance),
        random_batch(2, 23, documents=False, ignored=0.8, seed=chance.randrange(10**6)),
    ]
    wanted = naive_step(folders[heads], batches)
    plan, late = sized(options, chance, 37), chance.choice((None, chance.randrange(10**6)))
    found = ranks(world).run(context_step, folders[heads], plan, {"ulysses": world}, batches, late)
    for outcome in found:
        assert_same(outcome, wanted)
        assert outcome[0] == found[0][0]


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_long_rows_of_any_documents(ranks, folders, world: int, seed: int) -> None:
    chance = random.Random(f"{world} {seed}")
    heads = chance.choice([name for name in MODELS if head_counts(name)[0] >= world])
    options = chance.choice(list(with_rounds(chance.choice(list(RECIPES)), heads, world).values()))
    batches = [packed(101, chance.randint(1, 20), chance)]
    found = ranks(world).run(context_step, folders[heads], sized(options, chance, 101), {"ulysses": world}, batches)
    assert_same(found[0], naive_step(folders[heads], batches))


SHORT = {(2, 1): "alst", (3, 2): "sweep-rebuild", (4, 3): "untied", (8, 5): "sweep", (8, 9): None}


def short_rows() -> Iterator[object]:
    for (world, tokens), sampled in SHORT.items():
        for recipe in RECIPES:
            marks = () if recipe == sampled else (pytest.mark.full,)
            yield pytest.param(world, tokens, recipe, id=f"{tokens}-tokens-on-{world}-{recipe}", marks=marks)


@pytest.mark.parametrize(("world", "tokens", "recipe"), list(short_rows()))
def test_hardly_any_tokens(ranks, folders, world: int, tokens: int, recipe: str) -> None:
    """Fewer than ranks, so that some have nothing but what fills up."""
    ids = torch.arange(tokens)[None] if tokens == 2 else torch.zeros(1, tokens, dtype=torch.long)
    numbers = torch.arange(1, tokens + 1)[None]
    batches, chance = [(numbers, numbers, ids)], random.Random(recipe)
    plan = sized(RECIPES[recipe], chance, tokens)
    found = ranks(world).run(context_step, folders["8/2"], plan, {"ulysses": world}, batches)
    if tokens > 2:
        assert_same(found[0], naive_step(folders["8/2"], batches))
    else:  # nothing is predicted
        assert {loss for loss, _ in found} == {0.0}
        assert all(gradient.abs().max() == 0 for gradient in found[0][1].values())


DATA = {4: {"shard": 2, "ulysses": 2}, 8: {"replicate": 2, "shard": 2, "ulysses": 2}}


def with_data_ranks() -> Iterator[object]:
    for world in DATA:
        for zero in (1, 2, 3):
            for number, recipe in enumerate(RECIPES):
                place = list(FEW).index(recipe) if recipe in FEW else -1
                sampled = place >= 0 and (place % 3 == zero - 1 if world == 4 else (place, zero) == (3, 3))
                heads = list(MODELS)[(number + zero) % len(MODELS)]
                marks = () if sampled else (pytest.mark.full,)
                yield pytest.param(world, zero, heads, recipe, id=f"{world}-zero{zero}-{heads}-{recipe}", marks=marks)


@pytest.mark.parametrize(("world", "zero", "heads", "recipe"), list(with_data_ranks()))
def test_beside_data_ranks(ranks, folders, world: int, zero: int, heads: str, recipe: str) -> None:
    """Sequences of different lengths, each shared by two ranks: ranks have different numbers of rows and chunks."""
    chance, rows = random.Random(f"{world} {zero} {recipe}"), world // 2 + 1
    batches = [
        random_batch(rows, 17, documents=True, ignored=0.7, seed=chance.randrange(10**6)),
        random_batch(2 * rows - 1, 11, documents=False, ignored=0.1, seed=chance.randrange(10**6)),
    ]
    options = RECIPES[recipe]
    cut = {"chunk": 7, "tile": 3} if options["recipe"] in ("sweep", "fpdt") else {}
    plan = ithaca.Plan(zero=zero, loss_tile=5, **cut, **options)
    wanted = naive_step(folders[heads], batches)
    for outcome in ranks(world).run(context_step, folders[heads], plan, DATA[world], batches):
        assert_same(outcome, wanted)
