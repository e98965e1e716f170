"""The costs of blocks that run over all local tokens: kept tensors, tensors at peaks, messages, FLOPs. No torch.

Between blocks, per local token in units of a hidden state d: `none` about 17 d; `selective` x and o, 2 d and the
log-sum-exp; `full` x, 1 d, on the device or elsewhere. Within a block everything is of all local tokens T:

    MLP         5 τM + 3 τE for a tile of τ tokens, beside x, dy, dx, do and what attention holds. A single tile takes
                5 TM + 2 TE, and has no dx and do yet. Under `none` gate, up and their product are kept already
    attention   q, o, do, K, V of this rank's heads, dq, dK, dV and the kernel's workspace
    exchange    q, o, do, K, V twice, sent and received, beside q, do, K, V themselves (`selective`)
    ring        K and V of two ring ranks and the fp32 sums of three; of all of them if they are gathered

Messages over C Ulysses ranks with n local tokens, b bytes a number, q = n · Hq · D · b · (C − 1) / C and
kv = 2 · n · max(Hkv, C) · D · b · (C − 1) / C. Forward sends 2 q + kv:

| checkpoint, recipe | forward | backward |
|---|---|---|
| none | 2: (q, kv) there, o back | 2: do there, (dq, dkv) back; 2 q + kv |
| selective | the same | 2: (q, kv, o, do) there, (dq, dkv) back; 4 q + 2 kv |
| full | the same | 4: those of forward again, do there, (dq, dkv) back; 4 q + 2 kv |
| `untied`, r rounds, g groups | 2 r + g | 4 r + 3 g: forward again; (q, o, do) there, dq back; kv, dkv once a group |

`untied` sends 6 q + 3 kv backward. A group is the rounds that read the same K and V. If each has one round, kv goes
with q: 2 r and 4 r messages. R ring ranks add, with L = C · n tokens, k key/value heads of a rank and f bytes a sum:

| travel | forward | backward |
|---|---|---|
| around | R − 1 messages, (R − 1) · L · 2 k D b | those again (twice with `full`), and R of L · 2 k D f each |
| gather | 1, the same bytes | 1 again (2 with `full`), and 1 of (R − 1) · L · 2 k D f |

With head rounds that is what each round sends, k being the key/value heads of the round: K and V that several rounds
read are exchanged once over the Ulysses ranks, and go around the ring in every round, behind its attention.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE
from ithaca.base.tiles import Tiles
from ithaca.parallel.axes import Axes
from ithaca.parallel.head_split import HeadSplit
from ithaca.parallel.layout import Layout
from ithaca.plans.places import KEPT
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import (
    PER_TILE,
    TO_EACH,
    TO_HEADS,
    TO_NEXT,
    TO_TOKENS,
    Copies,
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
from ithaca.tape.spec import TapeSpec

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

X_SLOTS = 3  # tiles of an x on the device: one in use, one ahead, one on its way out
X_TILE = 8192  # tokens copied at a time if the Plan has no tile
KEEPING_ALL, CHECKPOINTED = 52, 42  # operations of a layer beside FSDP2's and its tiles' (costs.py)
PYTHON = {"none": 83, "selective": 133, "full": 158}  # the host, for a layer, likewise
AGAIN = 1  # attention forward again, under `full`, in place of reading what is kept
PER_ROUND = 30  # a head round: packing, attention and both again backward; assumed


def layout(plan: Plan, axes: Axes, tokens: int, shorten: bool) -> Layout:  # noqa: ARG001
    """One chunk: each rank has one piece of the sequence, or two in a ring."""
    return Layout(tokens, tokens, axes.ulysses, axes.ring)


def tiles(plan: Plan, layout: Layout) -> Tiles:
    return Tiles(layout.local, min(plan.tile or X_TILE, layout.local))


def tapes(job: "Job") -> list[TapeSpec]:
    """Block inputs that are saved off the device."""
    words = job.plan.placement(job.spec.layers).x
    layers = {place: tuple(layer for layer, word in enumerate(words) if word == place) for place in KEPT}
    return [
        TapeSpec("x", "x", place, layers[place], (job.spec.hidden,), job.itemsize, False, X_SLOTS, True)
        for place in KEPT
        if layers[place] and place != "device"
    ]


def passing_bytes(job: "Job") -> int:  # noqa: ARG001
    """No x is rebuilt."""
    return 0


def settles(job: "Job") -> bool:  # noqa: ARG001
    """The head's gradient is reduced while the last block goes backward."""
    return False


