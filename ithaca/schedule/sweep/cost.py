"""The costs of the sweep: tapes and slots, tensors at its peaks, messages, FLOPs. Copies: copies.py. No torch.

With T local tokens of a chunk, N chunks, Q and K features of all query and key/value heads:

    tapes       x, o, log-sum-exp per layer; residual, K, V and the fp32 sums of their gradients for all layers. With
                head rounds K, V and their sums of the largest round, and one o that waits between rounds
    MLP         5 τM + 3 τE for a tile of τ tokens, beside what neighbouring chunks have under way
    attention   q, o, do, K, V of this rank's heads, dq, dK, dV and the kernel's workspace; dq also in fp32
    exchange    (q, o, do) sent and received by one neighbour, (dq, dK, dV) by another. Where o is recomputed, four
                neighbours wait: q, o, do and (dq, dK, dV) are on their way, beside q and o of the second and the third

Messages over C Ulysses ranks with n local tokens, b bytes a number, q = n · Q · b · (C − 1) / C and
kv = 2 · n · max(Hkv, C) · D · b · (C − 1) / C:

| | forward | backward |
|---|---|---|
| o kept, N > 1 chunks | 2 N: (q, kv) there, o back | 3 N − 2: (q, o, do) there, (dq, dkv) back, kv before |
| o recomputed | the same | 5 N − 2: q there, o back and do there by themselves |

In bytes: 2 q + kv forward, 4 q + 2 kv backward.

One chunk alone sends 2 and 2, or 4 where o is recomputed. The last layer still has K and V: it sends one kv less. If
documents keep later chunks from asking for a chunk's K and V, these travel with the chunk's own queries: fewer
messages, the same bytes. Each head round sends as many messages as the table says, and all rounds together its bytes;
the last layer still has K and V of the last round. R ring ranks add, with L = C · n tokens, h query heads of a rank and
f bytes a sum, 3 N messages each way: (R − 1) · L · h (2 D b + f) forward (q, o, lse) and (R − 1) · L · h (4 D b + f)
backward (do q o, lse, dq)."""

from collections import Counter
from typing import TYPE_CHECKING

from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE, GATHERED
from ithaca.base.tiles import Tiles
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.layout import Layout
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE
from ithaca.plans.plan import CHUNK, Plan
from ithaca.schedule.costs import (
    PER_TILE,
    TO_EACH,
    TO_HEADS,
    TO_TOKENS,
    Message,
    StepCopies,
    Work,
    attention_flops,
    block_products,
    call_length,
    last_product,
    linear_flops,
    local_tokens,
    mlp_tiles,
    moved_bytes,
    other_launches,
)
from ithaca.schedule.sweep.chunks import chunks_asked_early, chunks_under_way, head_passes, is_long, visits_of
from ithaca.schedule.sweep.copies import copies, kv_copies
from ithaca.schedule.sweep.rebuild import looks_up_in_passing, passing_layers, rebuild_passes, rebuilds_of
from ithaca.tape.spec import TapeSpec

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

# Tiles on the device of a tape that lives elsewhere: one in use, one ahead, one on its way out. x is read twice (by its
# chunk and for K and V of later ones) and, going forward, written for the next layer too
X_SLOTS, RESIDUAL_SLOTS = 4, 4
O_SLOTS, O_SLOTS_PASSING = 2, 4  # an x that is rebuilt chunk by chunk is read through the o of several layers
LSE_SLOTS = 2
KV_SLOTS, KV_GRADIENT_SLOTS = 8, 6

PYTHON, PYTHON_OF_COPIES = 177, 47  # the host, for a chunk in a layer (costs.py); more if tapes are copied
PER_CHUNK, PER_VISIT = 52, 27  # operations of a chunk beside its tiles', and of a visit to another (costs.py)
ATTENDING_AGAIN = 6  # a visit that is recomputed: assumed
# Tensors that another head round reads and writes, counted in the code: normed x forward, for K and V, and backward
# with its gradient, which is added to the residual; o and do with all heads, put on their tape and taken from it
ROUND_HIDDEN, ROUND_QUERIES = 14, 2
REBUILDING = 12  # a tile of an x that is rebuilt: the forward third of a tile


def settles(job: "Job") -> bool:
    """Whether nothing of the head is being reduced any more while the last block goes backward."""
    return is_long(job.chunks)


def layout(plan: Plan, axes: Axes, tokens: int, shorten: bool) -> Layout:
    """Interleaved chunks. `shorten`: a chunk longer than the sequence is shortened, not refused."""
    return Layout(tokens, plan.chunk_of(tokens, shorten), axes.ulysses, axes.ring)


