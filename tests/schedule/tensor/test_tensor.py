"""Recipe `tensor` against the naive twin: loss and every gradient in float64, on 1 to 8 ranks."""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import ithaca
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.parallel.sharding import whole_tensors
from tests.sampling import pairwise, sampled
from tests.schedule.contexts import LAYERS, MODELS, save_models, sized
from tests.schedule.steps import Outcome, Rows, assert_same, naive_step, random_batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("tensor"))


def step(folder: Path, plan: ithaca.Plan, batches: list[Rows], axes: dict[str, int]) -> Outcome:
    """Loss and whole gradients, gathered from the tensor ranks."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh(device="cpu", **axes))
    parts = [model.shard(*batch) for batch in batches]
    valid = sum(part.valid_tokens for part in parts)
    loss = 0.0
    for number, part in enumerate(parts, start=1):
        found = model(part, valid_tokens=valid, last=number == len(parts))
        (3 * found).backward()
        loss += found.item()
    whole = whole_tensors(model.decoder, model.mesh, model.part, gradients=True)
    return loss, {name: gradient / 3 for name, gradient in whole}


def same(ranks, folders, heads: str, plan: ithaca.Plan, batches: list[Rows], **axes: int) -> None:
    world = 1
    for size in axes.values():
        world *= size
    wanted = naive_step(folders[heads], batches)
    for found in ranks(world).run(step, folders[heads], plan, batches, axes):
        assert_same(found, wanted)


@pytest.mark.parametrize(
    ("tensor", "checkpoint", "heads"), pairwise(product((1, 2, 3, 4), ("none", "selective", "full"), MODELS))
)
def test_every_gradient(ranks, folders, tensor: int, checkpoint: str, heads: str) -> None:
    chance = random.Random(f"{tensor} {checkpoint} {heads}")
    plan = sized({"recipe": "tensor", "checkpoint": checkpoint}, chance, 8)
    batches = [random_batch(2, chance.randint(9, 40), documents, 0.1, 5) for documents in (True, False)]
    same(ranks, folders, heads, plan, batches, tensor=tensor)


GRIDS = [
    {"tensor": 2, "shard": 2},
    {"tensor": 2, "replicate": 2},
    {"tensor": 2, "ring": 2},
    {"tensor": 3, "ring": 2},
    {"tensor": 2, "ring": 3},
    {"tensor": 2, "shard": 2, "replicate": 2},
    {"tensor": 2, "ring": 2, "shard": 2},
    {"tensor": 4, "ring": 2},
    {"tensor": 8},
]


@pytest.mark.parametrize(
    ("grid", "checkpoint"),
    sampled(
        product(GRIDS, ("none", "selective", "full")),
        lambda grid, checkpoint: GRIDS.index(grid) % 3 == ("none", "selective", "full").index(checkpoint),
    ),
    ids=str,
)
def test_other_axes_beside(ranks, folders, grid: dict[str, int], checkpoint: str) -> None:
    """ZeRO over the other ranks, copies, and rings whose K and V travel; accumulation; tapes of x in host memory."""
    chance = random.Random(f"{grid} {checkpoint}")
    heads = chance.choice(["8/8", "8/2", "8/1", "14/2"])
    options = {"recipe": "tensor", "checkpoint": checkpoint, "travel": chance.choice(["around", "gather"])}
    if checkpoint != "none":
        options["x"] = chance.choice(["device", "host", "device, host"])
    plan = sized(options, chance, 8)
    batches = [random_batch(4, chance.randint(9, 40), documents, 0.1, 5) for documents in (True, False)]
    same(ranks, folders, heads, plan, batches, **grid)


def post_norm() -> ModelSource:
    """A model whose blocks norm their outputs, which no folder has yet."""
    source = ithaca.load_model("tiny", "float64")
    spec = replace(source.spec.with_layers(LAYERS), post_norm=True)
    return replace(source, spec=spec, weights=RandomWeights(spec, 0))


def post_norm_step(plan: ithaca.Plan, axes: dict[str, int]) -> Outcome:
    tokens, labels, ids = random_batch(2, 23, True, 0.1, 3)
    model = ithaca.apply(post_norm(), plan, ithaca.mesh(device="cpu", **axes))
    loss = model(model.shard(tokens, labels, ids))
    loss.backward()
    return loss.item(), dict(whole_tensors(model.decoder, model.mesh, model.part, gradients=True))


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_norms_behind_attention_and_mlp(ranks, checkpoint: str) -> None:
    (wanted,) = ranks(1).run(post_norm_step, ithaca.Plan(checkpoint="none"), {})
    for found in ranks(3).run(post_norm_step, ithaca.Plan(recipe="tensor", checkpoint=checkpoint), {"tensor": 3}):
        assert_same(found, wanted)