def kept(job: "Job", layers: range) -> int:
    """Device bytes that these blocks leave for their backward pass."""
    if job.plan.checkpoint == "none":
        return len(layers) * _everything(job)
    words = job.plan.placement(job.spec.layers).x[layers.start : layers.stop]
    size = words.count("device") * job.hidden(job.block_tokens)
    if job.plan.checkpoint == "selective":
        size += len(layers) * (job.queries(job.block_tokens) + job.own_lse())
    return size


def _everything(job: "Job") -> int:
    """Bytes that autograd keeps: x, norms, the sum with the output projection; q, k, v, o, lse; gate, up, product."""
    T = job.block_tokens
    size = 3 * job.hidden(T) + job.projection_bytes() + 3 * T * job.spec.mlp * job.itemsize
    size += 2 * job.own_queries() + 2 * job.own_keys() + job.own_lse()
    # Ulysses: o as its rank attended, and as the output projection of all heads reads it
    return size + (job.queries(T) if job.axes.ulysses > 1 else 0)


def one_round(job: "Job") -> bool:
    """Whether attention runs with all heads at once."""
    return len(job.rounds) == len(job.rounds[0]) == 1


def peaks(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the peaks of a block's backward pass."""
    T, q, k = job.block_tokens, job.own_queries(), job.own_keys()
    x, tokens_q = job.hidden(T), job.queries(T)
    if job.plan.checkpoint == "none":
        wide = T * job.spec.mlp * job.itemsize
        # dy; gradients of gate, up and their product, which is freed
        mlp = Counter({BLOCKS: x + 2 * wide})
        # The MLP's kept tensors, 3 wide ones, are freed by now
        attending = 2 * q + job.workspace(q, k) + 2 * k + ring_bytes(job)
        attention = Counter({ATTENTION: max(attending - 3 * wide, 0)})
        return {"the MLP": mlp, "attention": attention}
    fetched = {*job.plan.placement(job.spec.layers).x} - {"device"}
    states = (x if fetched else 0) + 2 * x  # x, dy, dx
    if not one_round(job):
        return _peaks_in_rounds(job, states)
    keeps_o = job.plan.checkpoint == "selective"
    # q, k, v, o of this rank's heads; o of its tokens
    held = 0 if keeps_o else job.projection_bytes() + 2 * q + 2 * k + job.own_lse()
    held += tokens_q if job.axes.ulysses > 1 and not keeps_o else 0
    tiled = tokens_q + job.mlp_bytes()  # do, which the tiles write, as dx
    whole = job.mlp_bytes() - 2 * x
    mlp = Counter({BLOCKS: states + held + (tiled if job.tile < T else whole)})
    attention = Counter(
        {
            BLOCKS: states + job.projection_bytes() + job.own_lse(),
            EXCHANGE: 3 * q + 2 * k + _travelling_bytes(job, k),
            ATTENTION: q + job.workspace(q, k) + 2 * k + (2 * q if job.axes.ring > 1 else 0),
        }
    )
    found = {"the MLP": mlp, "attention": attention}
    if keeps_o and job.axes.ulysses > 1:
        # q, k, v, o and do as they are sent and as they arrive, beside q, k, v and do of this rank's tokens
        whole_heads = 2 * tokens_q + 2 * job.keys(T)
        sent = Counter({BLOCKS: states + job.projection_bytes() + whole_heads, EXCHANGE: 2 * (3 * q + 2 * k)})
        found["the exchange"] = sent
    return found


def _peaks_in_rounds(job: "Job", states: int) -> dict[str, Counter[str]]:
    """`peaks` with head rounds."""
    T, split = job.block_tokens, job.rounds[0][0]
    own = job.own_queries(split)
    sent = T * len(split.q_heads) * job.spec.head_size * job.itemsize
    kv = T * job.axes.ulysses * max(map(len, split.kv)) * job.spec.head_size * job.itemsize
    both = 2 * job.queries(T) + job.own_lse()  # o and do of all heads
    sums = 2 * kv * job.high // job.itemsize
    mlp = Counter({BLOCKS: states + both + job.mlp_bytes()})
    attention = Counter(
        {
            BLOCKS: states + both + job.projection_bytes(),
            EXCHANGE: 2 * sent + 3 * own + 2 * kv + _travelling_bytes(job, kv),
            ATTENTION: own + job.workspace(own, kv) + 2 * kv + sums + (2 * own if job.axes.ring > 1 else 0),
        }
    )
    return {"the MLP": mlp, "attention": attention}


def reading(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the peaks of a block in a pass without gradients. Its input and its output are tensors."""
    T, q, k, states = job.block_tokens, job.own_queries(), job.own_keys(), 2 * job.hidden(job.block_tokens)
    kv = 2 * job.keys(T)
    # q, K, V of all heads as they are projected and sent, and of this rank's heads as they arrive
    attention = Counter(
        {
            BLOCKS: states + job.projection_bytes() + job.queries(T) + kv,
            EXCHANGE: (q + 2 * k + job.queries(T) if job.axes.ulysses > 1 else 0) + _travelling_bytes(job, k),
            ATTENTION: q + job.own_lse() + (2 * q * job.high // job.itemsize if job.axes.ring > 1 else 0),
        }
    )
    mlp = Counter({BLOCKS: states + job.mlp_forward_bytes(), EXCHANGE: job.queries(T)})
    return {"the MLP": mlp, "attention": attention}


def ring_bytes(job: "Job") -> int:
    """Bytes that a ring adds to attention: the sum of dq in fp32, and the blocks that travel."""
    return 2 * job.own_queries() + _travelling_bytes(job, job.own_keys()) if job.axes.ring > 1 else 0


def _travelling_bytes(job: "Job", k: int) -> int:
    """K and V of other ring ranks, and the sums of their gradients; `k`: bytes of this rank's K."""
    if job.axes.ring == 1:
        return 0
    block = 2 * k
    if job.plan.travel == "gather":
        return job.axes.ring * block * 3
    # Sums that are added to, that are on their way to the next rank, and that come from the one before
    return 2 * block + 3 * block * job.high // job.itemsize


def messages(job: "Job", layer: int) -> tuple[list[Message], list[Message]]:  # noqa: ARG001
    """The messages of a block, forward and backward."""
    forward, backward = _over_ulysses(job) if job.axes.ulysses > 1 else ([], [])
    around = over_ring(job)
    return [*forward, *around[0]], [*backward, *around[1]]


def over_ring(job: "Job") -> tuple[list[Message], list[Message]]:
    """K and V of a block over ring ranks, and the sums of their gradients, forward and backward."""
    forward, backward = list[Message](), list[Message]()
    for split in (split for group in job.rounds for split in group) if job.axes.ring > 1 else ():
        kv, dkv = _travelling(job, split)
        again = [] if job.plan.checkpoint in ("none", "selective") else [kv]
        forward.append(kv)
        backward += [*again, kv, dkv]
    return forward, backward


def _travelling(job: "Job", split: HeadSplit) -> tuple[Message, Message]:
    """K and V of a round, and the sums of their gradients. Ranks without queries in the round send nothing."""
    attending = tuple(kv if q else kv[:0] for q, kv in zip(split.q, split.kv, strict=True))
    split, ring = HeadSplit(split.q, attending), job.axes.ring
    if job.plan.travel == "gather":
        return Message(TO_EACH, split, keys=2), Message(TO_EACH, split, keys=2, high=True)
    kv = Message(TO_NEXT, split, keys=2, count=ring - 1, steps=ring - 1)
    return kv, Message(TO_NEXT, split, keys=2, high=True, count=ring, steps=ring)


def _over_ulysses(job: "Job") -> tuple[list[Message], list[Message]]:
    forward = [message for group in job.rounds for message in _group_forward(group)]
    again = [] if job.plan.checkpoint in ("none", "selective") else forward
    if one_round(job) and job.plan.checkpoint != "selective":
        split = job.split  # q, K, V and o are still where they are needed
        gradients = [Message(TO_HEADS, split, queries=1), Message(TO_TOKENS, split, queries=1, keys=2)]
        return forward, [*again, *gradients]
    return forward, [*again, *(message for group in job.rounds for message in _group_backward(group))]


def _group_forward(group: tuple[HeadSplit, ...]) -> list[Message]:
    """Rounds that read the same K and V."""
    if len(group) == 1:
        return [Message(TO_HEADS, group[0], queries=1, keys=2), Message(TO_TOKENS, group[0], queries=1)]
    kv = Message(TO_HEADS, group[0], keys=2)
    rounds = ((Message(TO_HEADS, split, queries=1), Message(TO_TOKENS, split, queries=1)) for split in group)
    return [kv, *(message for pair in rounds for message in pair)]


def _group_backward(group: tuple[HeadSplit, ...]) -> list[Message]:
    if len(group) == 1:
        return [Message(TO_HEADS, group[0], queries=3, keys=2), Message(TO_TOKENS, group[0], queries=1, keys=2)]
    kv = [Message(TO_HEADS, group[0], keys=2), Message(TO_TOKENS, group[0], keys=2)]
    rounds = ((Message(TO_HEADS, split, queries=3), Message(TO_TOKENS, split, queries=1)) for split in group)
    return [*kv, *(message for pair in rounds for message in pair)]


def work(job: "Job") -> Work:
    """FLOPs, bytes and GPU operations of a step."""
    keeps_all = job.plan.checkpoint == "none"
    project, rest = block_products(job)
    again = 0.0 if keeps_all else project + rest - last_product(job)
    if job.plan.entry.head_rounds:
        again += project  # q, K and V once to attend again, and once for their gradients
    return Work(
        attention=attention_flops(job),
        attention_runs=1 + float(job.plan.checkpoint not in ("none", "selective")),
        call=call_length(job, job.tokens),
        merged=0.0,
        linear=linear_flops(job, again),
        moved=moved_bytes(job, runs=1 if keeps_all else 2),
        launches=job.spec.layers * _layer_launches(job) + other_launches(job),
        python=job.spec.layers * PYTHON[job.plan.checkpoint or "full"],
        host=_copies(job, ("host", "disk")),
        disk=_copies(job, ("disk",)),
    )


def _layer_launches(job: "Job") -> float:
    """GPU operations of a block, forward and backward."""
    if job.plan.checkpoint == "none":
        return KEEPING_ALL
    rounds = sum(map(len, job.rounds)) - 1
    again = AGAIN if job.plan.checkpoint != "selective" else 0
    return CHECKPOINTED + again + PER_TILE * mlp_tiles(job) + PER_ROUND * rounds


def _copies(job: "Job", places: Iterable[str]) -> StepCopies:
    """Every x in these places is copied out once and back once."""
    words = job.plan.placement(job.spec.layers).x
    size = sum(words.count(place) for place in places) * job.hidden(local_tokens(job))
    return StepCopies(Copies(out=size), Copies(into=size))


def exposed(job: "Job", computing: float, ulysses: float, ring: float) -> float:
    """Seconds of computing with the exchange: only K and V that travel around a ring are hidden."""
    if job.plan.travel == "around":
        return ulysses + max(computing, ring)
    return ulysses + ring + computing