def tiles(plan: Plan, layout: Layout) -> Tiles:  # noqa: ARG001
    """One tile of every tape for each chunk."""
    return layout.tiles


def tapes(job: "Job") -> list[TapeSpec]:
    """Every tape. The residual tape also holds the last block's output and, going forward, each x that is not saved."""
    plan, spec, placement = job.plan, job.spec, job.plan.placement(job.spec.layers)
    assert plan.lse is not None
    assert plan.residual is not None
    assert plan.kv is not None
    hidden, all_heads = (spec.hidden,), (spec.heads, spec.head_size)
    rounds = head_passes(job)
    own_keys, own_lse = (len(rounds[0].kv[job.head_rank]), spec.head_size), (len(job.heads.q),)
    ulysses, more = job.axes.ulysses, chunks_under_way(job.axes.ulysses, job.axes.ring)
    x_slots = X_SLOTS + chunks_under_way(job.axes.ulysses, job.axes.ring, RECOMPUTE in placement.o)
    rebuilds = rebuilds_of(plan, spec)
    passing = any(layer not in rebuild.targets for layer, rebuild in rebuilds.items())

    def saved(name: str, words: tuple[str, ...], features: tuple[int, ...], slots: int) -> list[TapeSpec]:
        layers = {place: tuple(layer for layer, word in enumerate(words) if word == place) for place in KEPT}
        return [
            TapeSpec(name, name, place, layers[place], features, job.itemsize, False, slots, True)
            for place in KEPT
            if layers[place]
        ]

    xs = saved("x", placement.x, hidden, x_slots)
    rebuilt_off_device = any(
        kind == "o" and placement.o[layer] != "device"
        for rebuild in rebuilds.values()
        for kind, layer in rebuild.targets.values()
    )
    if rebuilt_off_device and not {"host", "disk"} & {*placement.x}:
        # No x is saved off the device, but rebuilt ones pass through slots
        xs.append(TapeSpec("x", "x", "host", (), hidden, job.itemsize, False, x_slots, True))
    with_o = tuple(layer for layer, word in enumerate(placement.o) if word != RECOMPUTE)
    lses = [TapeSpec("lse", "lse", plan.lse, with_o, own_lse, job.high, True, LSE_SLOTS + more, True, ulysses)]
    # o, or its gradient, between rounds: read and written as often as the residual, and in its place
    waiting = TapeSpec(
        "between_rounds", "residual", plan.residual, (0,), all_heads, job.itemsize, False, O_SLOTS + more, False
    )
    return [
        *xs,
        *saved("o", placement.o, all_heads, (O_SLOTS_PASSING if passing else O_SLOTS) + more),
        *(lses if with_o else []),
        TapeSpec(
            "residual", "residual", plan.residual, (0,), hidden, job.itemsize, False, RESIDUAL_SLOTS + more, False
        ),
        *([waiting] if len(rounds) > 1 else []),
        TapeSpec("kv", "kv", plan.kv, (0, 1), own_keys, job.itemsize, False, KV_SLOTS, False, ulysses),
        TapeSpec("kv_gradients", "kv", plan.kv, (0, 1), own_keys, job.high, True, KV_GRADIENT_SLOTS, True, ulysses),
    ]


def passing_bytes(job: "Job") -> int:
    """Weights of other layers, and of the embedding, that are gathered at once while an x is rebuilt in passing."""
    rebuilds = rebuilds_of(job.plan, job.spec)
    blocks = passing_layers(rebuilds) * job.block_parameters * job.itemsize
    return blocks + (_table_bytes(job) if looks_up_in_passing(rebuilds) else 0)


def _table_bytes(job: "Job") -> int:
    """The embedding's table, gathered for a look-up alone. A tied one, and those of ZeRO-1 and 2, are there anyway."""
    here = job.spec.tied or job.plan.zero < 3
    return 0 if here else job.spec.vocab * job.spec.hidden * job.itemsize


def kept(job: "Job", layers: range) -> int:  # noqa: ARG001
    """Nothing: what a block leaves for its backward pass is on tapes."""
    return 0


