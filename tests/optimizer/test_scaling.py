"""Clipping that waits for the step, as on a GPU. Here on a CPU: plain torch stands for the Triton kernels.

Every test compares with torch's own AdamW, for which the gradients are clipped first.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.base.errors import InputError
from ithaca.optimizer import adamw, host_adamw, update
from ithaca.optimizer.adamw import clip
from tests.models import make_model, save

PLACES = ("device", "host")
Step = Callable[[ithaca.Model, torch.optim.Optimizer], Any]


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    assert all(gradient.dtype == torch.float32 and gradient.is_contiguous() for gradient in gradients)
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()


def _update(
    parameters: Any, scale: Tensor | None, *, rate: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    for one in parameters:
        assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in one.all)
        gradient = one.gradient if scale is None else one.gradient * scale
        one.first.lerp_(gradient, 1 - betas[0])
        one.second.lerp_(gradient.square(), 1 - betas[1])
        rate1, rate2 = (1 - beta ** one.step.item() for beta in betas)
        # Through `data`, as a kernel does: autograd sees no change
        one.weight.data.mul_(1 - rate * weight_decay)
        one.weight.data.sub_(rate / rate1 * one.first / ((one.second / rate2).sqrt() + eps))


class _Tensors:
    def __init__(self, *tensors: Tensor):
        self.weight, self.gradient, self.first, self.second, self.step = self.all = tensors


def pretend_a_gpu(patch: pytest.MonkeyPatch) -> None:
    def scales_gradients(optimizer: torch.optim.Optimizer) -> bool:
        groups, kinds = optimizer.param_groups, update.OTHER_KINDS
        return not any(group.get(kind) or isinstance(group["lr"], Tensor) for group in groups for kind in kinds)

    kernels: Any = ModuleType("ithaca.optimizer.triton_adamw")
    kernels.sum_of_squares, kernels.update, kernels.Tensors = _sum_of_squares, _update, _Tensors
    patch.setitem(sys.modules, kernels.__name__, kernels)
    patch.setattr(sys.modules["ithaca.optimizer"], "triton_adamw", kernels, raising=False)
    for module in (adamw, host_adamw, update):
        patch.setattr(module, "scales_gradients", scales_gradients)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With norms of two elements, which leave some of four ranks without any."""
    model = make_model("qwen3", torch.float32, head_dim=2, num_hidden_layers=2)
    return save(model, tmp_path_factory.mktemp("model") / "in")


def made(folder: Path, place: str = "device") -> tuple[ithaca.Model, Any]:
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(optimizer=place))
    # An eps of this size makes the length of an update depend on that of the gradients
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-2, weight_decay=0.1)
    for group in optimizer.param_groups:
        group["eps"] = 1.0
    return model, optimizer


