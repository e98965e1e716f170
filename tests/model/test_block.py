"""The block's mathematics for pre-norm and post-norm models, and gradients when a block is run again for them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ithaca
from ithaca.model import block
from ithaca.model.block import Weights, final_linear, mlp, output_projection, project, rms_norm
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.rotary import Rotary
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Heads, Spec

SMALL = {"hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 4}
TINY = read_spec(find_config("tiny")[0]).with_layers(2)
SPECS = {"pre-norm": TINY, "post-norm": replace(TINY, post_norm=True)}


class SpreadWeights(RandomWeights):
    """Weights so large that every part of a block matters, norms included."""

    def read(self, name: str, rows: range, into: Tensor, columns: range | None = None) -> None:
        super().read(name, rows, into, columns)
        if len(self._shapes[name]) == 1:
            into.mul_(torch.linspace(0.5, 1.5, len(into)))


def block_weights(spec: Spec) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in spec.block_shapes().items()
    }


def test_slices_of_heads_make_up_the_whole() -> None:
    """The mathematics of a block over slices of its heads, which the schedules lean on."""
    spec = read_spec({**PRESETS["qwen3-8b"], **SMALL, "attention_bias": True})
    torch.manual_seed(0)
    w = {name: torch.randn(shape, dtype=torch.float64) for name, shape in spec.block_shapes().items()}
    x = torch.randn(7, spec.hidden, dtype=torch.float64)
    rope = Rotary(spec.rope, spec.head_size).at(torch.arange(7), torch.float64)
    whole = project(spec, w, x, rope, Heads.all(spec))
    o = torch.randn(7, spec.heads, spec.head_size, dtype=torch.float64)
    summed = x
    for kv in (range(3), range(3, 8)):
        q = range(kv.start * spec.group, kv.stop * spec.group)
        part = project(spec, w, x, rope, Heads(q, kv))
        for found, wanted, heads in zip(part, whole, (q, kv, kv), strict=True):
            assert torch.allclose(found, wanted[:, heads.start : heads.stop], rtol=1e-12)
        summed = output_projection(spec, w, summed, o[:, q.start : q.stop], Heads(q, kv))
    assert torch.allclose(summed, output_projection(spec, w, x, o, Heads.all(spec)), rtol=1e-12)


@pytest.mark.parametrize("shape", [(50, 8), (10, 5, 8)])
def test_a_norm_of_more_numbers_than_torch_counts(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in parts of whole rows, each below the limit; output and gradients are those of one call."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=torch.float64), torch.rand(8, dtype=torch.float64)
    dy, sizes, one_call = torch.randn_like(x), [], F.rms_norm

    def counted(part: Tensor, *rest: object) -> Tensor:
        sizes.append(part.numel())
        return one_call(part, *rest)  # pyrefly: ignore

    monkeypatch.setattr(F, "rms_norm", counted)
    found = []
    for limit in (401, 400, 100, 3):  # 3: less than a row, so that a row at a time is all that can be done
        monkeypatch.setattr(block, "COUNTED", limit)
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        sizes.clear()
        y = rms_norm(*inputs, 1e-6)
        y.backward(dy)
        found.append([y, *(tensor.grad for tensor in inputs)])
        assert sum(sizes) == 400
        assert all(size < max(limit, 41) for size in sizes)
        assert (len(sizes) == 1) is (limit > 400)
    for parts in found[1:]:
        assert all(torch.allclose(part, whole, rtol=1e-13) for part, whole in zip(parts, found[0], strict=True))


def test_where_the_norms_stand() -> None:
    """OLMo 2 norms what attention and MLP put out, before it is added to the residual."""
    spec = SPECS["post-norm"]
    w, x = block_weights(spec), torch.randn(5, spec.hidden, dtype=torch.float64)
    o = torch.randn(5, spec.heads, spec.head_size, dtype=torch.float64)

    def normed(y: Tensor, name: str) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[f"{name}.weight"]

    q, _, _ = project(spec, w, x, None, Heads.all(spec))
    torch.testing.assert_close(q.flatten(1), x @ w["self_attn.q_proj.weight"].T)
    middle = x + normed(o.flatten(1) @ w["self_attn.o_proj.weight"].T, "post_attention_layernorm")
    torch.testing.assert_close(output_projection(spec, w, x, o, Heads.all(spec)), middle)
    inner = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
    wanted = x + normed(inner @ w["mlp.down_proj.weight"].T, "post_feedforward_layernorm")
    torch.testing.assert_close(mlp(spec, w, x), wanted)


@pytest.mark.parametrize("kind", SPECS)
def test_the_final_linear_is_only_added(kind: str) -> None:
    """The block's derivative by that layer's output is the identity, or the block declares no such layer."""
    spec = SPECS[kind]
    w, x = dict(block_weights(spec)), torch.randn(3, spec.hidden, dtype=torch.float64)
    name = final_linear(spec)
    assert (name is None) == spec.post_norm
    if name is None:
        return
    before = mlp(spec, w, x)
    change = torch.randn_like(before[0])
    w[f"{name}.bias"] = change  # added to the layer's output
    torch.testing.assert_close(mlp(spec, w, x), before + change)


def step(spec: Spec, plan: ithaca.Plan) -> dict[str, Tensor]:
    """The loss and every gradient."""
    source = ModelSource(spec, {}, SpreadWeights(spec, 0, 0.2), "float64", None)
    model = ithaca.apply(source, plan, ithaca.mesh(device="cpu"))
    tokens = torch.arange(60).view(2, 30) * 7 % 251
    loss = model(model.shard(tokens, tokens))
    loss.backward()
    return {"loss": loss.detach()} | {
        name: weight.grad.full_tensor() for name, weight in model.named_parameters() if weight.grad is not None
    }


PLANS = {
    "selective": ithaca.Plan(checkpoint="selective"),
    "full": ithaca.Plan(checkpoint="full", tile=7),
    "sweep": ithaca.Plan(recipe="sweep", chunk=16, tile=8),
    "sweep, x rebuilt": ithaca.Plan(recipe="sweep", chunk=16, tile=8, x="host, rebuild"),
    "sweep, o recomputed": ithaca.Plan(recipe="sweep", chunk=16, tile=8, o="recompute"),
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_blocks_that_are_run_again(kind: str, plan: str) -> None:
    """Against a step that keeps every intermediate and leaves the derivatives to autograd."""
    wanted = step(SPECS[kind], ithaca.Plan(checkpoint="none"))
    found = step(SPECS[kind], PLANS[plan])
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9 * gradient.abs().max().item())
