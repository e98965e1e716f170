"""Tokens, labels and documents on their way in: what is refused, and what a document's edges do."""

import numpy as np
import pytest
import torch

import ithaca
from ithaca.attention.documents import attended_length, document_bounds, positions
from ithaca.parallel.batch import Batch, batch_rows, join_batches, rank_batch


@pytest.fixture(scope="module")
def model() -> ithaca.Model:
    return ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(), ithaca.mesh(device="cpu"))


def test_documents_are_runs_of_an_id() -> None:
    ids = torch.tensor([[5, 5, 2, 2, 2, 5], [5, 5, 5, 5, 5, 9]])
    bounds = document_bounds(ids)
    assert bounds == (0, 2, 5, 6, 11, 12)  # a row ends a document, an id that comes back begins another
    assert positions(bounds).tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 2, 3, 4, 0]
    assert attended_length(bounds) == (4 + 9 + 1 + 25 + 1) / 12


def test_labels_shift_within_documents(model: ithaca.Model) -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    labels = torch.tensor([[10, 11, -100, 13], [20, 21, 22, 23]])
    batch = model.shard(tokens, labels, torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]))
    assert batch.labels.tolist() == [11, -100, 13, -100, 21, -100, 23, -100]
    assert batch.valid_tokens == 4
    assert batch.total_tokens == 8


def test_all_kinds_of_whole_numbers(model: ithaca.Model) -> None:
    tokens = torch.arange(12)
    wanted = model(model.shard(tokens, tokens)).item()
    for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32):
        assert model(model.shard(tokens.to(dtype), tokens.to(dtype))).item() == wanted
    for given in (tokens.tolist(), tokens.numpy()):
        assert model(model.shard(given, given)).item() == wanted


@pytest.mark.parametrize(
    ("tokens", "labels", "documents", "sentence"),
    [
        ([[1, 256]], [[1, 2]], None, "token id 256 is outside the vocabulary of 256: ids go from 0 to 255"),
        ([[1, -1]], [[1, 2]], None, "token id -1 is outside"),
        ([[1, 2]], [[1, 999]], None, "label id 999 is outside"),
        ([[1, 2]], [[1, -7]], None, "label id -7 is outside"),
        ([[1, 2]], [[1, 2, 3]], None, r"labels have shape \[1, 3\], tokens \[1, 2\]"),
        ([[1, 2]], [[1, 2]], [[0]], r"documents have shape \[1, 1\], tokens \[1, 2\]"),
        ([[[1, 2]]], [[[1, 2]]], None, r"tokens have shape \[1, 1, 2\]: \[S\] or \[B, S\]"),
        ([[]], [[]], None, "with at least one token"),
        ([[1.5, 2.0]], [[1, 2]], None, "tokens are float32: whole numbers"),
        ([[1, 2]], [[1.5, 2.0]], None, "labels are float32: whole numbers"),
        ([[1, 2]], [[True, True]], None, "labels are bool: whole numbers"),
        ([[1, 2]], [[1, 2]], [[0.0, 1.0]], "documents are float32: whole numbers"),
    ],
)
def test_refused(model: ithaca.Model, tokens, labels, documents, sentence: str) -> None:
    documents = None if documents is None else torch.tensor(documents)
    with pytest.raises(ithaca.InputError, match=sentence):
        model.shard(torch.tensor(tokens), torch.tensor(labels), documents)


def test_no_label_counts(model: ithaca.Model) -> None:
    """torch's mean over nothing is nan. Here it is an error, with or without gradients."""
    tokens = torch.arange(12)
    sentence = "0 of the 12 tokens of the batch have a label that counts, so it has no mean loss: leave it out, or give"
    for labels, documents in ((torch.full_like(tokens, -100), None), (tokens, tokens)):  # or documents of one token
        batch = model.shard(tokens, labels, documents)
        for arguments in ({}, {"valid_tokens": 0}):
            with pytest.raises(ithaca.InputError, match=sentence):
                model(batch, **arguments)
        with pytest.raises(ithaca.InputError, match=sentence), torch.no_grad():
            model(batch)
    with pytest.raises(ithaca.InputError, match="0 of the 1 tokens of the batch"):
        model(model.shard(torch.tensor([3]), torch.tensor([3])))
    loss = model(batch, valid_tokens=7)  # one of several micro-batches
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.full_tensor().any() for parameter in model.parameters())
    model.zero_grad()


def test_mistakes_of_a_call(model: ithaca.Model) -> None:
    tokens = torch.arange(12)
    batch = model.shard(tokens, tokens)
    with pytest.raises(ithaca.InputError, match="labels are missing: labels=tokens counts every token"):
        model.shard(tokens, None)
    for wrong in (-5, 0, 2.5, "7", 2**63):
        with pytest.raises(ithaca.InputError, match=f"valid_tokens is '?{wrong}'?: the number .* is needed, 1 or more"):
            model(batch, valid_tokens=wrong)
    assert model(batch, valid_tokens=np.int64(11)).item() == model(batch).item()
    loss = model(batch)
    loss.backward(retain_graph=True)
    with pytest.raises(ithaca.InputError, match="backward was called twice"):
        loss.backward()
    model.zero_grad()


