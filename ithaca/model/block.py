"""One transformer block as mathematics on slices: pure functions of weights, a tile of tokens and a slice of heads.

    project             x     -> q, k, v   norm, rows of q_proj, k_proj, v_proj for the heads, bias, q/k-norm, rotary
    output_projection   x, o  -> x         columns of o_proj for the heads, added to the residual
    mlp                 x     -> x         norm, gated MLP, added to the residual

A post-norm block (`spec.post_norm`) norms the outputs of attention and MLP instead of their inputs.

The functions know nothing of ranks, chunks or where tensors live. A schedule decides which tokens and heads they run
on, and differentiates a tile by running it again under autograd. With a `Spread` (linear.py) they have a part of the
weights: q, k, v and o are of the tokens of all its ranks, and x of the caller's alone. `w` maps the Hugging Face names
within a layer to tensors. Shapes: T tokens, H heads, D head size, E hidden.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.base.precision import fusable
from ithaca.model.linear import Layer, Rows, Spread, linears, summed_linear
from ithaca.model.rotary import Rotation, rotate
from ithaca.model.spec import Heads, Spec, runs

Weights = Mapping[str, Tensor]
ADDED = ("self_attn.o_proj", "mlp.down_proj")  # layers whose outputs are sums over heads or features
COUNTED = 2**32  # numbers of a tensor that torch's kernel for norms can count
WIDEST_NORM = 16384  # numbers of the widest row that the norm's backward kernel holds


def project(
    spec: Spec, w: Weights, x_TE: Tensor, rotation: Rotation | None, heads: Heads, spread: Spread | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] of these heads; `rotation` is None in a layer without rotary embedding."""
    return project_beside(spec, w, x_TE, rotation, heads, spread)[1]


def project_beside(
    spec: Spec, w: Weights, x_TE: Tensor, rotation: Rotation | None, heads: Heads, spread: Spread | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """x and its projections. A caller that uses this x for the residual saves backward an addition (`norm_beside`)."""
    x_TE, normed = (x_TE, x_TE) if spec.post_norm else norm_beside(spec, x_TE, w["input_layernorm.weight"])
    parts = {"q": heads.q, "k": heads.kv, "v": heads.kv}
    layers = [Layer(f"self_attn.{part}_proj", _rows(spec, which)) for part, which in parts.items()]
    found = zip(linears(w, layers, normed, spread), parts.values(), strict=True)
    q, k, v = (y.view(len(y), len(which), spec.head_size) for y, which in found)
    if spec.qk_norm:
        q = norm(spec, q, w["self_attn.q_norm.weight"])
        k = norm(spec, k, w["self_attn.k_norm.weight"])
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return x_TE, (q, k, v)


def output_projection(
    spec: Spec, w: Weights, x_TE: Tensor, o_THD: Tensor, heads: Heads, spread: Spread | None = None
) -> Tensor:
    """x plus the output projection of these consecutive heads; the bias comes with head 0.

    The sum over slices of heads is the whole: output_projection(output_projection(x, o1, h1), o2, h2). Only a post-norm
    block needs all heads at once.
    """
    columns = slice(heads.q[0] * spec.head_size, (heads.q[-1] + 1) * spec.head_size)
    y_TE = summed_linear(w, "self_attn.o_proj", o_THD.flatten(1), columns, spread)
    if spec.post_norm:
        assert len(heads.q) == spec.heads
        y_TE = norm(spec, y_TE, w["post_attention_layernorm.weight"])
    return x_TE + y_TE


def mlp(spec: Spec, w: Weights, x_TE: Tensor, out: Tensor | None = None, spread: Spread | None = None) -> Tensor:
    """x plus the gated MLP of x; written to `out`, if given, which may be x."""
    return torch.add(*mlp_beside(spec, w, x_TE, spread), out=out)


def mlp_beside(spec: Spec, w: Weights, x_TE: Tensor, spread: Spread | None = None) -> tuple[Tensor, Tensor]:
    """x and its gated MLP, which a block adds."""
    x_TE, normed = (x_TE, x_TE) if spec.post_norm else norm_beside(spec, x_TE, w["post_attention_layernorm.weight"])
    gate, up = linears(w, [Layer("mlp.gate_proj"), Layer("mlp.up_proj")], normed, spread)
    y_TE = summed_linear(w, "mlp.down_proj", gated(gate, up), spread=spread)
    return x_TE, norm(spec, y_TE, w["post_feedforward_layernorm.weight"]) if spec.post_norm else y_TE


def final_linear(spec: Spec) -> str | None:
    """The linear layer whose output is only added to the block's result; None if a norm reads it.

    No gradient depends on the value of that output, so a block that is run again for its backward pass need not
    compute it.
    """
    return None if spec.post_norm else "mlp.down_proj"


def norm(spec: Spec, x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, with statistics in at least fp32.

    If gradients are wanted, a GPU runs a backward pass of our own (`_Norm`).
    """
    return norm_beside(spec, x, weight)[1]


def norm_beside(spec: Spec, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x and its norm. On a GPU, if the caller uses this x, backward adds the gradients of both in one pass."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if wanted and fusable(x) and x.shape[-1] <= WIDEST_NORM:
        return _Norm.apply(x, weight, spec.norm_eps)
    return x, rms_norm(x, weight, spec.norm_eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the last dimension. torch 2.11's kernel on GPUs loses rows behind 2^32 numbers (pytorch#181555)."""
    if x.numel() < COUNTED:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    parts = x.split(max((COUNTED - 1) // x[0].numel(), 1))
    return torch.cat([F.rms_norm(part, (x.shape[-1],), weight, eps) for part in parts])


class _Norm(torch.autograd.Function):
    """torch's forward; backward reads x and dy once, where torch's two kernels read them twice.

    On an H200, 64K rows of 576 in bf16: 0.1 ms; torch's take 0.175 ms for the weight's gradient and 0.076 ms for x's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return x, rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        from ithaca.model import triton_elementwise as fused

        x, weight = ctx.saved_tensors
        if dy is None:
            return beside, None, None
        return *fused.norm_backward(dy, x, weight, ctx.eps, beside), None


def _rows(spec: Spec, heads: Sequence[int]) -> Rows:
    """The rows of a projection that give these heads."""
    rows = [slice(run.start * spec.head_size, run.stop * spec.head_size) for run in runs(heads)]
    return rows[0] if len(rows) == 1 else rows


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return _Gated.apply(gate, up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if fusable(gate):
            from ithaca.model import triton_elementwise as fused

            return fused.gated(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if fusable(gate):
            from ithaca.model import triton_elementwise as fused

            return fused.gated_backward(dy, gate, up)
        share = gate.sigmoid()
        return dy * up * share * (1 + gate * (1 - share)), dy * gate * share
