"""The update and the norm in one pass over memory each, against torch's own in float64."""

from pathlib import Path

import pytest
import torch

import ithaca
from ithaca.base.torch_private import local_tensor
from ithaca.optimizer.adamw import AdamW, clip
from ithaca.optimizer.host_adamw import HostAdamW
from ithaca.optimizer.update import scales_gradients
from tests.models import SIZES, make_model, save

GPU_SIZES = SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
# One program has 16,384 elements
SHAPES = [(3,), (5000,), (64, 300), (1,), (16384,), (16385,), (0, 7), (40000,), (257, 129)]


def parameters(dtype: torch.dtype, shifted: bool) -> list[torch.nn.Parameter]:
    """Random ones; shifted, their addresses are no multiples of 16 bytes."""
    torch.manual_seed(0)
    found = []
    for shape in SHAPES:
        values = torch.randn(shape).to("cuda", dtype)
        room = torch.empty(values.numel() + 1, dtype=dtype, device="cuda")[int(shifted) :][: values.numel()]
        found.append(torch.nn.Parameter(room.view(shape).copy_(values)))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("largest", [None, 1.0, 1e9])
def test_steps(shifted: bool, betas: tuple[float, float], largest: float | None) -> None:
    """Five steps: no further from float64 than torch's fused AdamW in fp32, and gradients stay as they are."""
    from ithaca.optimizer import triton_adamw

    options = {"lr": 3e-4, "betas": betas, "eps": 1e-8, "weight_decay": 0.1}
    exact, plain = (parameters(dtype, shifted) for dtype in (torch.float64, torch.float32))
    optimizers = [torch.optim.AdamW(own, **options, fused=True) for own in (exact, plain)]
    ours = parameters(torch.float32, shifted)
    states = [(torch.zeros_like(p.data), torch.zeros_like(p.data), torch.zeros((), device="cuda")) for p in ours]
    for step in range(5):
        gradients = [torch.randn_like(p.data) * (10 if step == 2 else 0.01) for p in ours]
        squares = triton_adamw.sum_of_squares(gradients)
        assert squares.sqrt().item() == pytest.approx(
            torch.cat([g.double().flatten() for g in gradients]).norm().item()
        )
        scale = None if largest is None else (largest / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
        for own, optimizer in zip((exact, plain), optimizers, strict=True):
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype, copy=True)
            if largest is not None:
                torch.nn.utils.clip_grad_norm_(own, largest)
            optimizer.step()
        kept = [gradient.clone() for gradient in gradients]
        tensors = []
        for parameter, gradient, (first, second, count) in zip(ours, gradients, states, strict=True):
            count += 1
            tensors.append(triton_adamw.Tensors(parameter.data, gradient, first, second, count))
        triton_adamw.update(tensors, scale, rate=3e-4, betas=betas, eps=1e-8, weight_decay=0.1)
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients, strict=True))
    whole = [torch.cat([p.data.double().flatten() for p in own]) for own in (exact, plain, ours)]
    start = torch.cat([p.data.double().flatten() for p in parameters(torch.float64, shifted)])
    moved = (whole[0] - start).norm()
    errors = [((found - whole[0]).norm() / moved).item() for found in whole[1:]]
    assert errors[1] <= 1.2 * errors[0]
    for parameter, other, (first, second, _) in zip(exact, plain, states, strict=True):
        for name, moment in (("exp_avg", first), ("exp_avg_sq", second)):
            true, theirs = optimizers[0].state[parameter][name], optimizers[1].state[other][name].double()
            assert (moment - true).norm() <= 1.2 * (theirs - true).norm() + 1e-6 * true.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("zero", [2, 3])
def test_clipping_waits_for_the_step(tmp_path: Path, place: str, zero: int) -> None:
    """`clip` with the optimizer gives the weights of clipping before it; zero_grad forgets it; without gradients, 0."""
    folder = save(make_model("qwen3", torch.bfloat16, **GPU_SIZES), tmp_path / "in")
    plan = ithaca.Plan(optimizer=place, zero=zero)
    models = [ithaca.apply(ithaca.load_model(folder, "bfloat16"), plan) for _ in range(2)]
    optimizers = [ithaca.make_optimizer(model, learning_rate=1e-2) for model in models]
    assert all(isinstance(optimizer, AdamW | HostAdamW) and scales_gradients(optimizer) for optimizer in optimizers)
    for step in range(3):
        norms = []
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator("cuda").manual_seed(1000 * step + index)
                parameter.grad = torch.zeros_like(parameter) if index != step else None
                if parameter.grad is not None:
                    local_tensor(parameter.grad).normal_(generator=generator)
            norms.append(clip(model, 1.0, optimizer if number else None).item())
            assert (optimizer.scale is not None) == bool(number)
            optimizer.step()
            assert optimizer.scale is None
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.to_local(), other.to_local(), rtol=2e-6, atol=2e-7)
    clip(models[1], 1.0, optimizers[1])
    optimizers[1].zero_grad()
    assert optimizers[1].scale is None
    assert clip(models[1], 1.0, optimizers[1]).item() == 0
    optimizers[1].step()


def test_a_cpu_clips_before_the_step(tmp_path: Path) -> None:
    folder = save(make_model("qwen3", torch.float32), tmp_path / "in")
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan())
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-2)
    assert isinstance(optimizer, AdamW)
    assert not scales_gradients(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert clip(model, 1.0, optimizer).item() == pytest.approx(count**0.5)
    assert optimizer.scale is None
    assert clip(model, 1.0, optimizer).item() == pytest.approx(1.0)
