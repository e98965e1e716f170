"""The costs of blocks of tensor ranks: kept tensors, tensors at their peaks, messages, FLOPs. No torch.

With t ranks and n local tokens, a gathered hidden state has t · n · E numbers; a rank has M / t features of the MLP.
Between blocks a rank keeps what `whole` keeps (whole/cost.py): n tokens with all features are as many numbers as all
tokens with its heads and features. Within a block:

    MLP          for a tile of τ tokens of each rank: 5 τM; or 4 with a gathered gradient; or 2 with a gathered input
                 and its gradient. Beside them x, dy, dx, do and what attention holds
    attention    q, o, do, K, V of this rank's heads and all tokens, dq, dK, dV and the kernel's workspace
    projections  dq, dK, dV, the gathered input and its gradient

Messages, each of n · E numbers to t − 1 ranks; r tiles of the MLP:

| checkpoint | forward | backward |
|---|---|---|
| none | 4: inputs gathered, outputs reduced, of attention and MLP | 6: the same reversed; the inputs gathered again |
| selective, full | 1 + 3 r, of 4 hidden states | 3 + 6 r, of 9: all of forward but the last reduction comes again |

A post-norm block computes its last product again, too, and reduces it. Beside these: the gradients of weights that
several ranks hold, in fp32; the embedding, one hidden state each way; the loss, one hidden state there and one back,
and two fp32 numbers of every token to every rank. No message is hidden: a product waits for its input. K and V
travel around a ring as under `whole`.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE
from ithaca.parallel.axes import Axes
from ithaca.parallel.layout import Layout
from ithaca.parallel.tensor_parts import TensorPart
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import TO_RANKS, Message, mlp_tiles
from ithaca.schedule.whole import cost as whole

# The same as under `whole`. Of the exchange, only K and V that travel around a ring are hidden
from ithaca.schedule.whole.cost import exposed, passing_bytes, settles, tapes, tiles, work  # noqa: F401

if TYPE_CHECKING:
    from ithaca.schedule.job import Job

ID = 8  # bytes of a token, a label or a position


def layout(plan: Plan, axes: Axes, tokens: int, shorten: bool) -> Layout:  # noqa: ARG001
    """One chunk: each rank has one piece of the sequence, or two in a ring."""
    return Layout(tokens, tokens, axes.tensor, axes.ring)


def kept(job: "Job", layers: range) -> int:
    """Device bytes that these blocks leave for their backward pass."""
    if job.plan.checkpoint == "none":
        return len(layers) * _everything(job)
    words = job.plan.placement(job.spec.layers).x[layers.start : layers.stop]
    size = words.count("device") * job.hidden(job.block_tokens)
    if job.plan.checkpoint == "selective":
        size += len(layers) * (job.own_queries() + job.own_lse())
    return size


def _everything(job: "Job") -> int:
    """Bytes that autograd keeps: x, norms, the sum with the output projection; q, k, v, o, lse; gate, up, product."""
    size = 3 * job.hidden(job.block_tokens) + _projection_bytes(job) + 3 * _wide(job, job.block_tokens)
    return size + 2 * job.own_queries() + 2 * job.own_keys() + job.own_lse()


def _projection_bytes(job: "Job") -> int:
    """Bytes that projections keep for their backward pass: the normed x; with norms of q and k, these as well."""
    return job.hidden(job.block_tokens) + (job.own_queries() + job.own_keys() if job.spec.qk_norm else 0)


def _wide(job: "Job", tokens: int) -> int:
    """Bytes of this rank's features of the MLP, for some tokens of every rank."""
    return tokens * job.axes.tensor * job.rank_spec.mlp * job.itemsize


def _gathered(job: "Job", tokens: int) -> int:
    """Bytes of a hidden state of some tokens of every rank."""
    return job.axes.tensor * job.hidden(tokens) if job.axes.tensor > 1 else 0


