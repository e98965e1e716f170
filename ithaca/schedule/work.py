"""The work of a step, for one rank: what takes time, as FLOPs and bytes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ithaca.schedule.job import Job


@dataclass(frozen=True)
class Copies:
    """Bytes that cross a link in each direction."""

    into: float = 0.0  # the device
    out: float = 0.0

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(self.into + other.into, self.out + other.out)

    @property
    def most(self) -> float:
        """Of the busier direction: each has a link of its own."""
        return max(self.into, self.out)


@dataclass(frozen=True)
class Work:
    """One step of one rank, all layers and the loss."""

    attention: float  # FLOPs of one forward pass of attention; backward has 2.5 times as many
    attention_runs: float  # forward passes of attention in a step: 1, or more where it is recomputed
    one_call: bool  # attention is one kernel call over all tokens, not a walk over tiles
    merged: float  # bytes that merging outputs of tiles reads and writes, forward; as many backward
    linear: float  # FLOPs of matrix products
    moved: float  # device bytes that norms, gates, rotary and residuals read and write
    host: Copies  # over the link to the host: tapes in host memory and on disk
    disk: Copies


def attention_flops(job: "Job") -> float:
    """Causal attention forward, half of the square, of the rank with most heads."""
    spec = job.spec
    uneven = max(map(len, job.split.q)) * job.axes.ulysses / spec.heads
    return 2 * spec.layers * spec.heads * spec.head_size * (job.sequence or job.tokens) * local_tokens(job) * uneven


def local_tokens(job: "Job") -> int:
    """Tokens of a rank, without padding."""
    return -(-job.tokens // job.axes.context)


def block_products(job: "Job") -> tuple[int, int]:
    """Multiplications for one token of a block: of its projections, and of output projection and MLP."""
    spec = job.spec
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    return spec.hidden * (q + 2 * kv), q * spec.hidden + 3 * spec.hidden * spec.mlp


def linear_flops(job: "Job", again: float) -> float:
    """Matrix products of all layers and the loss; `again`: multiplications for a token and layer that are rerun."""
    spec = job.spec
    per_token = spec.layers * (6 * sum(block_products(job)) + 2 * again) + 6 * spec.vocab * spec.hidden
    return local_tokens(job) * per_token


def moved_bytes(job: "Job", runs: int) -> float:
    """Device bytes beside the products, counted in tensors of each width; `runs`: forward passes of a block."""
    spec = job.spec
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    hidden = 8 * runs + 14  # norms, residuals; backward, also of the norms
    heads = 4 * runs + 12  # rotary, packing for the exchange; the same backward
    mlp = 3 * runs + 6
    block = hidden * spec.hidden + heads * (q + 2 * kv) / 2 + mlp * spec.mlp
    # Logits are read twice and written once
    return local_tokens(job) * job.itemsize * (spec.layers * block + 3 * spec.vocab)
