"""One rank without FSDP2: the same bits as with it, and copies of the weights that are never stale.

Under ZeRO-3 one rank still has FSDP2, which is the twin here.
"""

import gc
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import ithaca
from ithaca.model.decoder import Unit
from ithaca.optimizer.adamw import clip
from tests.models import make_model, save
from tests.sampling import pairwise
from tests.schedule.steps import random_batch

Options = dict[str, Any]
CUT: Options = {"recipe": "sweep", "chunk": 7, "tile": 3}
OPTIONS: dict[str, Options] = {
    "none": {"checkpoint": "none"},
    "selective": {"checkpoint": "selective", "tile": 5},
    "full": {"checkpoint": "full", "x": "host"},
    "sweep": {**CUT, "x": "device", "o": "device", "residual": "device"},
    "rebuilt": {**CUT, "x": "host, rebuild", "o": "host"},
    "recomputed": {**CUT, "o": "recompute", "kv": "host", "optimizer": "host"},
}
MODELS = {"tied": "smollm2", "untied": "llama-bias"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {name: save(make_model(kind, num_hidden_layers=2), top / name) for name, kind in MODELS.items()}


def make(folder: Path, options: Options, zero: int, dtype: str = "float32") -> ithaca.Model:
    return ithaca.apply(ithaca.load_model(folder, dtype), ithaca.Plan(**options, zero=zero), ithaca.mesh(device="cpu"))


def batch(model: ithaca.Model, seed: int = 1) -> Any:
    return model.shard(*random_batch(2, 17, documents=True, ignored=0.2, seed=seed))


def gradients(model: ithaca.Model) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Bit by bit."""
    assert found.keys() == wanted.keys()
    pairs = [(found[name], wanted[name]) for name in found]
    return all(a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_where_it_is_used(ranks, folders) -> None:
    used = {zero: make(folders["tied"], {}, zero) for zero in (1, 2, 3)}
    assert {zero: isinstance(model.decoder, FSDPModule) for zero, model in used.items()} == {
        1: False,
        2: False,
        3: True,
    }
    for name, parameter in used[2].named_parameters():
        twin = used[3].get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert (parameter.placements, parameter.device_mesh) == (twin.placements, twin.device_mesh)
    assert ranks(2).run(replicas_have_fsdp, folders["tied"]) == [True, True]


def replicas_have_fsdp(folder: Path) -> bool:
    """Each holds all weights, but their gradients must be averaged."""
    grid = ithaca.mesh(replicate=2, device="cpu")
    assert grid.parameter_ranks == 1
    model = ithaca.apply(ithaca.load_model(folder, "float32"), ithaca.Plan(zero=2), grid)
    return isinstance(model.decoder, FSDPModule)


def train(model: ithaca.Model) -> list[dict[str, Tensor | None]]:
    """Two optimizer steps of two micro-batches each, clipped: gradients and weights of every step."""
    optimizer, seen = ithaca.make_optimizer(model, learning_rate=1e-2), []
    for step in range(2):
        parts = [batch(model, seed=2 * step + number) for number in range(2)]
        valid, losses = sum(part.valid_tokens for part in parts), []
        for part in parts:
            losses.append(model(part, valid_tokens=valid, last=part is parts[-1]))
            (3 * losses[-1]).backward()
        seen += [{"losses": torch.stack(losses).detach()}, gradients(model), {"norm": clip(model, 0.1)}]
        optimizer.step()
        optimizer.zero_grad()
        seen += [{name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}]
    return seen


@pytest.mark.parametrize(
    ("kind", "name", "dtype"), pairwise(product(MODELS, OPTIONS, ["float32", "float64", "bfloat16"]))
)
def test_the_same_bits_as_fsdp(folders, monkeypatch, kind: str, name: str, dtype: str) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # a virtual CPU may announce more than it has
    twin, *models = (make(folders[kind], OPTIONS[name], zero, dtype) for zero in (3, 2, 1))
    wanted = train(twin)
    for model in models:
        assert all(same(a, b) for a, b in zip(train(model), wanted, strict=True))


@pytest.mark.parametrize("frozen", ["embedding", "head", "norm", "self_attn", "blocks.1", "weight"])
@pytest.mark.parametrize("name", ["none", "selective", "rebuilt"])
def test_frozen_weights(folders, name: str, frozen: str) -> None:
    found = []
    for zero in (3, 2):
        model = make(folders["untied"], OPTIONS[name], zero, "bfloat16")
        model(batch(model)).backward()  # nothing is frozen yet
        model.zero_grad()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in parameter_name)
        for seed in (3, 4):
            model(batch(model, seed)).backward()
        found.append(gradients(model))
    assert same(found[1], found[0])
    assert {name for name, gradient in found[1].items() if gradient is None} == {n for n in found[1] if frozen in n}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_not_rounded(folders, name: str) -> None:
    model = make(folders["untied"], OPTIONS[name], 2, "bfloat16")
    model(batch(model)).backward()
    found = gradients(model)
    for parameter, gradient in found.items():
        assert gradient is not None
        assert gradient.dtype == torch.float32
        # With `none` each gradient comes from autograd, in bf16
        if name != "none" and "proj.weight" in parameter:
            assert not torch.equal(gradient, gradient.bfloat16().float()), parameter


def test_gradients_are_not_copied(folders) -> None:
    """Those of a block are parts of the one tensor in which its backward pass summed them."""
    model = make(folders["untied"], OPTIONS["sweep"], 2)
    model(batch(model)).backward()
    storages = {p.grad.to_local().untyped_storage().data_ptr() for p in model.decoder.blocks[0].parameters()}
    assert len(storages) == 1


@pytest.mark.parametrize("name", ["none", "sweep"])
def test_hooks_of_parameters_run(folders, name: str) -> None:
    """As under FSDP2: once a pass, when the gradient is complete. Some optimizers step in them."""
    found = []
    for zero in (3, 2):
        model, seen = make(folders["tied"], OPTIONS[name], zero), {}
        for parameter_name, parameter in model.named_parameters():

            def note(p: Any, name: str = parameter_name, seen: dict[str, Any] = seen) -> None:
                seen.setdefault(name, []).append(p.grad.full_tensor().clone())

            parameter.register_post_accumulate_grad_hook(note)
        for seed in (1, 2):
            model(batch(model, seed), last=seed == 2).backward()
        found.append({name: torch.stack(gradients) for name, gradients in seen.items()})
    assert same(found[1], found[0])
    assert {len(gradients) for gradients in found[1].values()} == {2}


# Copies and weights that change
@torch.no_grad()
def evaluate(model: ithaca.Model) -> Tensor:
    return model(batch(model))


def double(parameters: list[Any]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2)


def double_unseen(parameters: list[Any]) -> None:
    """Without a word to autograd."""
    for parameter in parameters:
        parameter.detach().to_local().data.mul_(2)


BEFORE: dict[str, Callable[[ithaca.Model], Any]] = {
    "a step": lambda model: model(batch(model)).backward(),
    "a pass that is thrown away": lambda model: model(batch(model)),
    "an evaluation": evaluate,
    "logits": lambda model: model.logits(torch.arange(5)),
}
AFTER: dict[str, Callable[[ithaca.Model], Tensor]] = {
    "training": lambda model: model(batch(model)).detach(),
    "evaluation": evaluate,
    "inference": torch.inference_mode()(lambda model: model(batch(model)).clone()),
    "logits": lambda model: model.logits(torch.arange(9)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", BEFORE)
def test_no_use_of_a_model_leaves_stale_copies(folders, before: str, dtype: str) -> None:
    fresh = make(folders["untied"], {}, 3, dtype)
    double(list(fresh.parameters()))
    for change in (double, double_unseen):
        for after, run in AFTER.items():
            model = make(folders["untied"], {}, 2, dtype)
            parameters = list(model.parameters())  # as an optimizer has them: nothing tells the model of a change
            BEFORE[before](model)
            change(parameters)
            assert torch.equal(run(model), run(fresh)), (change, after)


def test_copies_are_made_once_a_step(folders, monkeypatch) -> None:
    made = []
    monkeypatch.setattr("ithaca.parallel.one_rank.copy_all", lambda to, _: made.append(len(to)))
    model = make(folders["untied"], {}, 2, "bfloat16")
    for _ in range(2):
        for number in range(3):
            model(batch(model), last=number == 2).backward()
    assert made == [len(list(model.parameters()))] * 2
    # Weights that have the dtype of the computation are their own copies
    model = make(folders["untied"], {}, 2, "float32")
    model(batch(model)).backward()
    assert len(made) == 2
    model(batch(model))
    for block in model.decoder.blocks:
        assert isinstance(block, Unit)
        for name, parameter in block.named_parameters():
            assert block.weights()[name].data_ptr() == parameter.to_local().data_ptr()


@pytest.mark.parametrize("name", OPTIONS)
def test_other_passes_between_forward_and_backward(folders, name: str) -> None:
    """A pass keeps the copies that it has begun with."""
    model = make(folders["tied"], OPTIONS[name], 2, "bfloat16")
    model(batch(model)).backward()
    wanted = gradients(model)
    model.zero_grad()
    loss = model(batch(model))
    evaluate(model)
    with torch.inference_mode():
        model.logits(torch.arange(7))
    list(model.parameters())
    loss.backward()
    assert same(gradients(model), wanted)


def test_a_second_forward_pass_before_backward(folders) -> None:
    model = make(folders["tied"], {}, 2, "bfloat16")
    wanted = []
    for _ in range(2):
        model(batch(model)).backward()
        wanted.append(gradients(model))
    model.zero_grad()
    losses = [model(batch(model)) for _ in range(2)]
    for loss, gradient in zip(losses, wanted, strict=True):
        loss.backward()
        assert same(gradients(model), gradient)


def test_zero_grad(folders) -> None:
    """The model's, an optimizer's, one that keeps zeros; ZeRO-1 holds nothing back."""
    for zero in (1, 2):
        model = make(folders["tied"], {}, zero)
        optimizer = ithaca.make_optimizer(model, learning_rate=0.0)
        model(batch(model)).backward()
        wanted = gradients(model)
        for forget in (model.zero_grad, optimizer.zero_grad, lambda model=model: model.zero_grad(set_to_none=False)):
            model(batch(model), last=False).backward()
            forget()
            model(batch(model)).backward()
            assert same(gradients(model), wanted)
            forget()


@pytest.mark.parametrize("name", ["none", "selective", "sweep"])
def test_after_a_backward_pass_that_broke_off(folders, name: str) -> None:
    """Unlike FSDP2, nothing is left half done but the gradients, which `zero_grad` drops."""
    model = make(folders["tied"], OPTIONS[name], 2)
    model(batch(model)).backward()
    wanted, kernel = gradients(model), model.kernel
    model.zero_grad()

    class Broken:
        name = kernel.name
        forward = kernel.forward

    model.kernel = Broken()  # pyrefly: ignore
    loss = model(batch(model))
    with pytest.raises(AttributeError):
        loss.backward()
    del loss
    model.kernel = kernel
    model.zero_grad()
    model(batch(model)).backward()
    assert same(gradients(model), wanted)


def test_copies_are_freed(folders) -> None:
    """With the parameters in hand, as for clipping, no copy is left; nor does a gradient wait for a cycle."""
    model = make(folders["untied"], {}, 2, "bfloat16")
    gc.disable()
    try:
        model(batch(model)).backward()
        copies = [weakref.ref(copy) for unit in model.decoder.blocks for copy in unit.weights().values()]
        assert all(copy() is not None for copy in copies)
        list(model.parameters())
        assert all(copy() is None for copy in copies)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_kept_loss_holds_no_copies(folders, name: str) -> None:
    """As in a loop that binds each loss to the name of the last one, or collects losses for its log."""
    model = make(folders["untied"], OPTIONS[name], 2, "bfloat16")
    loss = model(batch(model))
    copies = [weakref.ref(copy) for unit in model.decoder.blocks for copy in unit.weights().values()]
    loss.backward()
    list(model.parameters())
    assert not any(copy() is not None for copy in copies)
    assert loss.requires_grad


def test_fsdp_is_given_no_more_than_tensors(folders, monkeypatch) -> None:
    """It walks through every argument of a unit's call, field by field."""
    seen: list[type] = []
    run = Unit.forward

    def forward(self: Unit, function: Any, *args: Any) -> Any:
        seen.extend(type(arg) for arg in args)
        return run(self, function, *args)

    monkeypatch.setattr(Unit, "forward", forward)
    for options in OPTIONS.values():
        model = make(folders["tied"], options, 3)
        model.decoder.register_forward_pre_hook(lambda _, args: seen.extend(map(type, args[1:])))
        model(batch(model)).backward()
        model.logits(torch.arange(5))
    assert set(seen) == {Tensor}
