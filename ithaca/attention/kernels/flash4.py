"""FlashAttention-4 (package flash-attn-4): squares, rectangles and packed pieces of any lengths, each in one call.

The fastest kernel on Hopper and Blackwell. It does not slow down with the length, so nothing is cut. It compiles when
it first meets a kind of call (dtype, head size, heads per key/value head, causal or not, packed or not), a few seconds
for each, and keeps what it compiled on disk for later runs (`prepare`). Backward is not deterministic.

The package is a pre-release and the two functions are private. They are named here and nowhere else.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.facts import KERNEL_FACTS
from ithaca.attention.kernels.naive import Naive
from ithaca.attention.kernels.packed import PackedKernel
from ithaca.attention.kernels.seam import Kernel, softmax_scale
from ithaca.base.errors import PlanError

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
USED = {
    "_flash_attn_fwd": ("softmax_scale", "causal", "return_lse", *BOUNDS),
    "_flash_attn_bwd": ("out", "dout", "lse", "softmax_scale", "causal", *BOUNDS),
}


class Flash4(PackedKernel):
    facts = KERNEL_FACTS["flash4"]

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        reason = super().refuses(device, dtype, head_size)
        return reason or _refusal_of_package(torch.cuda.get_device_capability(device)[0], head_size)

    def prepare(
        self, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, rectangles: bool
    ) -> None:
        """Compile the kinds of calls that these heads make, or load them from disk, and compare them with `naive`.

        The package compiles for GPUs and head sizes that it was never tried on, and what it gave was not always right.
        """
        generator = torch.Generator().manual_seed(0)
        shapes = [(SHORT, count, head_size) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, do = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
        for pieces in DOCUMENTS + (RECTANGLES if rectangles else ()):
            try:
                found = _everything(self, q, k, v, do, pieces)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # whatever its compiler raises
                raise PlanError(
                    f"kernel 'flash4' does not run here ({type(problem).__name__}: {problem}): use "
                    "plan.kernel=cudnn+flash or flash"
                ) from problem
            wanted = _everything(Naive(), q, k, v, do, pieces)
            for name, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
                error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
                if not error <= LARGEST_ERROR:
                    raise PlanError(
                        f"kernel 'flash4' is wrong on this GPU with heads of {head_size}: its {name} is off by "
                        f"{error:.2g}, and rounding explains {LARGEST_ERROR}: use plan.kernel=cudnn+flash or flash"
                    )

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, scale: float) -> tuple[Tensor, Tensor]:
        forward, _ = _functions()
        options: dict[str, Any] = {"softmax_scale": scale, "causal": pieces.causal, "return_lse": True}
        if count := pieces.equal(len(q), len(k)):
            o, lse, *_ = forward(*(x.unflatten(0, (count, -1)) for x in (q, k, v)), **options)
            return o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        o, lse, *_ = forward(q, k, v, **self._packed(pieces, q, k), **options)
        return o, lse

    def call_backward(
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
        _, backward = _functions()
        options: dict[str, Any] = {"softmax_scale": scale, "causal": pieces.causal}
        if count := pieces.equal(len(q), len(k)):
            parts = [x.unflatten(0, (count, -1)) for x in (q, k, v, o, do)]
            lse_BHT = lse.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
            dq, dk, dv = (x.flatten(0, 1) for x in backward(*parts, lse_BHT, **options)[:3])
            return dq, dk, dv
        dq, dk, dv, *_ = backward(q, k, v, o, do, lse.contiguous(), **self._packed(pieces, q, k), **options)
        return dq, dk, dv

    def _packed(self, pieces: Pieces, q: Tensor, k: Tensor) -> dict[str, Any]:
        """The arguments that say where pieces begin and end."""
        return dict(zip(BOUNDS, self.lengths(pieces, q, k), strict=True))


LARGEST_ERROR = 0.02  # relative, of a call against `naive`; rounding to bf16 makes 0.002 to 0.004

# Every kind of call that training makes. The package compiles backward anew for sides within one of its blocks (48 to
# 128 tokens), as documents that barely reach across the border of a tile make them, and all for over 256 documents
SHORT, THIN, MANY = 400, 40, 257
DOCUMENTS = tuple(Pieces.documents(bounds) for bounds in ((0, SHORT), (0, 64, SHORT), (*range(MANY), SHORT)))
RECTANGLES = tuple(Pieces.rectangle(rows, keys, ragged=False) for rows in (SHORT, THIN) for keys in (SHORT, THIN))


def _everything(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, do: Tensor, pieces: Pieces) -> tuple[Tensor, ...]:
    """o, lse, dq, dk and dv of one call, on the first rows and keys."""
    rows, keys = slice(pieces.q_bounds[-1]), slice(pieces.k_bounds[-1])
    q, do, k, v = q[rows], do[rows], k[keys], v[keys]
    o, lse = kernel.forward(q, k, v, pieces, softmax_scale(q))
    return o, lse, *kernel.backward(do, q, k, v, o, lse, pieces, softmax_scale(q))


def _writable(name: str) -> Path:
    """The folder of that name, made if needed; raises PlanError if it cannot be written."""
    try:
        folder = Path(name).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except (OSError, RuntimeError) as problem:  # RuntimeError: there is no home
        raise PlanError(
            f"flash-attn-4 cannot keep what it compiles in {name} ({problem}): set {CACHE} to a folder that can be "
            "written"
        ) from problem
    return folder


@lru_cache(maxsize=1)
def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's forward and backward. The first call loads the package, which takes seconds."""
    # Read once, when the package is loaded; what users have set themselves stays
    if os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1") == "1":
        os.environ[CACHE] = str(_writable(os.environ.get(CACHE, "~/.cache/ithaca/flash4")))
    # It warns about its own arguments at every compilation
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # pyrefly: ignore

    return _flash_attn_fwd, _flash_attn_bwd


@lru_cache(maxsize=8)
def _refusal_of_package(major: int, head_size: int) -> str | None:
    """Why the installed package cannot serve this head size on GPUs of this generation; None if it can."""
    try:
        functions = _functions()
        from flash_attn.cute.interface import _validate_head_dims  # pyrefly: ignore
    except PlanError as problem:
        return str(problem)
    except Exception as problem:  # whatever a package of another version, or half of one, raises when it is loaded
        return f"flash-attn-4 cannot be loaded ({type(problem).__name__}: {problem}): {KERNEL_FACTS['flash4'].missing}"
    for function, (name, wanted) in zip(functions, USED.items(), strict=True):
        unknown = [word for word in wanted if word not in inspect.signature(function).parameters]
        if unknown:
            return f"{name} of the installed flash-attn-4 has no {unknown[0]}: {KERNEL_FACTS['flash4'].missing}"
    try:
        _validate_head_dims(head_size, head_size, major, 8)
    except Exception as problem:  # an AssertionError; of another version, anything
        return f"flash-attn-4 does not take head size {head_size} on this GPU ({problem})"
    return None
