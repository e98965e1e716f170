"""On a GPU: passes as CUDA graphs are those whose operations are launched one by one, up to rounding."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.base.errors import PlanError
from ithaca.optimizer.adamw import clip
from tests.models import make_model, save
from tests.test_gpu import GPU_SIZES

TOKENS = 1024


@pytest.fixture(params=["flash4", "flash"])
def kernel(request: pytest.FixtureRequest) -> str:
    if not KERNEL_FACTS[request.param].installed:
        pytest.skip(f"{KERNEL_FACTS[request.param].package} is not installed")
    return request.param


def make(folder: Path, kernel: str, checkpoint: str, graph: bool) -> ithaca.Model:
    plan = ithaca.Plan(recipe="dense", checkpoint=checkpoint, zero=2, kernel=kernel, cuda_graph=graph)
    return ithaca.apply(ithaca.load_model(folder, "bfloat16"), plan)


def batch(model: ithaca.Model, lengths: list[int], seed: int) -> ithaca.Batch:
    tokens = torch.randint(0, 97, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return model.shard(tokens, tokens, ids)


def random_lengths(documents: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    bounds = [0, *sorted((torch.randperm(TOKENS - 1, generator=draw)[: documents - 1] + 1).tolist()), TOKENS]
    return torch.tensor(bounds).diff().tolist()


def gradients(model: ithaca.Model) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor().double() for name, p in model.named_parameters() if p.grad is not None}


def steps(model: ithaca.Model) -> list[dict[str, Tensor]]:
    """Losses and gradients of steps over one, two or three batches, with other documents each. Weights stay."""
    found = []
    for number, documents in enumerate(([1], [5], [16, 2], [3], [40], [7, 1, 30], [300])):
        model.zero_grad()
        batches = [batch(model, random_lengths(count, 10 * number + count), number) for count in documents]
        valid, losses = sum(each.valid_tokens for each in batches), []
        for place, each in enumerate(batches):
            losses.append(model(each, valid_tokens=valid, last=place == len(batches) - 1))
            losses[-1].backward()
        found.append({"loss": torch.stack(losses).detach().double(), **gradients(model)})
    return found


def errors(found: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> Tensor:
    """[steps, gradients], relative."""
    pairs = [[(a[name], b[name]) for name in b if name != "loss"] for a, b in zip(found, exact, strict=True)]
    return torch.stack([torch.stack([(a - b).norm() / b.norm() for a, b in step]) for step in pairs])


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama3.1", "smollm3"])
def test_replays(tmp_path: Path, kernel: str, checkpoint: str, family: str) -> None:
    """No further from float64 than passes without a graph. Both kernels add in any order, so no bits are compared."""
    folder = save(make_model(family, torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    plan = ithaca.Plan(recipe="dense", zero=2, kernel="naive")
    exact = steps(ithaca.apply(ithaca.load_model(folder, "float64"), plan))
    eager, replayed = (steps(make(folder, kernel, checkpoint, graph)) for graph in (False, True))
    assert all(a.keys() == b.keys() for a, b in zip(replayed, exact, strict=True))
    for found, wanted in zip(replayed, exact, strict=True):  # single numbers, whose errors are as chance has it
        torch.testing.assert_close(found["loss"].cpu(), wanted["loss"].cpu(), rtol=2e-3, atol=0)
    allowed = 1.5 * errors(eager, exact)
    assert (errors(replayed, exact) <= allowed).all(), errors(replayed, exact) / allowed


@pytest.mark.gpu
def test_training(tmp_path: Path, kernel: str) -> None:
    """Twenty steps, with losses by token between them, stay as near to float64 as steps without a graph.

    Rounding grows from step to step and differs from run to run, so the losses of all steps are compared together.
    """
    folder = save(make_model("llama3.1", torch.bfloat16, **GPU_SIZES), tmp_path / "in")

    def train(model: ithaca.Model) -> Tensor:
        optimizer = ithaca.make_optimizer(model, learning_rate=1e-3)
        losses = []
        for number in range(20):
            each = batch(model, random_lengths(1 + number % 9, number), number)
            loss = model(each)
            if number % 7 == 3:
                losses.append(model.token_losses(each).sum() / each.valid_tokens)
            loss.backward()
            clip(model, 1.0, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).double().cpu()

    plan = ithaca.Plan(recipe="dense", zero=2, kernel="naive")
    exact = train(ithaca.apply(ithaca.load_model(folder, "float64"), plan))
    eager, replayed = (train(make(folder, kernel, "none", graph)) for graph in (False, True))
    errors = [(losses - exact).square().mean().sqrt() for losses in (eager, replayed)]
    assert errors[1] <= 2 * errors[0], errors
    assert exact[-1] < exact[0]


@pytest.mark.gpu
def test_a_rehearsal_sees_the_memory_of_a_graph(kernel: str) -> None:
    """Of the passes that were captured, not of the one that its meter watched."""
    sets = ["recipe=dense", "checkpoint=none", "zero=2", f"kernel={kernel}", "cuda_graph=true"]
    words = ["rehearse", "smollm2-135m", "--ranks", "1", "--tokens", "4K", "--json"]
    words += [word for each in sets for word in ("--set", f"plan.{each}")]
    run = [sys.executable, "-c", "from ithaca.cli import main; main()", *words]
    ended = subprocess.run(run, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["peak_bytes"] == pytest.approx(found["peak_bytes_predicted"], rel=0.05)


@pytest.mark.gpu
def test_kernels_that_cannot(tmp_path: Path) -> None:
    folder = save(make_model("llama3.1", torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    with pytest.raises(PlanError, match=r"flash4 or flash, and 'cudnn\+flash' does not: set plan"):
        make(folder, "cudnn+flash", "none", graph=True)