def give_gradients(model: ithaca.Model, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        local = parameter.grad.to_local()
        local.copy_(torch.randn(local.shape, generator=generator))


def weights(model: ithaca.Model) -> Tensor:
    return torch.cat([parameter.to_local().detach().flatten() for parameter in model.parameters()])


def compare(folder: Path, place: str, step: Step) -> None:
    """The change of the weights against torch's AdamW. `step` gets gradients, clips and updates."""
    model, optimizer = made(folder, place)
    before = weights(model)
    step(model, optimizer)
    other, _ = made(folder)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    twins = dict(zip(model.parameters(), other.parameters(), strict=True))
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        theirs["params"] = [twins[parameter] for parameter in mine["params"]]
    step(other, torch.optim.AdamW(groups))
    moved, wanted = weights(model) - before, weights(other) - before
    assert wanted.norm() > 0
    assert (moved - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("place", PLACES)
def test_the_step_scales(folder: Path, place: str) -> None:
    def step(model: ithaca.Model, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            give_gradients(model, seed)
            clip(model, 1.0, optimizer)
            assert (getattr(optimizer, "scale", None) is not None) == (type(optimizer) is not torch.optim.AdamW)
            optimizer.step()

    compare(folder, place, step)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("place", PLACES)
def test_a_closure_may_clip(folder: Path, place: str) -> None:
    def step(model: ithaca.Model, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            give_gradients(model)
            clip(model, 1.0, optimizer)
            return 3.0

        assert optimizer.step(closure) == 3.0
        assert getattr(optimizer, "scale", None) is None

    compare(folder, place, step)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("second", [0.5, 2.0, float("inf")])
@pytest.mark.parametrize("place", PLACES)
def test_clipped_twice(folder: Path, place: str, second: float) -> None:
    """The second call finds the norm that the first has left."""

    def step(model: ithaca.Model, optimizer: torch.optim.Optimizer) -> None:
        give_gradients(model)
        clip(model, 1.0, optimizer)
        assert clip(model, second, optimizer).item() == pytest.approx(1.0, rel=1e-4)
        optimizer.step()

    compare(folder, place, step)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("place", PLACES)
def test_other_gradients_are_not_scaled(folder: Path, place: str) -> None:
    """A step was left out, and the gradients dropped behind the optimizer's back."""
    model, optimizer = made(folder, place)
    for last in (False, True):
        give_gradients(model)
        clip(model, 1.0, optimizer)
        give_gradients(model)
        if last:
            norm = clip(model, 1.0, optimizer)  # says how long these are, not those
            assert norm > 2
            next(model.parameters()).grad = None  # one that is left out of the step
            optimizer.step()
        else:
            with pytest.raises(InputError, match="replaced between clip and step"):
                optimizer.step()
            assert optimizer.scale is None
    give_gradients(model)
    clip(model, 1.0, optimizer)
    optimizer.zero_grad()
    give_gradients(model)
    optimizer.step()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("place", PLACES)
def test_options_changed_between_clip_and_step(folder: Path, place: str) -> None:
    """Then torch updates, and the gradients are scaled before."""

    def step(model: ithaca.Model, optimizer: torch.optim.Optimizer) -> None:
        give_gradients(model)
        clip(model, 1.0, optimizer)
        for group in optimizer.param_groups:
            group["maximize"] = True
        optimizer.step()

    compare(folder, place, step)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler(folder: Path, infinite: bool, clips: bool) -> None:
    """torch's GradScaler lets a fused AdamW divide the gradients and skip a step."""
    moved = []
    for kind in (adamw.AdamW, torch.optim.AdamW):
        model, optimizer = made(folder)
        if kind is torch.optim.AdamW:
            optimizer = kind(optimizer.param_groups)
        before, scaler = weights(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        give_gradients(model)
        if infinite:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        if clips:
            scaler.unscale_(optimizer)
            clip(model, 0.01, optimizer)
        scaler.step(optimizer)
        moved.append(weights(model) - before)
    assert (moved[1].norm() == 0) == infinite
    assert (moved[0] - moved[1]).norm() <= 1e-4 * moved[1].norm()


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_hooks_run_once(folder: Path, place: str, gpu: bool, request: pytest.FixtureRequest) -> None:
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    torch.optim.AdamW([torch.zeros(1)])  # torch wraps the hooks around its class's step now
    model, optimizer = made(folder, place)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    give_gradients(model)
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("stepped", [False, True])
def test_states_of_another_adamw(folder: Path, stepped: bool) -> None:
    """One that is not fused has its steps on the CPU, in torch's default dtype; before its first step it has none."""

    def step(model: ithaca.Model, optimizer: torch.optim.Optimizer) -> None:
        other = torch.optim.AdamW(optimizer.param_groups, fused=False)
        for group in other.param_groups:
            group["fused"] = None
        if stepped:
            give_gradients(model, 1)
            other.step()
        for state in other.state.values():
            state["step"] = state["step"].double()
        optimizer.load_state_dict(other.state_dict())
        give_gradients(model)
        clip(model, 1.0, optimizer)
        optimizer.step()
        parameter = next(model.parameters())
        assert optimizer.state[parameter]["step"] == 1 + stepped

    compare(folder, "device", step)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_further_group(folder: Path) -> None:
    model, _ = made(folder)
    late = next(model.parameters()).requires_grad_(False)
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-2)
    optimizer.add_param_group({"params": [late.requires_grad_()]})
    before = late.to_local().detach().clone()
    give_gradients(model)
    optimizer.step()
    assert not torch.equal(late.to_local(), before)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_autograd_sees_that_weights_changed(folder: Path) -> None:
    model, optimizer = made(folder)
    parameter = next(model.parameters())
    penalty = (parameter * parameter).to_local().sum()
    give_gradients(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def norms_of_ranks(folder: Path, zero: int, replicate: int) -> tuple[list[float], int]:
    """Our norm and torch's, and the number of shards without elements."""
    plan, mesh = ithaca.Plan(zero=zero), ithaca.mesh(replicate=replicate)
    model = ithaca.apply(ithaca.load_model(folder, "float32"), plan, mesh)
    optimizer = ithaca.make_optimizer(model, learning_rate=1e-2)
    give_gradients(model, seed=mesh.parameter_rank)
    with pytest.MonkeyPatch.context() as patch:
        pretend_a_gpu(patch)
        norms = [clip(model, 1.0, which).item() for which in (optimizer, None)]
    return norms, sum(not parameter.to_local().numel() for parameter in model.parameters())


@pytest.mark.parametrize(("world", "replicate", "zero"), [(1, 1, 3), (2, 2, 3), (4, 1, 2), (4, 2, 3)])
def test_the_norm_over_ranks(ranks: Any, folder: Path, world: int, replicate: int, zero: int) -> None:
    found = ranks(world).run(norms_of_ranks, folder, zero, replicate)
    for (ours, theirs), _ in found:
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert len({ours for (ours, _), _ in found}) == 1
    assert any(empty for _, empty in found) == (world // replicate > 2)
