"""Tensor ranks in every use of a model: transformers' numbers, logits, losses by token, folders, refusals."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import ithaca
from ithaca.optimizer.adamw import clip
from ithaca.parallel.sharding import shards
from tests.models import make_model, relative, save
from tests.schedule.steps import EXACT, Outcome, Rows, assert_same, random_batch
from tests.schedule.tensor.test_tensor import step
from tests.schedule.test_context_uses import DoubleTorch

FAMILIES = ("llama-bias", "qwen2", "qwen3", "smollm3", "llama3.2")  # 6 query and 2 or 6 key/value heads


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Rows, Outcome, Tensor]]:
    """Saved models, a row of tokens, and its loss, gradients and logits as transformers computes them."""
    top, found = tmp_path_factory.mktemp("theirs"), {}
    for family in FAMILIES:
        model = make_model(family, torch.float64)
        folder, tokens = save(model, top / family), random_batch(1, 41, False, 0.0, seed=2)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[type(model).__module__], "torch", DoubleTorch())
            logits = model(tokens).logits[0]
            loss = F.cross_entropy(logits[:-1], tokens[0, 1:])
            loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        rows = tokens, tokens, torch.zeros_like(tokens)
        found[family] = folder, rows, (loss.item(), gradients), logits.detach()
    return found


@pytest.mark.parametrize(("family", "world"), [(family, 2 + number % 3) for number, family in enumerate(FAMILIES)])
def test_transformers(ranks, theirs, family: str, world: int) -> None:
    folder, rows, wanted, _ = theirs[family]
    for found in ranks(world).run(step, folder, ithaca.Plan(recipe="tensor"), [rows], {"tensor": world}):
        assert_same(found, wanted, 1e-6)


def uses(folder: Path, rows: Rows, out: Path) -> tuple[Tensor, Tensor]:
    """Between two training passes: logits of all tokens, and the loss of each. Then the folder."""
    mesh = ithaca.mesh(tensor=3, device="cpu")
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(recipe="tensor", loss_tile=7), mesh)
    batch = model.shard(*rows)
    model(batch)  # a pass that never goes backward
    with torch.inference_mode():
        logits, losses = model.logits(rows[0][0]), model.token_losses(batch)
    ithaca.save_model(model, out)
    return logits.clone(), losses.clone()


def test_logits_losses_and_folders(ranks, theirs, tmp_path: Path) -> None:
    folder, rows, _, logits = theirs["smollm3"]
    found = ranks(3).run(uses, folder, rows, tmp_path / "out")
    for ours, _ in found:
        assert relative(ours, logits) <= 1e-6
    losses = F.cross_entropy(logits[:-1], rows[0][0, 1:], reduction="none")
    assert relative(torch.cat([part for _, part in found])[: len(losses)], losses) <= 1e-6
    before, after = (load_file(side / "model.safetensors") for side in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def trained(folder: Path, recipe: str, axes: dict[str, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of the gradients over some steps, and this rank's weights that several ranks hold."""
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(recipe=recipe), ithaca.mesh(**axes))
    optimizer, norms = ithaca.make_optimizer(model, learning_rate=1e-2), []
    for seed in range(3):
        model(model.shard(*random_batch(1, 30, True, 0.1, seed))).backward()
        norms.append(clip(model, 0.1, optimizer).item())
        optimizer.step()
        optimizer.zero_grad()
    held = {
        name: weight.to_local().detach().clone() for name, weight in shards(model.decoder) if model.part.sharers(name)
    }
    return norms, held


def test_copies_of_a_weight_stay_equal(ranks, theirs) -> None:
    """Norms, and key/value heads that two of four ranks hold; clipped by the norm that one rank finds."""
    folder = theirs["qwen3"][0]
    (one, _), found = (
        ranks(1).run(trained, folder, "dense", {})[0],
        ranks(4).run(trained, folder, "tensor", {"tensor": 4}),
    )
    for norms, _ in found:
        assert norms == pytest.approx(one, rel=EXACT)
    first = found[0][1]
    assert any("k_proj" in name for name in first)
    for name, weight in first.items():
        pairs = [(0, 1), (2, 3)] if "_proj" in name else [(0, 1), (0, 2), (0, 3)]
        assert all(torch.equal(found[a][1][name], found[b][1][name]) for a, b in pairs), name
        assert weight.numel()


def refused(folder: Path, recipe: str, axes: dict[str, int]) -> str:
    with pytest.raises(ithaca.IthacaError) as problem:
        ithaca.apply(
            ithaca.load_model(folder, "float64"), ithaca.Plan(recipe=recipe), ithaca.mesh(device="cpu", **axes)
        )
    return str(problem.value)


@pytest.mark.parametrize(
    ("recipe", "axes", "sentence"),
    [
        ("tensor", {"tensor": 7}, "tensor=7 is more than the model's 6 query heads: 1 to 6 work, evenly 1, 2, 3, 6"),
        (
            "tensor",
            {"ulysses": 2, "tensor": 1},
            "divides heads among tensor ranks, but the mesh has ulysses 2: set ulysses to 1 and tensor to 2",
        ),
        (
            "sweep",
            {"tensor": 2},
            "recipe 'sweep' holds whole weights, but the mesh has tensor 2: set tensor to 1 and ulysses to 2",
        ),
        ("dense", {"tensor": 2}, "set tensor to 1 and shard to 2, or use recipe 'tensor'"),
        (
            "tensor",
            {"tensor": 2, "ulysses": 2},
            "ulysses=2 and tensor=2 both divide the heads among ranks: set one of them to 1",
        ),
        ("tensor", {"tensor": 0}, "tensor=0 is not a number of ranks: 1 or more is"),
    ],
)
def test_refused(ranks, theirs, recipe: str, axes: dict[str, int], sentence: str) -> None:
    world = max(axes.get("tensor", 1), 1) * axes.get("ulysses", 1)
    for found in ranks(world).run(refused, theirs["qwen3"][0], recipe, axes):
        assert sentence in found


def prompts(folder: Path) -> str:
    model = ithaca.apply(
        ithaca.load_model(folder, "float64"), ithaca.Plan(recipe="tensor"), ithaca.mesh(tensor=2, device="cpu")
    )
    with pytest.raises(ithaca.PlanError) as problem:
        model.greedy_decode(torch.arange(9), 2)
    return str(problem.value)


def test_prompts_are_refused(ranks, theirs) -> None:
    for found in ranks(2).run(prompts, theirs["qwen3"][0]):
        assert "use recipe 'sweep' with ulysses=2 and tensor=1" in found
