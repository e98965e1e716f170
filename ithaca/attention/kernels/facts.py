"""What each attention kernel can do, where, and what it takes: numbers without torch, for the planner and the kernels.

The order is the order of preference: `auto` takes the first kernel that runs on the device, dtype and head size.
To add a kernel, add an entry here and its class in choose.py.
"""

from dataclasses import dataclass

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """What one kernel can do and what its backward pass takes."""

    name: str
    workspace: float
    """Tensors of q's size and dtype that backward allocates beside dq, dk and dv, with as many keys as queries."""
    scores: int = 0
    """fp32 tensors [query heads, queries, keys] that backward holds at once; the fused kernels hold none."""
    bucket: int | None = None
    """Lengths that documents make are cut into multiples of this many tokens; None: they stay as they are."""
    device: str | None = None
    """The only device type that it runs on; None: any."""
    dtypes: tuple[str, ...] | None = None
    """The only dtypes that it computes in; None: any floating-point dtype."""
    capability: tuple[int, int] | None = None
    """The lowest CUDA compute capability that it runs on; None: any."""
    largest_head: int | None = None
    """The largest head size; sizes are then multiples of 8. None: any head size."""


_AMPERE = (8, 0)

_ENTRIES = (
    # From 8192 tokens on cuDNN is twice as fast as flash attention
    KernelFacts(
        name="cudnn+flash",
        workspace=3.5,
        bucket=8192,
        device="cuda",
        dtypes=HALF,
        capability=_AMPERE,
        largest_head=128,
    ),
    KernelFacts(name="cudnn", workspace=3.5, device="cuda", dtypes=HALF, capability=_AMPERE, largest_head=128),
    KernelFacts(name="flash", workspace=4.0, device="cuda", dtypes=HALF, capability=_AMPERE, largest_head=256),
    KernelFacts(name="torch-cpu", workspace=4.0, device="cpu"),
    KernelFacts(name="naive", workspace=12.0, scores=4),
)

KERNEL_FACTS: dict[str, KernelFacts] = {facts.name: facts for facts in _ENTRIES}
