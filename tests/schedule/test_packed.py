"""Conversations packed into rows with padding have the loss and gradients of each one alone, under every recipe."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ithaca
from ithaca.data.packing import Rows
from ithaca.data.reader import TokenFile, in_memory
from ithaca.parallel.batch import IGNORED
from tests.models import make_model, save
from tests.schedule import steps
from tests.schedule.contexts import context_step, save_models
from tests.schedule.steps import Outcome, assert_same, naive_step
from tests.schedule.test_context_uses import EIGHT, DoubleTorch

LENGTH = 48
PLANS = {
    "dense": (ithaca.Plan(), {}),
    "ulysses": (ithaca.Plan(recipe="ulysses", checkpoint="selective"), {"ulysses": 2}),
    "ring": (ithaca.Plan(recipe="ring"), {"ring": 2}),
    "sweep": (ithaca.Plan(recipe="sweep", chunk=11, tile=4), {"ulysses": 2}),
    "sweep-ring": (ithaca.Plan(recipe="sweep", chunk=14, tile=5), {"ring": 2}),
}


def conversations() -> TokenFile:
    """Turns of a user and of an assistant, of which the assistant's are learned; one is longer than a row."""
    chance = np.random.default_rng(3)
    lengths = [17, 30, 5, 60, 23, 11, 44, 2, 9, 26, 38, 1]
    turns = [np.repeat(np.arange(size) % 2, chance.integers(1, 7, size))[:size] for size in lengths]
    bounds = np.cumsum([0, *lengths])
    return in_memory(chance.integers(0, 97, bounds[-1]), bounds, np.concatenate(turns) == 1, vocab=97)


def one_by_one(data: TokenFile) -> list[steps.Rows]:
    """Each conversation as a batch of its own, at most a row long."""
    found = []
    for start, stop in zip(data.bounds()[:-1].tolist(), data.bounds()[1:].tolist(), strict=True):
        window = data.read(start, min(stop, start + LENGTH))
        assert window.learned is not None
        tokens = torch.from_numpy(window.tokens.astype(np.int64))[None]
        labels = tokens.masked_fill(~torch.from_numpy(window.learned.copy()), IGNORED)
        found.append((tokens, labels, torch.zeros_like(tokens)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["8/2"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outcome:
    return naive_step(folder, one_by_one(conversations()))


@pytest.mark.parametrize("name", PLANS)
def test_packed_conversations(ranks, folder: Path, alone: Outcome, name: str) -> None:
    """All rows of an epoch in two passes."""
    plan, sizes = PLANS[name]
    rows = Rows(conversations(), LENGTH, 0, "auto")
    assert rows.tally(rows.per_epoch)[0].padding > LENGTH / 2
    drawn = rows.draw(rows.per_epoch, 0)
    assert max(len(ids.unique()) for ids in drawn[2]) > 3
    passes = list(zip(*(tensor.split(rows.per_epoch // 2 + 1) for tensor in drawn), strict=True))
    for found in ranks(2).run(context_step, folder, plan, sizes, passes):
        assert_same(found, alone)


def test_joined_is_one_document_to_transformers(ranks, tmp_path: Path) -> None:
    """Tokens see all before them in the row, at positions that run on, across the ends of documents."""
    model = make_model("llama3", torch.float64, **EIGHT)
    folder = save(model, tmp_path / "model")
    tokens, labels, ids = Rows(conversations(), LENGTH, 0, "joined").draw(2, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(model).__module__], "torch", DoubleTorch())
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
    wanted = loss.item(), {key: parameter.grad for key, parameter in model.named_parameters()}
    plan, sizes = PLANS["sweep"]
    for found in ranks(2).run(context_step, folder, plan, sizes, [(tokens, labels, ids)]):
        assert_same(found, wanted, 1e-6)
