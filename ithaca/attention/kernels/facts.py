"""What each attention kernel can do, where, and what it takes: numbers without torch, for the planner and the kernels.

The order is the order of preference: `auto` takes the first kernel that runs on the device, dtype and head size.
A kernel is added by an entry here; its code is loaded when it is used.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """What one kernel can do and what its backward pass takes."""

    name: str
    code: str
    """The module in this folder and the class in it."""
    workspace_q: float
    """Tensors of q's size and dtype that backward allocates beside dq, dk and dv. The fused kernels: dq in fp32, and
    two fp32 numbers for each row and head."""
    workspace_k: float = 0.0
    """Tensors of k's size and dtype beside those, if several query heads read one key/value head."""
    workspace_repeated: float = 0.0
    """Tensors of k's size with as many heads as q, if several query heads read one key/value head."""
    longest: int | None = None
    """Rows of the longest causal call. A longer one is cut: dq, dk and dv are then summed in fp32; None: it is not."""
    bucket: int = 1
    """Calls are cut into multiples of this many tokens; a thinner remainder sees all keys in one call."""
    scores: int = 0
    """fp32 tensors [query heads, queries, keys] that backward holds at once; the fused kernels hold none."""
    device: str | None = None
    """The only device type that it runs on; None: any."""
    dtypes: tuple[str, ...] | None = None
    """The only dtypes that it computes in; None: any floating-point dtype."""
    capability: tuple[int, int] | None = None
    """The lowest CUDA compute capability that it runs on; None: any."""
    largest_head: int | None = None
    """The largest head size; sizes are then multiples of `head_step`. None: any head size."""
    head_step: int = 8
    replays: bool = False
    """Whether a CUDA graph of its calls can be replayed with other documents: it reads their bounds on the device."""
    compiles: bool = False
    """Whether it compiles when it first meets a kind of call (`Kernel.prepare`)."""
    package: str | None = None
    """The package that it needs, as `pip` names it; None: torch alone."""
    extra: str | None = None
    """The extra of this project that installs the package, in versions that were tried."""

    def workspace(self, q: float, k: float, group: float, rows: int, causal: bool) -> float:
        """Bytes of backward beside dq, dk and dv, given those of q and k (bf16) and the rows of q.

        `group`: query heads per key/value head.
        """
        shared = 0.0 if group <= 1 else self.workspace_k + self.workspace_repeated * group
        if self.longest is None or rows <= self.longest or not causal:
            return self.workspace_q * q + shared * k
        # The sums; beside them the call with most keys or, at the end, dq, dk and dv. Blocks see keys by powers of two
        calls = [(self.longest, 1 << (rows - 1).bit_length() - 1)]
        if rows % self.bucket:
            calls.append((self.bucket, rows))
        call = max((1 + self.workspace_q) * q * seeing + (2 + shared) * k * seen for seeing, seen in calls) / rows
        return 2 * q + 4 * k + max(call - q - 2 * k, 0.0)

    @property
    def installed(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.package is None or _installed(self.package)

    @property
    def missing(self) -> str:
        """The sentence that says how to install its package."""
        return f"it needs the package {self.package}: pip install 'ithaca[{self.extra}]'"


@lru_cache
def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


_AMPERE, _HOPPER = (8, 0), (9, 0)
_STATISTICS = 0.03  # two fp32 numbers beside 128 bf16 ones

_ENTRIES = (
    # Measured on an H200 at 64K tokens: the workspace of both fused kernels, to 1 %
    KernelFacts(
        name="flash4",
        code="flash4.Flash4",
        workspace_q=2 + _STATISTICS,
        workspace_k=4.0,
        device="cuda",
        dtypes=HALF,
        capability=_HOPPER,
        largest_head=256,
        # Its package accepts multiples of 8, but gradients of sizes 8, 72, 80 and 112 were wrong (4.0.0b36, Hopper)
        head_step=32,
        replays=True,
        compiles=True,
        package="flash-attn-4",
        extra="flash4",
    ),
    KernelFacts(
        name="cudnn+flash",
        code="cudnn_flash.CudnnAndFlash",
        workspace_q=2 + _STATISTICS,
        workspace_repeated=2.0,
        longest=2**16,
        bucket=2**13,  # from here on cuDNN is twice as fast as flash attention
        device="cuda",
        dtypes=HALF,
        capability=_AMPERE,
        largest_head=128,
    ),
    KernelFacts(
        name="cudnn",
        code="cudnn.Cudnn",
        workspace_q=2 + _STATISTICS,
        workspace_repeated=2.0,
        device="cuda",
        dtypes=HALF,
        capability=_AMPERE,
        largest_head=128,
    ),
    # dq in fp32, and dk and dv of every query head; from its code, not measured
    KernelFacts(
        name="flash",
        code="flash.Flash",
        replays=True,
        workspace_q=2 + _STATISTICS,
        workspace_repeated=2.0,
        device="cuda",
        dtypes=HALF,
        capability=_AMPERE,
        largest_head=256,
    ),
    # k, v, dk and dv of every query head
    KernelFacts(name="torch-cpu", code="torch_cpu.TorchCpu", workspace_q=0.0, workspace_repeated=4.0, device="cpu"),
    KernelFacts(name="naive", code="naive.Naive", workspace_q=12.0, scores=4),  # an upper estimate
)

KERNEL_FACTS: dict[str, KernelFacts] = {facts.name: facts for facts in _ENTRIES}


def gpu_kernels(head_size: int, capability: tuple[int, int] = _HOPPER) -> list[KernelFacts]:
    """The kernels that can run in bf16 on a GPU of this compute capability, if their packages are installed."""
    return [
        facts
        for facts in _ENTRIES
        if facts.device in ("cuda", None)
        and (facts.capability or (0, 0)) <= capability
        and (facts.largest_head is None or (head_size <= facts.largest_head and head_size % facts.head_step == 0))
    ]


def gpu_kernel(head_size: int, capability: tuple[int, int] = _HOPPER) -> KernelFacts:
    """The kernel that `auto` takes on such a GPU, with the packages that are installed here."""
    return next(facts for facts in gpu_kernels(head_size, capability) if facts.installed)
