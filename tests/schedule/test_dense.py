"""`dense` against the naive twin in float64: ranks, ZeRO, checkpointing, documents, batches, accumulation."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.model.decoder import stored_name
from ithaca.schedule import naive
from tests.models import make_model, relative, save

EXACT = 1e-10


def random_batch(rows: int, length: int, documents: bool, ignored: float, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (rows, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(rows, length, generator=generator) < ignored, -100)
    ids = (torch.rand(rows, length, generator=generator) < 0.15).cumsum(1) if documents else torch.zeros_like(tokens)
    return tokens, labels, ids


def naive_step(folder: Path, batches: list[tuple[Tensor, ...]]) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all valid tokens of all batches, and its gradients, one row at a time."""
    source = ithaca.load_model(folder, "float64")
    weights = {name: torch.empty(shape, dtype=torch.float64) for name, shape in source.spec.shapes()}
    for name, weight in weights.items():
        source.weights.read(name, range(len(weight)), weight)
        weight.requires_grad_()
    rows = [row for batch in batches for row in zip(*batch, strict=True)]
    valid = sum(((labels[1:] != -100) & (ids[1:] == ids[:-1])).sum() for _, labels, ids in rows)
    loss = sum(naive.loss(source.spec, weights, *row) for row in rows) / valid
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def dense_step(
    folder: Path, plan: ithaca.Plan, batches: list[tuple[Tensor, ...]], replicate: int
) -> tuple[float, dict[str, Tensor]]:
    """The same step by Ithaca; in every rank of a job."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh(replicate=replicate))
    parts = [model.shard(*batch) for batch in batches]
    valid = sum(part.valid_tokens for part in parts)
    loss = 0.0
    for number, part in enumerate(parts, start=1):
        micro = model(part, valid_tokens=valid, last=number == len(parts))
        (3 * micro).backward()
        loss += micro.item()
    gradients = {stored_name(name): p.grad.full_tensor() / 3 for name, p in model.decoder.named_parameters()}
    return loss, gradients


def compare(job, folder: Path, plan: ithaca.Plan, batches: list[tuple[Tensor, ...]], replicate: int = 1) -> None:
    wanted_loss, wanted = naive_step(folder, batches)
    for loss, gradients in job.run(dense_step, folder, plan, batches, replicate):
        assert abs(loss - wanted_loss) <= EXACT * abs(wanted_loss)
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert relative(gradient, wanted[name]) <= EXACT, name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Between them everything that a block can have.

    A key's bias stays out of layers without rope: softmax cannot see it there, so its gradient is rounding alone.
    """
    top = tmp_path_factory.mktemp("models")
    return {
        "tied": save(make_model("smollm3", num_hidden_layers=2, no_rope_layers=[1, 0]), top / "tied"),
        "untied": save(make_model("llama-bias", num_hidden_layers=2), top / "untied"),
        "normed": save(make_model("qwen3", num_hidden_layers=2), top / "normed"),
    }


MATRIX = [
    (world, zero, checkpoint, heads)
    for world in (1, 2, 4)
    for zero in (1, 2, 3)
    for checkpoint in ("none", "selective", "full")
    for heads in ("tied", "untied")
]


@pytest.mark.parametrize(("world", "zero", "checkpoint", "heads"), MATRIX)
def test_equals_naive(ranks, folders, world: int, zero: int, checkpoint: str, heads: str) -> None:
    chance = random.Random(f"{world} {zero} {checkpoint} {heads}")
    plan = ithaca.Plan(zero=zero, checkpoint=checkpoint, loss_tile=chance.choice((5, 16, 4096)))
    batches = [
        # Rows that do not divide over the ranks, few valid labels in the one and many in the other
        random_batch(world + 1, 23, documents=True, ignored=0.7, seed=chance.randrange(10**6)),
        random_batch(2 * world, 31, documents=False, ignored=0.1, seed=chance.randrange(10**6)),
    ]
    compare(ranks(world), folders[heads], plan, batches)


def test_replicas(ranks, folders) -> None:
    batches = [random_batch(4, 19, documents=True, ignored=0.3, seed=5)]
    compare(ranks(4), folders["normed"], ithaca.Plan(), batches, replicate=2)


def test_naive_kernel(ranks, folders) -> None:
    batches = [random_batch(2, 19, documents=True, ignored=0.3, seed=6)]
    compare(ranks(1), folders["normed"], ithaca.Plan(kernel="naive", checkpoint="selective"), batches)


def test_a_rank_without_valid_tokens(ranks, folders) -> None:
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=0.3, seed=7)
    labels[1] = -100
    compare(ranks(2), folders["untied"], ithaca.Plan(), [(tokens, labels, ids)])


def test_no_valid_tokens_at_all(ranks, folders) -> None:
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=1.0, seed=7)
    for loss, gradients in ranks(2).run(dense_step, folders["tied"], ithaca.Plan(), [(tokens, labels, ids)], 1):
        assert loss == 0
        assert all(gradient.abs().max() == 0 for gradient in gradients.values())


def evaluate_between(folder: Path, zero: int) -> list[float]:
    """Losses of a training run in which logits are asked for at the worst moment, just before the optimizer's step."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(zero=zero), ithaca.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=0.0, seed=8)
    losses = []
    for _ in range(3):
        loss = model(model.shard(tokens, labels, ids))
        loss.backward()
        model.logits(tokens)
        with torch.no_grad():
            model(model.shard(tokens, labels, ids))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_evaluation_leaves_no_stale_weights(ranks, folders) -> None:
    by_zero = [ranks(2).run(evaluate_between, folders["tied"], zero)[0] for zero in (1, 2, 3)]
    assert by_zero[0] == by_zero[1] == by_zero[2]
    assert by_zero[0][2] < by_zero[0][1] < by_zero[0][0]
