"""`dense` against the naive twin in float64: ranks, ZeRO, checkpointing, documents, batches, accumulation."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.schedule.whole import attention
from tests.models import make_model, relative, save
from tests.sampling import pairwise, sampled
from tests.schedule.steps import EXACT, Rows, compare, random_batch


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
        "double": save(make_model("qwen2", torch.float64, num_hidden_layers=2), top / "double"),
    }


MATRIX = itertools.product((1, 2, 4), (1, 2, 3), ("none", "selective", "full"), ("tied", "untied"))


@pytest.mark.parametrize(("world", "zero", "checkpoint", "heads"), pairwise(MATRIX))
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


def test_an_id_that_comes_back_is_another_document(ranks, folders) -> None:
    tokens, labels, _ = random_batch(2, 12, documents=False, ignored=0.2, seed=9)
    ids = torch.tensor([0, 0, 1, 1, 0, 0, 0, 2, 2, 1, 1, 1]).expand(2, 12)
    compare(ranks(1), folders["normed"], ithaca.Plan(), [(tokens, labels, ids)])


def test_a_rank_without_valid_tokens(ranks, folders) -> None:
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=0.3, seed=7)
    labels[1] = -100
    compare(ranks(2), folders["untied"], ithaca.Plan(), [(tokens, labels, ids)])


def test_no_valid_tokens_at_all(ranks, folders) -> None:
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=1.0, seed=7)
    for found in ranks(2).run(refusal, folders["tied"], (tokens, labels, ids)):
        assert "0 of the 38 tokens of the batch have a label that counts, so it has no mean loss" in found
    # As a micro-batch beside another one it adds nothing
    compare(ranks(2), folders["tied"], ithaca.Plan(), [(tokens, labels, ids), (tokens, tokens, ids)])


def refusal(folder: Path, batch: Rows) -> str:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(), ithaca.mesh())
    with pytest.raises(ithaca.InputError) as caught:
        model(model.shard(*batch))
    return str(caught.value)


def evaluate_between(folder: Path, zero: int, out: Path) -> list[float]:
    """Losses of a training run in which the model is used in every other way at the worst moments."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(zero=zero), ithaca.mesh())
    tokens, labels, ids = random_batch(2, 19, documents=False, ignored=0.0, seed=8)
    batch = model.shard(tokens, labels, ids)
    model(batch)  # gathers, and no backward pass follows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        thrown = model(batch, last=False)  # a micro-batch that is thrown away again
        thrown.backward()
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        assert thrown.item() == loss.item()
        model.logits(tokens)
        with torch.no_grad():
            model(batch)
        with torch.inference_mode():
            model(model.shard(tokens, labels, ids))
            model.logits(tokens)
        model(batch)  # with gradients, but no backward pass follows
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model(batch)
    optimizer.step()
    ithaca.save_model(model, out)
    again = ithaca.apply(ithaca.load_model(out, "float64"), ithaca.Plan(), ithaca.mesh())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    return losses


def test_no_use_of_a_model_leaves_stale_weights(ranks, folders, tmp_path: Path) -> None:
    by_zero = [ranks(2).run(evaluate_between, folders["double"], zero, tmp_path / str(zero))[0] for zero in (1, 2, 3)]
    assert by_zero[0] == by_zero[1] == by_zero[2]
    assert by_zero[0][2] < by_zero[0][1] < by_zero[0][0]


def two_before_backward(folder: Path, zero: int) -> list[Tensor]:
    """Gradients of two losses whose forward passes both come first."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(zero=zero), ithaca.mesh())
    batches = [model.shard(*random_batch(2, 19, documents=True, ignored=0.2, seed=seed)) for seed in (1, 2)]
    losses = [model(batch) for batch in batches]
    for loss in losses:
        loss.backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def one_by_one(folder: Path) -> list[Tensor]:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(), ithaca.mesh())
    for seed in (1, 2):
        model(model.shard(*random_batch(2, 19, documents=True, ignored=0.2, seed=seed))).backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def test_two_forward_passes_before_backward(ranks, folders) -> None:
    wanted = ranks(2).run(one_by_one, folders["untied"])[0]
    for zero in (1, 2, 3):
        found = ranks(2).run(two_before_backward, folders["untied"], zero)[0]
        assert all(relative(a, b) <= EXACT for a, b in zip(found, wanted, strict=True))


def freeze(folder: Path, zero: int, checkpoint: str, frozen: str) -> dict[str, Tensor | None]:
    plan = ithaca.Plan(zero=zero, checkpoint=checkpoint)
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    model(model.shard(*random_batch(2, 19, documents=True, ignored=0.2, seed=3))).backward()
    return {name: p.grad if p.grad is None else p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def nothing_frozen(ranks, folders) -> dict[str, Tensor]:
    return ranks(2).run(freeze, folders["untied"], 3, "none", "nothing")[0]


FROZEN = ["self_attn", "mlp", "embedding", "head", "norm", "blocks.0"]
ZEROS = [(1, "full"), (2, "selective"), (3, "full")]


@pytest.mark.parametrize(
    ("frozen", "zero", "checkpoint"),
    sampled(
        [(frozen, *zero) for frozen in FROZEN for zero in ZEROS],
        lambda frozen, *zero: zero == ZEROS[FROZEN.index(frozen) % 3],
    ),
)
def test_frozen_weights(ranks, folders, nothing_frozen, frozen: str, zero: int, checkpoint: str) -> None:
    for name, gradient in ranks(2).run(freeze, folders["untied"], zero, checkpoint, frozen)[0].items():
        if frozen in name:
            assert gradient is None
        else:
            assert relative(gradient, nothing_frozen[name]) <= EXACT, name


def watched_backward(folder: Path, checkpoint: str, rows: Rows) -> list[bool]:
    """For each attention backward, whether o and do of this rank's tokens are still there."""
    made, there = [], []
    begin, attend = attention.BackwardAttention.__init__, attention.Attention.attend_backward

    def begun(self: attention.BackwardAttention, *args: object) -> None:
        begin(self, *args)  # pyrefly: ignore
        made.append(self)

    def attended(self: attention.Attention, *args: object) -> object:
        there.append(hasattr(made[-1], "o") or hasattr(made[-1], "do"))
        return attend(self, *args)  # pyrefly: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.BackwardAttention, "__init__", begun)
        patch.setattr(attention.Attention, "attend_backward", attended)
        model = ithaca.apply(
            ithaca.load_model(folder, "float64"),
            ithaca.Plan(recipe="ulysses", checkpoint=checkpoint),
            ithaca.mesh(ulysses=2),
        )
        model(model.shard(*rows)).backward()
    return there


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_what_was_sent_is_freed(ranks, folders, checkpoint: str) -> None:
    rows = random_batch(1, 24, documents=False, ignored=0.0, seed=1)
    for there in ranks(2).run(watched_backward, folders["normed"], checkpoint, rows):
        assert there == [False, False]
