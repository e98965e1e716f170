"""What a rank holds of its GPU when it holds most, by owner, in closed form.

Beside what lies there all the time (states, tapes) a step has a few moments that can be the highest: backward of the
last block, when the head's gradient is still on its way to its owners; backward of the first, when all other gradients
are there; and the head itself. Within a block it is either the MLP or the attention that takes most. Each moment is a
list of tensors as the schedules make them; the largest sum is the peak. With T tokens of a chunk or, under `whole`, of
the rank, tiles of τ, a hidden state of E, Q and K features of all query and key/value heads, an MLP of M:

    MLP          5 τM (gate, up, their gradients, that of their product) + 3 τE
    attention    q, o, do, K, V of this rank's heads and all its Ulysses ranks' tokens, dq, dK, dV and the kernel's
                 workspace; in a walk over tiles also dq in fp32, and that of the visit before
    exchange     under `sweep`, what neighbouring chunks have under way: (q, o, do) and (dq, dK, dV), sent and received
    weights      a block gathered, and the next one on its way; gradients in fp32, once as sums, once being reduced

The allocator keeps what one stream has freed from others, the most after the head was gathered and reduced: as many
times its size as was measured on an H200 (bench/results/rehearsals-tuned.json), whatever the length.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ithaca.base.owners import (
    ALLOCATOR,
    ATTENTION,
    BATCH,
    BLOCKS,
    EXCHANGE,
    GATHERED,
    GRADIENTS,
    KERNELS,
    KEYS,
    LOSS,
    OTHER,
    STATES,
    TAPES,
)
from ithaca.base.tiles import Tiles
from ithaca.model.spec import Heads, Spec
from ithaca.parallel.head_split import HeadSplit, head_rounds, split_heads
from ithaca.parallel.layout import row_range
from ithaca.plans.plan import Plan
from ithaca.plans.tape_specs import (
    TapeSpec,
    device_bytes,
    disk_bytes,
    host_bytes,
    layout_of,
    moment_slot_bytes,
    passing_bytes,
    tape_specs,
    tiles_of,
)

BF16, FP32 = 2, 4  # bytes
WORKSPACE = 3.5  # tensors like q that cuDNN's backward takes for itself
LIBRARIES = 64 * 2**20  # that cuBLAS takes
PER_TOKEN = 24  # bytes of token ids, labels, positions
LEFT_OVER = 2.4  # times the head in bf16, that streams have freed and keep; more where a block is run alone
LEFT_OVER_ALONE = 3.7


@dataclass(frozen=True)
class Memory:
    """Of one rank. `parts` are bytes of its GPU by owner at the peak."""

    parts: dict[str, int]
    moment: str
    host: int  # bytes of its node's memory
    disk: int
    tapes: list[TapeSpec]
    tiles: Tiles

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def predict_memory(
    spec: Spec, plan: Plan, tokens: int, ulysses: int = 1, ring: int = 1, shard: int = 1, present: int | None = None
) -> Memory:
    """Of the fullest of shard × ring × ulysses ranks, for one sequence of each `shard`.

    `present`: layers that are run, where others are only held, as in a rehearsal; all of them when not given.
    """
    job = Job(spec, plan.settled(), tokens, ulysses, ring, shard, spec.layers if present is None else present)
    always = job.always()
    moments = {name: always + moment for name, moment in job.moments()}
    name = max(moments, key=lambda name: moments[name].total())
    parts = Counter({owner: round(size) for owner, size in moments[name].items() if size})
    parts[ALLOCATOR] = round(job.left_over)
    host = host_bytes(job.tapes, job.tiles, gpu=True) + job.host_states
    return Memory(dict(parts), name, host, disk_bytes(job.tapes, job.tiles), job.tapes, job.tiles)


class Job:
    """The sizes of one rank."""

    def __init__(self, spec: Spec, plan: Plan, tokens: int, ulysses: int, ring: int, shard: int, present: int):
        self.spec, self.plan, self.present = spec, plan, present
        self.ulysses, self.ring, self.ranks = ulysses, ring, shard * ring * ulysses
        layout = layout_of(plan, tokens, ulysses, ring, shorten=True)
        self.tiles = tiles_of(plan, layout)
        split = split_heads(spec.heads, spec.kv_heads, ulysses)
        self.rounds = head_rounds(split, plan.heads_at_once(ulysses))
        fullest = max(range(ulysses), key=lambda rank: (len(split.kv[rank]), len(split.q[rank])))
        self.mine = Heads(split.q[fullest], split.kv[fullest])
        self.fullest = fullest
        self.tapes = tape_specs(plan, spec, BF16, self.mine, ulysses, ring)
        # Of the tokens that go through a block together
        self.chunks = self.tiles.count if plan.sweeps else 1
        self.T = min(self.tiles.size, self.tiles.length) if plan.sweeps else layout.local
        self.tile = min(plan.tile or self.T, self.T)
        self.block = _numbers(spec, self.ranks, block=True)
        self.table = _numbers(spec, self.ranks, block=False)

    # Sizes in bytes of bf16, for some tokens of the rank
    def hidden(self, tokens: int) -> int:
        return tokens * self.spec.hidden * BF16

    def queries(self, tokens: int) -> int:
        return tokens * self.spec.heads * self.spec.head_size * BF16

    def keys(self, tokens: int) -> int:
        return tokens * self.spec.kv_heads * self.spec.head_size * BF16

    def my_queries(self, split: HeadSplit | None = None) -> int:
        """One query-like tensor of this rank's heads and its Ulysses ranks' tokens."""
        heads = len(self.mine.q) if split is None else len(split.q[self.fullest])
        return self.T * self.ulysses * heads * self.spec.head_size * BF16

    def my_keys(self) -> int:
        return self.T * self.ulysses * len(self.mine.kv) * self.spec.head_size * BF16

    def my_lse(self) -> int:
        return self.T * self.ulysses * len(self.mine.q) * FP32

    def always(self) -> Counter[str]:
        """Weights, moments, tapes, the batch, and what is held for layers that are not run."""
        weights = self.spec.layers * self.block.mine + self.table.mine
        spec, plan, length = self.spec, self.plan, self.tiles.length
        keys, others = ([need for need in self.tapes if (need.option == "kv") == wanted] for wanted in (True, False))
        return Counter(
            {
                STATES: FP32 * weights * (3 if plan.optimizer == "device" else 1),
                KEYS: device_bytes(keys, self.tiles),
                TAPES: device_bytes(others, self.tiles) + self._moment_slots(),
                BLOCKS: self._kept(range(self.present, spec.layers)),
                GRADIENTS: FP32 * (spec.layers - self.present) * self.block.mine,
                GATHERED: passing_bytes(plan, spec, self.tapes)
                + (BF16 * (spec.layers * self.block.all + self.table.all) if plan.zero < 3 else 0),
                BATCH: PER_TOKEN * length,
                KERNELS: LIBRARIES,
            }
        )

    @property
    def host_states(self) -> int:
        moments = 2 * FP32 * (self.spec.layers * self.block.mine + self.table.mine)
        return moments if self.plan.optimizer == "host" else 0

    def _moment_slots(self) -> int:
        return moment_slot_bytes(max(self.block.largest, self.table.largest)) if self.plan.optimizer == "host" else 0

    @property
    def left_over(self) -> float:
        return BF16 * self.table.unit * (LEFT_OVER if self.present > 1 else LEFT_OVER_ALONE)

    def _kept(self, layers: range) -> int:
        """Block inputs that `whole` keeps on the device, and o beside them with checkpoint selective."""
        if self.plan.sweeps or not layers:
            return 0
        if self.plan.checkpoint == "none":
            return len(layers) * self._everything()
        words = self.plan.placement(self.spec.layers).x[layers.start : layers.stop]
        size = words.count("device") * self.hidden(self.T)
        if self.plan.checkpoint == "selective":
            size += len(layers) * (self.queries(self.T) + self.my_lse())
        return size

    def _everything(self) -> int:
        """What autograd keeps of a block: x, both norms' and mix's outputs, q, k, v, o; gate, up and their product."""
        T, M = self.T, self.spec.mlp
        return 4 * self.hidden(T) + 3 * self.queries(T) + 2 * self.keys(T) + 3 * T * M * BF16

    def moments(self) -> Iterator[tuple[str, Counter[str]]]:
        head, block = self.table, self.block
        tied = self.spec.tied
        # While the last block goes backward the head's gradient is being reduced; while the first, a block's
        after_head = Counter(
            {
                GRADIENTS: 0 if tied else FP32 * (head.unit + head.unit_mine),
                LOSS: FP32 * head.all if tied else 0,
                BLOCKS: self._kept(range(self.present)),
            }
        )
        after_blocks = Counter(
            {
                GRADIENTS: FP32 * (block.all + (self.present - 1) * block.mine + (0 if tied else head.unit_mine)),
                LOSS: FP32 * head.all if tied else 0,
                BLOCKS: self._kept(range(1)),
            }
        )
        inside = self._sweep() if self.plan.sweeps else self._whole()
        whole_gradients = FP32 * (self.present * block.all) if self.plan.zero == 1 else 0
        for name, moment in inside.items():
            moment = moment + self._block_weights() + Counter({GRADIENTS: whole_gradients})
            yield f"{name} of the last block", moment + after_head
            if self.present > 1:
                yield f"{name} of the first block", moment + after_blocks
        logits = min(self.plan.loss_tile, self.T) * self.spec.vocab * BF16
        states = 0 if self.plan.sweeps else 2 * self.hidden(self.T)  # what the last block puts out, and its gradient
        at_head = {GATHERED: BF16 * head.unit, BLOCKS: self._kept(range(self.present)) + states}
        yield "the loss", Counter({**at_head, LOSS: FP32 * head.unit + logits + 3 * self.hidden(self.plan.loss_tile)})
        if not tied:
            yield "the head's gradient", Counter({**at_head, LOSS: FP32 * head.unit, GRADIENTS: FP32 * head.unit})
        # At the end that of the embedding; of a tied model its sum with the head's, while the first block's is still
        # being reduced
        shards = FP32 * (self.present * block.mine + (0 if tied else head.unit_mine))
        table = FP32 * self.spec.vocab * self.spec.hidden
        at_end = {GRADIENTS: shards + (FP32 * block.all if tied else table), BLOCKS: table}
        if tied:
            at_end |= {LOSS: table, OTHER: table, GATHERED: BF16 * head.unit}
        yield "the embedding's gradient", Counter(at_end)

    def _block_weights(self) -> Counter[str]:
        """A block's gathered, the next one's on their way, the sums of its gradients; of a tied model the table."""
        parts = 0 if self.plan.zero < 3 else self.block.all * (2 if self.ranks > 1 and self.present > 1 else 1)
        table = self.table.unit if self.spec.tied and self.plan.zero == 3 else 0
        return Counter({GATHERED: BF16 * (parts + table), BLOCKS: FP32 * self.block.all})

    def _mlp(self) -> int:
        return 5 * self.tile * self.spec.mlp * BF16 + 3 * self.hidden(self.tile)

    def _projection(self) -> int:
        """What a projection leaves for its backward pass: the normed x; with norms of q and k, these as well."""
        norms = self.queries(self.T) + self.keys(self.T) if self.spec.qk_norm else 0
        return self.hidden(self.T) + norms

    def _sweep(self) -> dict[str, Counter[str]]:
        q, k, T = self.my_queries(), self.my_keys(), self.T
        hops = (self.ulysses > 1) + (self.ring > 1)
        under_way = min(2 * hops, self.chunks - 1)  # chunks beside this one
        recomputes = "recompute" in self.plan.placement(self.spec.layers).o
        exchange = 0
        if self.ulysses > 1 and under_way:
            exchange += 3 * self.queries(T) + 3 * q  # one has sent q, o, do
        if self.ulysses > 1 and under_way > 1:
            back = q + 2 * k  # and one dq, dk, dv
            exchange += 2 * back
        every = self.ring * q
        gathering = 3 * every if self.ring > 1 else 0
        if self.ring > 1 and under_way:
            exchange += 3 * q + gathering + 2 * every  # gathered by one; dq of another being reduced
        again = 0
        if recomputes:
            again = 2 * q + self.queries(T)
        mlp = Counter(
            {
                BLOCKS: self._mlp() + self.queries(T) + under_way * self._projection(),
                EXCHANGE: exchange,
                ATTENTION: again,
            }
        )
        visits = min(self.chunks, 3)
        kernel = every * (1 + WORKSPACE) + 2 * k
        walk = kernel + {1: 0, 2: every + 2 * k, 3: 3 * every + 2 * k}[visits]
        wait = 3 * q if self.ulysses > 1 else self.queries(T) * 2
        attention = Counter(
            {
                BLOCKS: (1 + under_way) * self._projection(),
                EXCHANGE: exchange + (2 * gathering if self.ring > 1 else wait),
                ATTENTION: walk,
            }
        )
        return {"the MLP": mlp, "attention": attention}

    def _whole(self) -> dict[str, Counter[str]]:
        T, q, k = self.T, self.my_queries(), self.my_keys()
        x, tokens_q = self.hidden(T), self.queries(T)
        keeps_o = self.plan.checkpoint == "selective"
        around = self._around()
        if self.plan.checkpoint == "none":
            held = 2 * x
            mlp = Counter({BLOCKS: held + 3 * T * self.spec.mlp * BF16})
            return {"the MLP": mlp, "attention": Counter({BLOCKS: held, ATTENTION: q * (2 + WORKSPACE) + 2 * k})}
        fetched = {*self.plan.placement(self.spec.layers).x} - {"device"}
        states = (x if fetched else 0) + 2 * x  # x, dy, dx
        if len(self.rounds) > 1 or len(self.rounds[0]) > 1:  # untied
            split = self.rounds[0][0]
            some, sent = self.my_queries(split), T * len(split.q_heads) * self.spec.head_size * BF16
            kv = T * self.ulysses * max(map(len, split.kv)) * self.spec.head_size * BF16
            both = 2 * tokens_q + self.my_lse()  # o and do of all heads
            mlp = Counter({BLOCKS: states + both + self._mlp()})
            attention = Counter(
                {
                    BLOCKS: states + both + self._projection(),
                    EXCHANGE: 2 * sent + 3 * some + 2 * kv,
                    ATTENTION: some * (1 + WORKSPACE) + 2 * kv + 2 * kv * FP32 // BF16,
                }
            )
            return {"the MLP": mlp, "attention": attention}
        held = 0 if keeps_o else self._projection() + 2 * q + 2 * k + self.my_lse()  # q, k, v, o of this rank's heads
        mlp = Counter({BLOCKS: states + held + (1 if keeps_o else 2) * tokens_q + self._mlp()})
        attention = Counter(
            {
                BLOCKS: states + self._projection() + self.my_lse(),
                EXCHANGE: 3 * q + 2 * k + around,
                ATTENTION: q * (1 + WORKSPACE) + 2 * k + (2 * q if self.ring > 1 else 0),
            }
        )
        return {"the MLP": mlp, "attention": attention}

    def _around(self) -> int:
        """K and V of other ring ranks, and the sums of their gradients."""
        if self.ring == 1:
            return 0
        block = 2 * self.my_keys()
        if self.plan.travel == "gather":
            return self.ring * block * 3
        return 2 * block + 2 * block * FP32 // BF16


@dataclass(frozen=True)
class _Numbers:
    """Parameters: all, this rank's part of them, and of the largest; `unit`: those of the head, gathered and reduced
    together."""

    all: int
    mine: int
    largest: int
    unit: int
    unit_mine: int


@lru_cache(maxsize=256)  # a search asks for the same ones again and again
def _numbers(spec: Spec, ranks: int, block: bool) -> _Numbers:
    """Of one block, or of all that is in none: embedding, final norm, head."""
    shapes = spec.block_shapes() if block else {name: shape for name, shape in spec.shapes() if ".layers." not in name}
    unit = {name: shape for name, shape in shapes.items() if block or spec.tied or "embed" not in name}
    return _Numbers(
        all=sum(map(math.prod, shapes.values())),
        mine=sum(_part(shape, ranks) for shape in shapes.values()),
        largest=max(_part(shape, ranks) for shape in shapes.values()),
        unit=sum(map(math.prod, unit.values())),
        unit_mine=sum(_part(shape, ranks) for shape in unit.values()),
    )


def _part(shape: tuple[int, ...], ranks: int) -> int:
    return len(row_range(shape[0], 0, ranks)) * math.prod(shape[1:])
