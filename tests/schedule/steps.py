"""A training step by the naive twin and by Ithaca under any Plan, to be compared."""

from pathlib import Path

import torch
from torch import Tensor

import ithaca
from ithaca.model.decoder import stored_name
from ithaca.schedule import reference as naive
from tests.models import relative

EXACT = 1e-10

Rows = tuple[Tensor, ...]  # tokens, labels, documents
Outcome = tuple[float, dict[str, Tensor]]  # the loss, and gradients by their Hugging Face names


def random_batch(
    rows: int, length: int, documents: bool | float, ignored: float, seed: int, vocabulary: int = 97
) -> Rows:
    """`documents`: the share of tokens that begin one; True: some. `ignored`: the share of labels that are."""
    generator, begins = torch.Generator().manual_seed(seed), 0.15 if documents is True else documents
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(rows, length, generator=generator) < ignored, -100)
    ids = (torch.rand(rows, length, generator=generator) < begins).cumsum(1) if begins else torch.zeros_like(tokens)
    return tokens, labels, ids


def read_weights(folder: Path) -> tuple[ithaca.Spec, dict[str, Tensor]]:
    """A model's sizes, and its weights by their Hugging Face names."""
    source = ithaca.load_model(folder, "float64")
    weights = {name: torch.empty(shape, dtype=torch.float64) for name, shape in source.spec.shapes()}
    for name, weight in weights.items():
        source.weights.read(name, range(len(weight)), weight)
    return source.spec, weights


def naive_step(folder: Path, batches: list[Rows]) -> Outcome:
    """The mean loss over all valid tokens of all batches, and its gradients, one row at a time."""
    spec, weights = read_weights(folder)
    for weight in weights.values():
        weight.requires_grad_()
    rows = [row for batch in batches for row in zip(*batch, strict=True)]
    valid = sum(((labels[1:] != -100) & (ids[1:] == ids[:-1])).sum() for _, labels, ids in rows)
    loss = sum(naive.loss(spec, weights, *row) for row in rows) / valid
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in weights.items()}


def model_step(model: ithaca.Model, batches: list[Rows]) -> Outcome:
    """The same by a model, in every rank of a job; the loss is scaled upstream, and its gradients back."""
    parts = [model.shard(*batch) for batch in batches]
    valid = sum(part.valid_tokens for part in parts) or 1
    loss = 0.0
    for number, part in enumerate(parts, start=1):
        micro_batch = model(part, valid_tokens=valid, last=number == len(parts))
        (3 * micro_batch).backward()
        loss += micro_batch.item()
    return loss, {stored_name(name): p.grad.full_tensor() / 3 for name, p in model.decoder.named_parameters()}


def ithaca_step(folder: Path, plan: ithaca.Plan, batches: list[Rows], replicate: int = 1) -> Outcome:
    mesh = ithaca.mesh(replicate=replicate)
    return model_step(ithaca.apply(ithaca.load_model(folder, "float64"), plan, mesh), batches)


def assert_same(found: Outcome, wanted: Outcome, bound: float = EXACT) -> None:
    assert abs(found[0] - wanted[0]) <= bound * abs(wanted[0]), f"loss {found[0]}, and {wanted[0]} is right"
    assert found[1].keys() == wanted[1].keys()
    # Where tokens see only themselves, gradients of q and k are zero but for rounding: no relative distance
    floor = 1e-5 * max(gradient.norm().item() for gradient in wanted[1].values())
    for name, gradient in found[1].items():
        assert relative(gradient, wanted[1][name], floor) <= bound, name


def compare(job, folder: Path, plan: ithaca.Plan, batches: list[Rows], replicate: int = 1) -> None:
    wanted = naive_step(folder, batches)
    for found in job.run(ithaca_step, folder, plan, batches, replicate):
        assert_same(found, wanted)
