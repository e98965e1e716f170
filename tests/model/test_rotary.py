"""Rotary embeddings against exact arithmetic at millions of tokens; `rotate` and its gradient against autograd."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.model import rotary
from ithaca.model.rope import Rope
from ithaca.model.rotary import Rotary, Rotation, inverse_frequencies, rotate


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_angles_are_exact_at_five_million() -> None:
    rope = Rope(kind="default", theta=500000.0)
    positions = [0, 1, 4096, 5 * 2**20 - 1]
    found = Rotary(rope, 128).at(torch.tensor(positions), torch.float64)
    for row, position in enumerate(positions):
        for pair, inverse in enumerate(inverse_frequencies(rope, 128).tolist()):
            angle = mpmath.mpf(position) * mpmath.mpf(inverse)
            assert abs(found.cos[row, 0, pair].item() - float(mpmath.cos(angle))) < 1e-9
            assert abs(found.sin[row, 0, pair].item() - float(mpmath.sin(angle))) < 1e-9
    # What fp32 angles would have given: the reason for float64
    in_fp32 = torch.tensor(positions[-1], dtype=torch.float32) * inverse_frequencies(rope, 128)
    assert max(abs(math.cos(a) - c) for a, c in zip(in_fp32.tolist(), found.cos[-1, 0].tolist(), strict=True)) > 0.05


PLANS = [
    ithaca.Plan(),
    ithaca.Plan(checkpoint="none"),
    ithaca.Plan(recipe="sweep", chunk=16),
    ithaca.Plan(recipe="sweep", chunk=16, x="host, rebuild"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_frequencies_are_computed_once_for_a_model(plan: ithaca.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so copied to its device once: a copy for each chunk made the host wait for the GPU."""
    calls = []

    def counted(rope: Rope, head_size: int) -> Tensor:
        calls.append(rope)
        return inverse_frequencies(rope, head_size)

    monkeypatch.setattr(rotary, "inverse_frequencies", counted)
    model = ithaca.apply(ithaca.load_model("tiny", "float32"), plan, ithaca.mesh(device="cpu"))
    tokens = torch.arange(64)
    for _ in range(2):
        model(model.shard(tokens, tokens)).backward()
    assert len(calls) == 1


def test_frequencies_of_a_second_device() -> None:
    """Positions decide where the rotation is computed."""
    rope = Rope(kind="default", theta=100.0)
    embedding = Rotary(rope, 8)
    on_meta = embedding.at(torch.arange(3, device="meta"), torch.float32)
    on_cpu = embedding.at(torch.arange(3), torch.float32)
    assert (on_meta.cos.device.type, on_cpu.cos.device.type) == ("meta", "cpu")
    assert on_cpu.cos.shape == on_meta.cos.shape == (3, 1, 4)


def make_rotation(tokens: int) -> Rotation:
    """Positions that are not the rows' own, and a factor: cosines and sines are then no rotation by themselves."""
    rope = Rope(kind="default", theta=100.0, attention_factor=1.3)
    return Rotary(rope, 8).at(3 * torch.arange(tokens) + 2, torch.float64)


def by_parts(x: Tensor, rotation: Rotation) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin), dim=-1
    )


@pytest.mark.parametrize("heads", [0, 1, 3])
def test_rotate_is_the_rotation_of_pairs(heads: int) -> None:
    x, dy = numbers((5, heads, 8), (5, heads, 8))
    before = x.clone()
    x.requires_grad_()
    found, wanted = rotate(x, make_rotation(5)), by_parts(x, make_rotation(5))
    assert torch.equal(x, before)
    assert found.shape == x.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y, x, dy)[0] for y in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_rotate_takes_any_strides() -> None:
    """Heads of a projection are a view; what comes back from a sum is one number, expanded."""
    (wide,) = numbers((5, 2, 3, 8))
    x = wide[:, 1].requires_grad_()
    assert not x.is_contiguous()
    found, wanted = rotate(x, make_rotation(5)), by_parts(x, make_rotation(5))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


def test_gradient_of_rotate() -> None:
    (x,) = numbers((3, 2, 8))
    assert torch.autograd.gradcheck(lambda x: rotate(x, make_rotation(3)), (x.requires_grad_(),))
