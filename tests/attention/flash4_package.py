"""A stand-in for the package flash-attn-4 on a CPU: the functions that are used, with its layouts, in plain torch.

It checks what the package asks for: int32 bounds, a contiguous log-sum-exp, the longest piece as it is.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels import flash4
from ithaca.attention.kernels.choose import make_kernel
from ithaca.attention.kernels.facts import _installed


def _pieces(q: Tensor, k: Tensor, causal: bool, bounds_q, bounds_k, longest_q, longest_k) -> Pieces:
    """The pieces of a call on [B, T, H, D] or, with bounds, on [T, H, D]."""
    if bounds_q is None:
        edges = [tuple(range(0, len(x) * x.shape[1] + 1, x.shape[1])) for x in (q, k)]
        return Pieces(*edges, causal=causal)
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    for bounds, longest in ((bounds_q, longest_q), (bounds_k, longest_k)):
        assert max(stop - start for start, stop in pairwise(bounds.tolist())) == longest
    return Pieces(tuple(bounds_q.tolist()), tuple(bounds_k.tolist()), causal=causal)


def _flash_attn_fwd(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, return_lse=False,
):  # fmt: skip
    assert return_lse
    pieces = _pieces(q, k, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    flat = [x.flatten(0, -3) for x in (q, k, v)]
    o, lse = make_kernel("naive").forward(*flat, pieces, softmax_scale)
    if cu_seqlens_q is None:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return o.view(q.shape), lse, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
    max_seqlen_k=None,
):  # fmt: skip
    assert lse.is_contiguous()
    pieces = _pieces(q, k, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if cu_seqlens_q is None:
        assert lse.shape == (len(q), q.shape[2], q.shape[1])
        lse = lse.transpose(0, 1).flatten(1)
    q_, k_, v_, o_, do_ = (x.flatten(0, -3) for x in (q, k, v, out, dout))
    grads = make_kernel("naive").backward(do_, q_, k_, v_, o_, lse, pieces, softmax_scale)
    return *(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), None


def _validate_head_dims(head_dim: int, head_dim_v: int, compute_capability: int, alignment: int) -> None:
    assert head_dim == head_dim_v
    assert head_dim % alignment == 0 and head_dim <= (256 if compute_capability == 9 else 128), "too large"  # noqa: PT018


def install(patch: pytest.MonkeyPatch, **other: object) -> None:
    """Make the package importable, and known as installed; `other` replaces functions or leaves them out (None)."""
    names = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    functions = names | {"_validate_head_dims": _validate_head_dims} | other
    interface = ModuleType("flash_attn.cute.interface")
    for name, function in functions.items():
        if function is not None:
            setattr(interface, name, function)
    for name in ("flash_attn", "flash_attn.cute"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    patch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")  # it compiles nothing: no folder in the user's home
    patch.setattr("ithaca.attention.kernels.facts.version", lambda _: "4.0.0b36")
    for remembered in (_installed, flash4._functions, flash4._refusal_of_package):
        remembered.cache_clear()