def too_few_rows(recipe: str = "dense", **sizes: int) -> str:
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), ithaca.Plan(recipe=recipe), ithaca.mesh(**sizes))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ithaca.InputError) as caught:
        model.shard(tokens, tokens)
    return str(caught.value)


def too_few_for_copies() -> str:
    return too_few_rows(replicate=2, shard=1)


def too_few_for_tensor_ranks() -> str:
    return too_few_rows("tensor", tensor=2, shard=2)


def test_fewer_rows_than_data_ranks(ranks) -> None:
    for found in ranks(4).run(too_few_for_tensor_ranks):
        assert found.endswith("give it 2 rows or more, or let ranks share them, as ring=2 does beside tensor=2")
    for found in ranks(2).run(too_few_rows):
        assert found == (
            "the batch has 1 rows for 2 data ranks (replicate 1 × shard 2): give it 2 rows or more, "
            "or let ranks share them, as ulysses=2 does under the recipe 'sweep'"
        )
    for found in ranks(2).run(too_few_for_copies):
        assert found == "the batch has 1 rows for 2 data ranks (replicate 2 × shard 1): give it 2 rows or more"


def tiny(**sizes: int) -> ithaca.Model:
    plan = ithaca.Plan(recipe="sweep", chunk=16) if sizes else ithaca.Plan()
    return ithaca.apply(ithaca.load_model("tiny", "float32"), plan, ithaca.mesh(**sizes, device="cpu"))


def made(rows: int, seed: int) -> list[torch.Tensor]:
    """Tokens, labels with gaps, and documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (rows, 37), generator=generator)
    labels = torch.where(torch.rand(rows, 37, generator=generator) < 0.2, -100, tokens)
    return [tokens, labels, (torch.rand(rows, 37, generator=generator) < 0.1).cumsum(1)]


def own_rows(model: ithaca.Model, whole: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """What a loader reads: only the rows of this rank, and nothing of the others."""
    own = batch_rows(model.mesh, rows)
    return [tensor[own.start : own.stop].clone() for tensor in whole]


def both_ways(rows: list[int], **sizes: int) -> bool:
    """Whether batches made of this rank's rows alone equal those of the whole batch, in every field."""
    model = tiny(**sizes)
    wholes = [made(count, seed) for seed, count in enumerate(rows)]
    mesh, vocab = model.mesh, model.spec.vocab
    joined = join_batches(
        mesh,
        lambda: [
            rank_batch(*own_rows(model, whole, count), count, mesh, vocab, model.reservation.layout)
            for whole, count in zip(wholes, rows, strict=True)
        ],
    )
    return all(same(ours, model.shard(*whole)) for ours, whole in zip(joined, wholes, strict=True))


def same(a: Batch, b: Batch) -> bool:
    pairs = ((vars(a)[name], vars(b)[name]) for name in vars(a))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def rings_and_rows() -> bool:
    return both_ways([2, 5], ring=2)


def copies_and_rows() -> bool:
    return both_ways([4, 7, 9], replicate=2)


@pytest.mark.parametrize("work", [rings_and_rows, copies_and_rows])
def test_own_rows_make_the_same_batch(ranks, work) -> None:
    assert ranks(4).run(work) == [True] * 4


def test_own_rows_of_one_rank() -> None:
    assert both_ways([1, 3])


def changed_on_one(rank: int, change: str) -> str:
    """One rank of four, two of which share a sequence, gets it wrong; what every rank is told."""
    model = tiny(ulysses=2)
    mesh, rows = model.mesh, 6
    own = own_rows(model, made(rows, 1), rows)
    if mesh.rank == rank:
        if change == "token":
            own[0][0, 3] = (own[0][0, 3] + 1) % 256
        elif change == "vocabulary":
            own[0][0, 3] = 999
        elif change == "rows":
            own = [tensor[1:] for tensor in own]
        else:
            own = [tensor[:, :-1] for tensor in own]
    with pytest.raises(ithaca.InputError) as caught:
        join_batches(mesh, lambda: [rank_batch(*own, rows, mesh, model.spec.vocab, model.reservation.layout)])
    return str(caught.value).removeprefix(f"rank {rank}: ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("token", "ranks 2 and 3 share a sequence, but were given different rows"),
        ("vocabulary", "token id 999 is outside the vocabulary"),
        ("rows", "data rank 1 was given 2 rows of a batch of 6 rows over 2 data ranks: it needs 3, rows 3 to 5"),
        ("length", r"rank 3 has batches of shapes [(6, 36)], rank 0 [(6, 37)]: they must agree"),
    ],
)
def test_a_mistake_of_one_rank_is_told_to_all(ranks, change: str, sentence: str) -> None:
    told = ranks(4).run(changed_on_one, 3, change)
    assert len(set(told)) == 1
    assert sentence in told[0]


def test_rows_in_another_order_are_another_batch(model: ithaca.Model) -> None:
    whole = made(3, 5)
    other = [tensor[[1, 0, 2]] for tensor in whole]
    assert model.shard(*whole).fingerprint != model.shard(*other).fingerprint
