"""One rank's part of a job, as sizes: all that memory, traffic and time depend on. No torch, nothing allocated.

`Job.costs` is the `cost.py` of the Plan's schedule. Every schedule has one, beside the code that runs it, with these
functions. Planner, memory check, rehearsal and benchmarks take their figures from them:

    layout(plan, axes, tokens, shorten)   which tokens each rank holds
    tiles(plan, layout)                   how a rank's tapes are cut
    tapes(job)                            the tapes, which `run.py` allocates
    kept(job, layers)                     device bytes that blocks leave for their backward pass, beside tapes
    passing_bytes(job)                    weights of other layers that a block gathers beside its own
    settles(job)                          whether the head's gradient is reduced before the last block goes backward
    peaks(job)                            bytes by owner at the peaks within a block
    reading(job)                          the same in a pass without gradients, as one that reads prompts
    messages(job, layer)                  what a block sends, forward and backward
    work(job)                             FLOPs, bytes and GPU operations of a step
    exposed(job, computing, ulysses, ring)    seconds of computing with the part of the exchange that it cannot hide
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ithaca.attention.kernels.facts import KERNEL_FACTS, KernelFacts, gpu_kernel
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit, Rounds, split_heads
from ithaca.parallel.layout import Layout
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Message, Work
from ithaca.schedule.sweep import cost as sweep_cost
from ithaca.schedule.tensor import cost as tensor_cost
from ithaca.schedule.whole import cost as whole_cost
from ithaca.tape.spec import TapeSpec

BF16, FP32 = 2, 4  # bytes

ONE_RANK = Axes()

Bytes = Counter[str]  # by owner (base/owners.py)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's part of a job's step."""

    spec: Spec
    plan: Plan
    tokens: int  # of one pass, of all ranks that share a sequence
    axes: Axes = ONE_RANK
    documents: tuple[int, ...] | None = None  # lengths of the pass's documents, in order; None: one document
    itemsize: int = BF16  # bytes of a number of the computation
    rank: int | None = None  # among the Ulysses or tensor ranks; None: the one with most heads
    passes: int = 1  # of a step, one after the other; each adds its gradients to those of the others
    layers_run: int | None = None  # only the first layers run, as in a rehearsal; the others only take memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", self.plan.settled_for(self.spec))

    @property
    def costs(self) -> "Schedule":
        return SCHEDULES[self.plan.entry.schedule]

    @property
    def high(self) -> int:
        """Bytes of a number of at least fp32."""
        return max(self.itemsize, FP32)

    @property
    def layers_running(self) -> int:
        """Layers that run."""
        return self.spec.layers if self.layers_run is None else self.layers_run

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Lengths of the documents of the pass."""
        return self.documents or (self.tokens,)

    @cached_property
    def layout(self) -> Layout:
        return self.costs.layout(self.plan, self.axes, self.tokens, shorten=True)

    @cached_property
    def tiles(self) -> Tiles:
        """How this rank's tapes are cut."""
        return self.costs.tiles(self.plan, self.layout)

    @cached_property
    def split(self) -> HeadSplit:
        """Which heads each Ulysses or tensor rank attends with."""
        return split_heads(self.spec.heads, self.spec.kv_heads, self.axes.by_heads)

    @cached_property
    def rounds(self) -> Rounds:
        return self.plan.rounds(self.split)

    @cached_property
    def head_rank(self) -> int:
        if self.rank is not None:
            return self.rank
        return max(range(self.axes.by_heads), key=lambda rank: (len(self.split.kv[rank]), len(self.split.q[rank])))

    @cached_property
    def rank_spec(self) -> Spec:
        """The model whose weights this rank has: a narrower one, if it is a tensor rank."""
        if self.axes.tensor == 1:
            return self.spec
        return TensorPart(self.spec, self.head_rank, self.axes.tensor).narrow

    @cached_property
    def loss_rows(self) -> int:
        """Tokens of this rank whose logits exist at the same time, along with as many of each other tensor rank."""
        return min(max(self.plan.loss_tile // self.axes.tensor, 1), self.block_tokens)

    @cached_property
    def heads(self) -> Heads:
        """The heads that this rank attends with."""
        return Heads(self.split.q[self.head_rank], self.split.kv[self.head_rank])

    @cached_property
    def tapes(self) -> list[TapeSpec]:
        return self.costs.tapes(self)

    @cached_property
    def chunks(self) -> int:
        """Parts of the sequence that go through a block one after the other."""
        return self.layout.chunks.count

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of this rank that go through a block together."""
        return min(self.layout.tiles.size, self.layout.local)

    @cached_property
    def tile(self) -> int:
        """Tokens of this rank that go through an MLP together."""
        return min(self.plan.tile or self.block_tokens, self.block_tokens)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one block on this rank."""
        return sum(map(math.prod, self.rank_spec.block_shapes().values()))

    @cached_property
    def kernel(self) -> KernelFacts:
        """The attention kernel; with `auto`, the one for a GPU."""
        if self.plan.kernel in KERNEL_FACTS:
            return KERNEL_FACTS[self.plan.kernel]
        return gpu_kernel(self.spec.head_size)

    def workspace(self, q: int, k: int, causal: bool = True) -> float:
        """Bytes that backward of the attention kernel takes for itself, given those of q and k.

        q and k are those of the tokens that go through a block together, with some of this rank's heads.
        """
        gathered = self.axes.ring if self.plan.sweeps else 1  # under `sweep` ring ranks gather queries, not keys
        rows = self.block_tokens * self.axes.by_heads * gathered
        held = self.kernel.workspace(q, k, q / k / gathered, rows, causal)
        if not self.kernel.scores:
            return held
        side, heads = min(rows, max(self.document_lengths)), q / (rows * self.spec.head_size * self.itemsize)
        return held + self.kernel.scores * self.high * heads * side**2

    # Bytes of tensors of some tokens, all heads
    def hidden(self, tokens: int) -> int:
        return tokens * self.spec.hidden * self.itemsize

    def queries(self, tokens: int) -> int:
        return tokens * self.spec.heads * self.spec.head_size * self.itemsize

    def keys(self, tokens: int) -> int:
        return tokens * self.spec.kv_heads * self.spec.head_size * self.itemsize

    # Bytes of tensors of this rank's heads, for the tokens of all its Ulysses ranks that go through a block together
    def own_queries(self, split: HeadSplit | None = None) -> int:
        heads = len(self.heads.q) if split is None else len(split.q[self.head_rank])
        return self.block_tokens * self.axes.by_heads * heads * self.spec.head_size * self.itemsize

    def own_keys(self, split: HeadSplit | None = None) -> int:
        heads = len(self.heads.kv) if split is None else len(split.kv[self.head_rank])
        return self.block_tokens * self.axes.by_heads * heads * self.spec.head_size * self.itemsize

    def own_lse(self) -> int:
        return self.block_tokens * self.axes.by_heads * len(self.heads.q) * self.high

    # Parts of a block that every schedule runs in the same way (pre_post_attention.py)
    def mlp_bytes(self) -> int:
        """An MLP's backward pass over a tile: gate, up, their gradients and their product's; 3 hidden states."""
        return 5 * self.tile * self.spec.mlp * self.itemsize + 3 * self.hidden(self.tile)

    def mlp_forward_bytes(self) -> int:
        """An MLP's forward pass over a tile: gate, up and their product; 3 hidden states."""
        return 3 * self.tile * self.spec.mlp * self.itemsize + 3 * self.hidden(self.tile)

    def projection_bytes(self, split: HeadSplit | None = None) -> int:
        """Bytes that a projection keeps for its backward pass: the normed x; with norms of q and k, these as well."""
        split = split or self.split
        heads = len(split.q_heads) + len(split.kv_heads) if self.spec.qk_norm else 0
        return self.hidden(self.block_tokens) + self.block_tokens * heads * self.spec.head_size * self.itemsize


class Schedule(Protocol):
    """The functions of a schedule's `cost.py`."""

    def layout(self, plan: Plan, axes: Axes, tokens: int, shorten: bool) -> Layout: ...

    def tiles(self, plan: Plan, layout: Layout) -> Tiles: ...

    def tapes(self, job: Job) -> list[TapeSpec]: ...

    def kept(self, job: Job, layers: range) -> int: ...

    def passing_bytes(self, job: Job) -> int: ...

    def settles(self, job: Job) -> bool: ...

    def peaks(self, job: Job) -> dict[str, Bytes]: ...

    def reading(self, job: Job) -> dict[str, Bytes]: ...

    def messages(self, job: Job, layer: int) -> tuple[list[Message], list[Message]]: ...

    def work(self, job: Job) -> Work: ...

    def exposed(self, job: Job, computing: float, ulysses: float, ring: float) -> float: ...


SCHEDULES: dict[str, Schedule] = {"sweep": sweep_cost, "whole": whole_cost, "tensor": tensor_cost}  # pyrefly: ignore
