"""What a GPU does in one pass: layers of one input, and a norm beside its input. Here on a CPU, in float64.

The Triton kernels are replaced by plain torch; on a GPU tests/test_gpu.py compares them.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ithaca
from ithaca.model import block, linear
from ithaca.model.linear import Layer, linears
from tests.models import make_model, save
from tests.schedule.steps import assert_same, model_step, naive_step, random_batch

FAMILIES = ("smollm3", "llama-bias", "qwen3", "qwen2", "llama3.2")
PLANS: dict[str, dict[str, Any]] = {
    "none": {"recipe": "dense", "checkpoint": "none"},
    "none, ZeRO-2": {"recipe": "dense", "checkpoint": "none", "zero": 2},
    "selective": {"recipe": "dense", "checkpoint": "selective"},
    "full, tiles": {"recipe": "dense", "checkpoint": "full", "tile": 7},
    "untied": {"recipe": "untied", "heads": 1},
    "sweep": {"recipe": "sweep", "chunk": 11, "tile": 4, "zero": 2},
}


def _norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    with torch.enable_grad():
        y = F.rms_norm(leaves[0], (x.shape[-1],), leaves[1], eps)
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    CALLS.append(beside is not None)
    return dx if beside is None else dx + beside, dweight


CALLS: list[bool] = []  # whether each norm had a gradient beside its own


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = ModuleType("ithaca.model.triton_elementwise")
    kernels.norm_backward = _norm_backward
    kernels.gated = lambda gate, up: F.silu(gate) * up

    def gated_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        share = gate.sigmoid()
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share

    kernels.gated_backward = gated_backward
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(sys.modules["ithaca.model"], "triton_elementwise", kernels, raising=False)
    for module in (block, linear):
        monkeypatch.setattr(module, "fusable", lambda _: True)
    CALLS.clear()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_naive(tmp_path: Path, family: str, plan: str) -> None:
    folder = save(make_model(family, num_hidden_layers=2), tmp_path / "in")
    batches = [random_batch(2, 23, documents=True, ignored=0.3, seed=4)]
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(**PLANS[plan]))
    assert_same(model_step(model, batches), naive_step(folder, batches))
    assert any(CALLS)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("frozen", ["self_attn.q_proj.weight", "input_layernorm.weight", "mlp", ""])
def test_frozen_weights(tmp_path: Path, frozen: str) -> None:
    """Gradients of the others stay right; with everything in the blocks frozen, those of the embedding."""
    folder = save(make_model("llama-bias", num_hidden_layers=2), tmp_path / "in")
    batches = [random_batch(1, 17, documents=False, ignored=0.3, seed=5)]
    wanted = naive_step(folder, batches)[1]
    model = ithaca.apply(ithaca.load_model(folder, "float64"), ithaca.Plan(checkpoint="none", zero=2))
    for name, parameter in model.decoder.named_parameters():
        parameter.requires_grad_(not (name.startswith("blocks") and frozen in name))
    model(model.shard(*batches[0])).backward()
    for name, parameter in model.decoder.named_parameters():
        if parameter.requires_grad:
            found = parameter.grad.to_local()
            expected = wanted[ithaca.model.decoder.stored_name(name)]
            assert (found - expected).norm() <= 1e-10 * max(expected.norm(), 1e-5)
        else:
            assert parameter.grad is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_products_and_graph() -> None:
    """One node for all layers, one gradient of x; gradients of bf16 weights in fp32; an unused output costs nothing."""
    torch.manual_seed(0)
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    w = {f"{name}.weight": torch.randn(size, 8, dtype=torch.bfloat16) for name, size in (("a", 3), ("b", 4), ("c", 6))}
    for weight in w.values():
        weight.grad_dtype = torch.float32
        weight.requires_grad_()
    a, b, c = linears(w, [Layer("a"), Layer("b"), Layer("c", rows=slice(0, 0))], x)
    assert a.grad_fn is b.grad_fn is c.grad_fn
    assert c.shape == (5, 0)
    a.float().square().sum().backward()
    assert w["b.weight"].grad is None
    gradient = w["a.weight"].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    exact = (2 * a.detach().float()).to(torch.bfloat16).float().T @ x.detach().float()
    assert torch.equal(gradient, exact)
