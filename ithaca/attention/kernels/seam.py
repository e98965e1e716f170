"""The interface of attention kernels: one signature for forward and backward.

Layouts: q and o [T, Hq, D]; k and v [U, Hkv, D], where query head h reads key/value head h // (Hq / Hkv); lse [Hq, T],
natural logarithm, in at least fp32 and with any strides. `Pieces` says which rows see which keys. A kernel allocates
its outputs and keeps nothing between calls. Rows of no piece get zeros and lse = -inf.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KernelFacts
from ithaca.base.owners import ATTENTION, owned_by
from ithaca.base.precision import at_least_fp32


class Kernel(Protocol):
    name: str

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Why this kernel cannot run on this device, or None if it can."""
        ...

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        """Do what the first calls with these heads would wait for, such as compilation.

        `rectangles`: rows see keys of other tiles or ranks, too, not only those of their own documents' triangles.
        """
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        """(o, lse)"""
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)"""
        ...


class FactsKernel:
    """A kernel that takes its name and its limits from its entry in facts.py."""

    facts: ClassVar[KernelFacts]

    def __init__(self) -> None:
        self.name = self.facts.name

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        return refusal(self.facts, device, dtype, head_size)

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        """Nothing: most kernels are ready."""


class PieceByPiece(FactsKernel, ABC):
    """A kernel that computes one rectangle at a time, called once for each piece."""

    @abstractmethod
    def one_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(o, lse) of one rectangle or, if causal, of one triangle."""

    @abstractmethod
    def one_backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one rectangle or triangle."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        if _covers(pieces, q, k):
            return self.one_forward(q, k, v, pieces.causal, scale)
        o = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=at_least_fp32(q.dtype))
        for rows, keys in pieces.spans():
            o[rows], lse[:, rows] = self.one_forward(q[rows], k[keys], v[keys], pieces.causal, scale)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _covers(pieces, q, k):
            return self.one_backward(do, q, k, v, o, lse, pieces.causal, scale)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in pieces.spans():
            dq[rows], dk[keys], dv[keys] = self.one_backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], pieces.causal, scale
            )
        return dq, dk, dv


def refusal(facts: KernelFacts, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why a kernel with these facts cannot run on this device, or None if it can."""
    if facts.device is not None and device.type != facts.device:
        kind = "a CUDA GPU" if facts.device == "cuda" else "a CPU"
        return f"it runs on {kind}, the model is on {device.type}"
    short = str(dtype).removeprefix("torch.")
    if facts.dtypes is not None and short not in facts.dtypes:
        return f"it computes in {' or '.join(facts.dtypes)}, the model in {short}"
    if facts.largest_head is not None and (head_size % facts.head_step or head_size > facts.largest_head):
        return (
            f"it takes head sizes up to {facts.largest_head} in steps of {facts.head_step}, the model has {head_size}"
        )
    if facts.capability is not None:
        found = torch.cuda.get_device_capability(device)
        if found < facts.capability:
            needed, has = (".".join(map(str, capability)) for capability in (facts.capability, found))
            return f"it needs a GPU of compute capability {needed} or higher, {device} has {has}"
    # Last: nobody should install a package for a GPU or a model that it does not serve
    return None if facts.installed else facts.missing


def bhtd(x_THD: Tensor) -> Tensor:
    """[1, H, T, D], the layout of torch's own attention operations; no copy."""
    return x_THD.transpose(0, 1)[None]


def thd(x_BHTD: Tensor) -> Tensor:
    return x_BHTD[0].transpose(0, 1)


def per_query_head(kv: Tensor, q: Tensor) -> Tensor:
    """Each key/value head repeated for the query heads of its group."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def per_kv_head(grad: Tensor, kv: Tensor) -> Tensor:
    """Gradients of the repeated heads, summed over each group in at least fp32."""
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2, dtype=at_least_fp32(grad.dtype)).to(kv.dtype)


def _covers(pieces: Pieces, q: Tensor, k: Tensor) -> bool:
    return pieces.q_bounds == (0, q.shape[0]) and pieces.k_bounds == (0, k.shape[0])


class _Attend(torch.autograd.Function):
    @staticmethod
    @owned_by(ATTENTION)
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, pieces: Pieces, scale: float) -> Tensor:
        o, lse = kernel.forward(q, k, v, pieces, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = kernel, pieces, scale
        return o

    @staticmethod
    @once_differentiable
    @owned_by(ATTENTION)
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        kernel, pieces, scale = ctx.call
        return (*kernel.backward(do, *ctx.saved_tensors, pieces, scale), None, None, None)


def attend(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, pieces: Pieces) -> Tensor:
    """o [T, Hq, D] of q [T, Hq, D] on k, v [U, Hkv, D]; differentiable."""
    return _Attend.apply(q, k, v, kernel, pieces, softmax_scale(q))


def softmax_scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5