def peaks(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the peaks of a block's backward pass."""
    T, q, k = job.block_tokens, job.own_queries(), job.own_keys()
    x, gathered = job.hidden(T), _gathered(job, T)
    kernel = q + job.workspace(q, k) + 2 * k + whole.ring_bytes(job)
    if job.plan.checkpoint == "none":
        wide, attended = _wide(job, T), 2 * q + 2 * k + job.own_lse()  # of what is kept
        mlp = max(_peak(gathered, wide), _peak(0, 2 * wide), _peak(2 * gathered, -wide), key=_total)
        attention = Counter({ATTENTION: max(q + kernel - 3 * wide, 0)})
        projections = _peak(2 * gathered, q + 2 * k - 3 * wide - attended)
        found = {"the MLP": mlp, "attention": attention, "the projections": projections}
        return {name: Counter({BLOCKS: x}) + peak for name, peak in found.items()}
    fetched = {*job.plan.placement(job.spec.layers).x} - {"device"}
    states = (x if fetched else 0) + 2 * x  # x, dy, dx
    held = 0 if job.plan.checkpoint == "selective" else _projection_bytes(job) + 2 * q + 2 * k + job.own_lse()
    held += q if job.tile < T else 0  # do, which the tiles write
    wide, part = _wide(job, job.tile), _gathered(job, job.tile)
    within = max(_peak(0, 5 * wide), _peak(part, 4 * wide), _peak(2 * part, 2 * wide), key=_total)
    return {
        "the MLP": Counter({BLOCKS: states + held + 3 * job.hidden(job.tile)}) + within,
        "attention": Counter(
            {BLOCKS: states + _projection_bytes(job) + job.own_lse() + 3 * q + 2 * k, ATTENTION: kernel}
        ),
        "the projections": Counter({BLOCKS: states + _projection_bytes(job)}) + _peak(2 * gathered, q + 2 * k),
    }


def _peak(gathered: int, computed: int) -> Counter[str]:
    return Counter({EXCHANGE: gathered, BLOCKS: computed})


def _total(peak: Counter[str]) -> int:
    return sum(peak.values())


def reading(job: "Job") -> dict[str, Counter[str]]:
    """Bytes at the peaks of a block in a pass without gradients. Its input and its output are tensors."""
    T, q, k, states = job.block_tokens, job.own_queries(), job.own_keys(), 2 * job.hidden(job.block_tokens)
    ring = 2 * q * job.high // job.itemsize + whole.ring_bytes(job) if job.axes.ring > 1 else 0
    # q, k and v are there while the input is still gathered
    attention = _peak(_gathered(job, T), states + _projection_bytes(job) + q + 2 * k)
    attention += Counter({ATTENTION: q + job.own_lse() + ring})
    mlp = _peak(_gathered(job, job.tile), states + q + 3 * _wide(job, job.tile) + 3 * job.hidden(job.tile))
    return {"the MLP": mlp, "attention": attention}


def messages(job: "Job", layer: int) -> tuple[list[Message], list[Message]]:
    """The messages of a block, forward and backward; of the last block with those of embedding and loss."""
    forward, backward = whole.over_ring(job)
    if job.axes.tensor == 1:
        return forward, backward
    state, parts = job.spec.hidden * job.itemsize, mlp_tiles(job)
    again = (2 if job.plan.checkpoint == "none" else 5) + (job.spec.post_norm and job.plan.checkpoint != "none")
    count = 6 if job.plan.checkpoint == "none" else 3 + (6 + job.spec.post_norm) * parts
    sent = Message(TO_RANKS, job.split, token_bytes=4 * state, count=1 + 3 * parts)
    returned = Message(TO_RANKS, job.split, token_bytes=(4 + again) * state, count=count)
    forward, backward = [*forward, sent], [*backward, returned, *_shared_gradients(job, job.spec.block_shapes())]
    if layer == job.spec.layers - 1:
        ends = _ends(job, state)
        forward, backward = [*forward, *ends[0]], [*ends[1], *backward]
    return forward, backward


def _shared_gradients(job: "Job", names: Iterable[str]) -> list[Message]:
    """Gradients of weights that several ranks hold, one message each."""
    part = TensorPart(job.spec, job.head_rank, job.axes.tensor)
    sizes = [math.prod(map(len, part.place(name))) for name in names if part.sharers(name)]
    return [Message(TO_RANKS, job.split, own_bytes=size * job.high) for size in sizes]


def _ends(job: "Job", state: int) -> tuple[list[Message], list[Message]]:
    """Messages of the batch, the embedding and the loss, forward and backward."""
    parts = -(-job.block_tokens // job.loss_rows)
    batch = Message(TO_RANKS, job.split, token_bytes=3 * ID)
    hidden = Message(TO_RANKS, job.split, token_bytes=state, count=parts)
    sums = Message(TO_RANKS, job.split, token_bytes=2 * job.axes.tensor * job.high, count=parts)
    return [batch, hidden, hidden, sums, hidden], [*_shared_gradients(job, ["norm.weight"]), hidden]
