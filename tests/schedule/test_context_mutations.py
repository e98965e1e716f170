"""Mistakes that are planted in forked ranks: the comparison with the naive twin finds each of them in every recipe.

Without them it finds nothing: test_context.py.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.parallel.head_split import HeadSplit, split_heads
from tests.schedule.contexts import RECIPES, context_step, packed, save_models
from tests.schedule.steps import Outcome, Rows, assert_same, naive_step

EVERY = ("ulysses-none", "ulysses-selective", "ulysses-full", "alst", "untied", "sweep", "sweep-recompute")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def other_keys(heads: int, kv_heads: int, ranks: int) -> HeadSplit:
    """Each rank holds the key/value heads of its neighbour's queries."""
    split = split_heads(heads, kv_heads, ranks)
    return HeadSplit(split.q, (*split.kv[1:], split.kv[0]))


def first_holder(split: HeadSplit, parts: list[Tensor]) -> Tensor:
    """What one holder of each key/value head has, for the sum of all."""
    total = parts[0].new_zeros(len(parts[0]), len(split.kv_heads), parts[0].shape[2])
    for heads, part in reversed(list(zip(split.kv_parts, parts, strict=True))):
        total[:, heads] = part
    return total


def mistaken_step(target: str, mistake: Callable, folder: Path, plan: ithaca.Plan, batches: list[Rows]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, mistake)
        return context_step(folder, plan, {"ulysses": torch.distributed.get_world_size()}, batches)


def assert_found(job, target: str, mistake: Callable, folder: Path, name: str) -> None:
    """The step goes through and gives numbers, which are wrong."""
    plan, batches = ithaca.Plan(**RECIPES[name]), [packed(37, 3, random.Random(name))]
    wanted = naive_step(folder, batches)
    for loss, gradients in job.run(mistaken_step, target, mistake, folder, plan, batches):
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        with pytest.raises(AssertionError):
            assert_same((loss, gradients), wanted)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("heads", "world"), [("8/2", 2), pytest.param("8/8", 4, marks=pytest.mark.full)])
def test_queries_with_the_wrong_keys(ranks, folders, heads: str, world: int, name: str) -> None:
    assert_found(ranks(world), "ithaca.assemble.model.split_heads", other_keys, folders[heads], name)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("heads", "world"), [("8/1", 2), pytest.param("8/2", 4, marks=pytest.mark.full)])
def test_no_sum_over_the_holders_of_a_key(ranks, folders, heads: str, world: int, name: str) -> None:
    assert_found(ranks(world), "ithaca.parallel.exchange._joined", first_holder, folders[heads], name)


def tokens_out_of_order(self, rank: int) -> list[range]:
    """Contiguous pieces, whatever the chunks."""
    return [range(rank * self.local + rows.start, rank * self.local + rows.stop) for rows in self.tiles.slices()]


@pytest.mark.parametrize("name", ["sweep", "sweep-recompute"])
def test_tokens_that_are_not_interleaved(ranks, folders, name: str) -> None:
    plan, batches = ithaca.Plan(chunk=11, tile=4, **RECIPES[name]), [packed(37, 3, random.Random(name))]
    wanted = naive_step(folders["8/2"], batches)
    target = "ithaca.parallel.layout.Layout.places"
    for found in ranks(2).run(mistaken_step, target, tokens_out_of_order, folders["8/2"], plan, batches):
        with pytest.raises(AssertionError):
            assert_same(found, wanted)