def peaks(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the two peaks of a chunk's backward pass, with what its neighbours hold; and while x is looked up."""
    placement = job.plan.placement(job.spec.layers)
    each = [_peaks(job, recomputed) for recomputed in {word == RECOMPUTE for word in placement.o}]
    found = {name: max((peaks[name] for peaks in each), key=Counter.total) for name in each[0]}
    if placement.x[0] == REBUILD and not looks_up_in_passing(rebuilds_of(job.plan, job.spec)):
        # Before the sums of the block's gradients are there
        blocks = job.hidden(job.block_tokens) - job.high * job.block_parameters
        found["the look-up of x"] = Counter({GATHERED: _table_bytes(job), BLOCKS: blocks})
    return found


def _peaks(job: "Job", recomputed: bool) -> dict[str, Counter[str]]:
    """`peaks` of the layers that save o, or of the layers that recompute it."""
    largest, T = head_passes(job)[0], job.block_tokens
    q, k, projection = job.own_queries(largest), job.own_keys(largest), job.projection_bytes(largest)
    ulysses, ring = job.axes.ulysses, job.axes.ring
    under_way = min(chunks_under_way(ulysses, ring, recomputed), job.chunks - 1)
    waiting = sum(sorted(_waiting(job, largest, recomputed), reverse=True)[:under_way])
    ring_q = ring * q  # queries of a chunk, gathered over the ring
    mlp = Counter(
        {
            BLOCKS: job.mlp_bytes() + job.queries(T) + under_way * projection,
            EXCHANGE: waiting,
            ATTENTION: 2 * q + job.queries(T) if recomputed else 0,
        }
    )
    workspace = max(job.workspace(ring_q, k, causal) for causal in ((True, False) if job.chunks > 1 else (True,)))
    kernel = ring_q + workspace + 2 * k
    # In a walk: dq in fp32 from the second visit on, and that of the visit before
    walk = kernel + {1: 0, 2: ring_q + 2 * k, 3: 3 * ring_q + 2 * k}[min(job.chunks, 3)]
    arrived = 3 * q if ulysses > 1 or recomputed else q + job.queries(T)  # alone: q, and do of all heads
    attention = Counter(
        {
            BLOCKS: (1 + under_way) * projection,
            EXCHANGE: waiting + (2 * 3 * ring_q if ring > 1 else arrived),
            ATTENTION: walk,
        }
    )
    return {"the MLP": mlp, "attention": attention}


def _waiting(job: "Job", split: HeadSplit, recomputed: bool) -> list[int]:
    """Bytes that a chunk holds at each exchange that it waits for, beside its projection: sent, received, and kept."""
    q, k = job.own_queries(split), job.own_keys(split)
    tokens_q = job.block_tokens * len(split.q_heads) * job.spec.head_size * job.itemsize  # of all ranks' heads
    ring_q, over_ulysses, over_ring = job.axes.ring * q, job.axes.ulysses > 1, job.axes.ring > 1
    found = []
    if over_ulysses:
        found += [2 * (q + 2 * k)]  # dq, dk, dv
    if over_ring:
        found += [3 * q + 3 * ring_q, 2 * ring_q]  # q, o, do gathered; dq reduced
    if over_ulysses and not recomputed:
        found += [3 * tokens_q + 3 * q]  # q, o, do
    if over_ulysses and recomputed:
        # q; o, which is sent as it is or, with a ring, in another order, beside q; do, beside both
        found += [tokens_q + q, tokens_q + (3 if over_ring else 2) * q, tokens_q + 3 * q]
    if over_ring and recomputed:
        found += [q + ring_q, q + 2 * ring_q]  # q gathered; o merged, beside q
    return found


def reading(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the two peaks of a chunk in a pass without gradients, with what its neighbours hold."""
    split, T = head_passes(job)[0], job.block_tokens
    q, k, ring = job.own_queries(split), job.own_keys(split), job.axes.ring
    sent = T * (len(split.q_heads) + 2 * len(split.kv_heads)) * job.spec.head_size * job.itemsize
    ring_q, neighbours = ring * q, min(chunks_under_way(job.axes.ulysses, ring), job.chunks - 1)
    # q, K, V as they are sent and received; over a ring the queries of all its ranks, and their o and log-sum-exp
    waiting = sent + q + 2 * k + (2 * ring_q if ring > 1 else 0)
    summed = ring_q * job.high // job.itemsize  # o, while it is merged
    attention = Counter(
        {
            BLOCKS: job.projection_bytes(split) + job.hidden(T),
            EXCHANGE: (1 + neighbours) * waiting,
            ATTENTION: summed + 2 * ring_q + 2 * ring * job.own_lse(),
        }
    )
    mlp = Counter({BLOCKS: job.mlp_forward_bytes(), EXCHANGE: neighbours * waiting + job.queries(T)})
    return {"the MLP": mlp, "attention": attention}


def messages(job: "Job", layer: int) -> tuple[list[Message], list[Message]]:
    """The messages of a block, forward and backward."""
    rounds, last_layer = head_passes(job), layer == job.spec.layers - 1
    recomputed = job.plan.placement(job.spec.layers).o[layer] == RECOMPUTE
    forward: list[Message] = []
    backward: list[Message] = []
    for number, split in enumerate(rounds):
        has_keys = last_layer and number == len(rounds) - 1
        there, back = _round_messages(job, split, recomputed, has_keys)
        forward += there
        backward += back
    return forward, backward


def _round_messages(
    job: "Job", split: HeadSplit, recomputed: bool, has_keys: bool
) -> tuple[list[Message], list[Message]]:
    N, forward, backward = job.chunks, [], []
    if job.axes.ulysses > 1:
        output = Message(TO_TOKENS, split, queries=1, count=N)
        forward += [Message(TO_HEADS, split, queries=1, keys=2, count=N), output]
        if recomputed:
            backward += [Message(TO_HEADS, split, queries=1, count=N), output]
            backward += [Message(TO_HEADS, split, queries=1, count=N)]  # do
        else:
            backward += [Message(TO_HEADS, split, queries=3, count=N)]  # q, o, do
        backward += [Message(TO_TOKENS, split, queries=1, keys=2, count=N)]
        if not has_keys:
            backward += [Message(TO_HEADS, split, keys=2, count=chunks_asked_early(job))]
    if job.axes.ring > 1:
        attended = [
            Message(TO_EACH, split, queries=1, count=N),  # q
            Message(TO_EACH, split, queries=1, count=N),  # o
            Message(TO_EACH, split, lses=1, count=N),
        ]
        forward += attended
        backward += [
            Message(TO_EACH, split, queries=3, count=N),  # do, q, o
            Message(TO_EACH, split, lses=1, count=N),
            Message(TO_EACH, split, queries=1, count=N),  # dq
            *(attended if recomputed else []),
        ]
    return forward, backward


def work(job: "Job") -> Work:
    """FLOPs, bytes and GPU operations of a step."""
    spec, placement, rounds = job.spec, job.plan.placement(job.spec.layers), len(job.rounds)
    kv = spec.kv_heads * spec.head_size
    project, rest = block_products(job)
    again = project + rest - last_product(job)
    again += 2 * spec.hidden * kv  # K and V, for later chunks
    again += rebuild_passes(placement, spec, rounds) * rest / spec.layers
    attention = attention_flops(job)
    uneven = max(map(len, job.split.q)) * job.axes.ulysses / spec.heads
    # At each visit but the first a sum in fp32 is read and written, and a part in bf16 read
    visits = visits_of(job).rows / job.tokens
    copied = copies(job, ("host", "disk"))
    per_token = spec.layers * visits * job.axes.ring * spec.heads * spec.head_size * (2 * job.high + job.itemsize)
    return Work(
        attention=attention,
        attention_runs=1 + placement.o.count(RECOMPUTE) / spec.layers,
        call=call_length(job, max(job.layout.chunks.size, CHUNK)),  # small rectangles are no slower
        merged=per_token * local_tokens(job) * uneven,
        linear=linear_flops(job, again),
        moved=moved_bytes(job, runs=2) + _moved_by_rounds(job),
        launches=_launches(job) + other_launches(job),
        python=spec.layers * rounds * job.chunks * (PYTHON + (PYTHON_OF_COPIES if copied.most else 0)),
        host=copied,
        disk=copies(job, ("disk",)),
        kv=StepCopies() if job.plan.kv == "device" else kv_copies(job),
    )


def _moved_by_rounds(job: "Job") -> float:
    """Device bytes that head rounds move beside those of a single one."""
    spec, rounds = job.spec, len(job.rounds)
    if rounds == 1:
        return 0.0
    numbers = (rounds - 1) * ROUND_HIDDEN * spec.hidden + rounds * ROUND_QUERIES * spec.heads * spec.head_size
    return spec.layers * local_tokens(job) * job.itemsize * numbers


def _launches(job: "Job") -> float:
    """GPU operations of all blocks, forward and backward."""
    placement, tiles, rounds = job.plan.placement(job.spec.layers), mlp_tiles(job) * job.chunks, len(job.rounds)
    visits, recomputed = visits_of(job).count, placement.o.count(RECOMPUTE)
    layer = rounds * (PER_CHUNK * job.chunks + PER_VISIT * visits) + PER_TILE * tiles
    again = ATTENDING_AGAIN * (job.chunks + visits) * recomputed
    return job.spec.layers * layer + again + REBUILDING * tiles * rebuild_passes(placement, job.spec, rounds)


def exposed(job: "Job", computing: float, ulysses: float, ring: float) -> float:
    """Seconds of computing with the exchange beside it: all of it is hidden but the part of one chunk."""
    exchange = ulysses + ring
    return max(computing, exchange) + min(computing, exchange) / job.chunks
