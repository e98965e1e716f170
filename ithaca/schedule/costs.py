"""The terms in which a schedule states its cost: messages between ranks, and the work of a step. No torch.

A message names tensors, not bytes, because heads may not divide evenly over ranks. `Peers` says from whose view, and to
whom, bytes are counted. `Work` is what takes time on one rank, as FLOPs, bytes and GPU operations.

GPU operations (kernels, copies, fills) count because the host launches them one by one: steps of small models wait for
it. They were counted in profiles of whole steps on an H200 (SmolLM2-135M at 64K, Llama3.2-1B at 8K and 32K, kernel
`flash4`), which differ in layers, tiles and schedule, so that each constant below is a difference of two of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ithaca.parallel.axes import runs_alone
from ithaca.parallel.head_split import HeadSplit

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

TO_HEADS, TO_TOKENS = "to_heads", "to_tokens"  # all-to-all over Ulysses ranks, there and back
TO_EACH, TO_NEXT = "to_each", "to_next"  # the same bytes to every other ring rank, or to the next one alone
TO_RANKS = "to_ranks"  # as many bytes to every other tensor rank


@dataclass(frozen=True)
class Message:
    """Tensors of all local tokens that a block sends, in `count` collectives."""

    pattern: str
    split: HeadSplit  # the heads that are sent
    queries: int = 0  # tensors with query heads: q, o, and their gradients
    keys: int = 0  # tensors with key/value heads: K, V, and their gradients
    lses: int = 0  # log-sum-exps
    high: bool = False  # the tensors are sums in at least fp32
    count: int = 1
    steps: int = 1  # times that the tensors are sent: a block of K and V goes around a ring in several
    token_bytes: int = 0  # for each local token, to every other tensor rank
    own_bytes: int = 0  # independent of the number of tokens, to every other tensor rank

    @property
    def ring(self) -> bool:
        """Whether the message goes over ring ranks, not over Ulysses ranks."""
        return self.pattern in (TO_EACH, TO_NEXT)


@dataclass(frozen=True)
class Peers:
    """A sender and its receivers."""

    rank: int  # the sender, among its Ulysses or tensor ranks
    ulysses: Sequence[int]  # the Ulysses or tensor ranks that receive
    ring: int  # number of other ring ranks
    next_in_ring: bool

    @staticmethod
    def all(ulysses: int, ring: int, rank: int) -> "Peers":
        """All other ranks that share the sequence with a rank."""
        return Peers(rank, [other for other in range(ulysses) if other != rank], ring - 1, ring > 1)


@dataclass(frozen=True)
class Traffic:
    """The number of collectives and the bytes that a rank sends in them."""

    messages: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def traffic(messages: Iterable[Message], job: "Job", peers: Peers) -> Traffic:
    """The traffic of all messages together."""
    return sum((_traffic(message, job, peers) for message in messages), Traffic(0, 0))


def _traffic(message: Message, job: "Job", peers: Peers) -> Traffic:
    """The traffic of one message. Only ranks that have its heads call a collective over ring ranks."""
    size = _bytes(message, job, peers)
    return Traffic(message.count if size or not message.ring else 0, size)


def _bytes(message: Message, job: "Job", peers: Peers) -> int:
    q, kv = message.split.q, message.split.kv
    number = job.spec.head_size * (job.high if message.high else job.itemsize)  # of one head of one token
    mine = message.queries * len(q[peers.rank]) + message.keys * len(kv[peers.rank])
    tokens = job.layout.local
    if message.pattern == TO_RANKS:
        return (tokens * message.token_bytes + message.own_bytes) * len(peers.ulysses)
    if message.pattern == TO_HEADS:
        return tokens * number * sum(message.queries * len(q[r]) + message.keys * len(kv[r]) for r in peers.ulysses)
    if message.pattern == TO_TOKENS:
        return tokens * number * mine * len(peers.ulysses)
    block = tokens * len(q) * (mine * number + message.lses * len(q[peers.rank]) * job.high)
    return block * message.steps * (peers.ring if message.pattern == TO_EACH else int(peers.next_in_ring))


@dataclass(frozen=True)
class Copies:
    """Bytes that cross a link in each direction."""

    into: float = 0.0  # the device
    out: float = 0.0

    def __add__(self, other: "Copies") -> "Copies":
        return Copies(self.into + other.into, self.out + other.out)

    @property
    def most(self) -> float:
        """Bytes of the busier direction: both directions run at full speed at the same time."""
        return max(self.into, self.out)


@dataclass(frozen=True)
class StepCopies:
    """The copies of a step by pass: a link that is idle forward does not help backward."""

    forward: Copies = Copies()
    backward: Copies = Copies()

    def __add__(self, other: "StepCopies") -> "StepCopies":
        return StepCopies(self.forward + other.forward, self.backward + other.backward)

    @property
    def into(self) -> float:
        return self.forward.into + self.backward.into

    @property
    def out(self) -> float:
        return self.forward.out + self.backward.out

    @property
    def most(self) -> float:
        return max(self.into, self.out)


@dataclass(frozen=True)
class Work:
    """One step of one rank, all layers and the loss."""

    attention: float  # FLOPs of one forward pass of attention; backward has 2.5 times as many
    attention_runs: float  # forward passes of attention in a step: 1, or more where it is recomputed
    call: float  # tokens of a document in one kernel call, averaged over FLOPs
    merged: float  # bytes that merging outputs of tiles reads and writes, forward; as many backward
    linear: float  # FLOPs of matrix products
    moved: float  # device bytes that norms, gates, rotary and residuals read and write
    launches: float  # GPU operations
    python: float  # other work of the host, as the number of GPU operations that take as long to launch
    host: StepCopies  # over the link to the host: tapes in host memory and on disk
    disk: StepCopies
    kv: StepCopies = StepCopies()  # of these, K and V and the sums of their gradients


# Host time besides launching: steps of SmolLM2-135M, 16K tokens, on the machine of an H200, without 30 µs an operation
# (hardware.toml): 0.138 s (`dense`, none), 0.181 (selective), 0.219 (full), 0.241 and 0.283 (`sweep`, tapes on the
# device, on the host). Timings of one setting differ by up to 20 %

# Operations in steps of SmolLM2-135M, 30 layers, on an H200: 2,907 (`dense`, none), 3,207 (selective), 3,237 (full),
# 3,507 (`sweep`) with 2K tokens, 6,087 with 4 tiles under full, 15,983 with 4 chunks; 3,776 (none) with 64K in 18
# documents, where more products are split and then reduced; 3,396 since gradients of one input add up in its products
PER_TILE = 32  # GPU operations of an MLP tile, forward, again and backward
PER_SHARDED_LAYER = 48  # FSDP2's copies of a layer's weights and gradients, for both passes
PER_LOSS_TILE = 25  # Llama3.2-1B: 2,503 with 8 tiles of the loss, 2,355 with 2
PER_MESSAGE = 4  # packing, sending, unpacking: assumed
PER_OPTIMIZER = 16  # the norm and its scale, counting, two groups, a table for each (optimizer/): counted in the code


def other_launches(job: "Job") -> float:
    """GPU operations of a step outside the blocks' computing: loss, messages, weights, optimizer."""
    layers = job.spec.layers
    messages = sum(message.count for way in job.costs.messages(job, 0) for message in way)
    loss = job.chunks * -(-job.block_tokens // job.loss_rows)
    sharding = 0 if runs_alone(job.axes, job.plan.zero) else PER_SHARDED_LAYER
    return layers * (sharding + PER_MESSAGE * messages) + PER_LOSS_TILE * loss + PER_OPTIMIZER


def mlp_tiles(job: "Job") -> int:
    """Tiles of the MLP in the tokens that go through a block together."""
    return -(-job.block_tokens // job.tile)


@lru_cache(maxsize=64)  # the planner's search asks for the same values many times
def counted(lengths: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(length, number of documents) pairs. A long sequence may have a million documents of a few lengths."""
    return tuple(Counter(lengths).items())


def attention_flops(job: "Job") -> float:
    """Causal attention forward, half of each document's square, of the rank with most heads."""
    spec = job.spec
    uneven = max(map(len, job.split.q)) * job.axes.by_heads / spec.heads
    attended = sum(count * length**2 for length, count in counted(job.document_lengths)) / job.tokens
    return 2 * spec.layers * spec.heads * spec.head_size * attended * local_tokens(job) * uneven


def call_length(job: "Job", longest: int) -> float:
    """Tokens of a document that one kernel call sees, at most `longest`, on average over attention's FLOPs."""
    flops = [(length, count * length**2) for length, count in counted(job.document_lengths)]
    return sum(part * min(length, longest) for length, part in flops) / sum(part for _, part in flops)


def local_tokens(job: "Job") -> int:
    """Tokens of a rank, without padding."""
    return -(-job.tokens // job.axes.context)


def block_products(job: "Job") -> tuple[int, int]:
    """Multiplications for one local token of a block: of its projections, and of output projection and MLP.

    A tensor rank has a part of the products of the tokens of all ranks, which is as much or, if heads are held by
    several ranks or divided unevenly, more.
    """
    spec, all_tokens = job.rank_spec, job.axes.tensor
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    return all_tokens * spec.hidden * (q + 2 * kv), all_tokens * (q * spec.hidden + 3 * spec.hidden * spec.mlp)


def last_product(job: "Job") -> int:
    """Multiplications for one token of the block's last product, which backward does not run again.

    A post-norm block runs it again: its norm reads the output.
    """
    return 0 if job.spec.post_norm else job.spec.hidden * job.spec.mlp


def linear_flops(job: "Job", again: float) -> float:
    """Matrix products of all layers and the loss; `again`: multiplications per token and layer that run twice."""
    spec = job.spec
    return local_tokens(job) * spec.layers * (6 * sum(block_products(job)) + 2 * again) + loss_flops(job)


def forward_flops(job: "Job") -> float:
    """Matrix products of one forward pass over all layers."""
    return local_tokens(job) * job.spec.layers * 2 * sum(block_products(job))


def loss_flops(job: "Job") -> float:
    """Matrix products of the loss with its gradients, between the passes."""
    return local_tokens(job) * 6 * job.spec.vocab * job.spec.hidden


NORM_WIDTH = 3072  # features below which the gradient of a norm's weight is no faster: 3 ns a row on an H200


def moved_bytes(job: "Job", runs: int) -> float:
    """Device bytes beside the products, counted in tensors of each width; `runs`: forward passes of a block."""
    spec = job.spec
    q, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    hidden = 8 * runs + 23  # norms, residuals; backward, also of the norms, and sums of the inputs' gradients
    heads = 4 * runs + 12  # rotary, packing for the exchange; the same backward
    mlp = 3 * runs + 6
    block = hidden * spec.hidden + heads * (q + 2 * kv) / 2 + mlp * spec.mlp
    block += 4 * max(spec.hidden, NORM_WIDTH)  # gradients of both norms' weights
    # Logits are read twice and written once
    return local_tokens(job) * job.itemsize * (spec.layers * block + 3 * spec.vocab)
