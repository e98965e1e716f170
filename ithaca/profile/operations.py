"""The operations of a step by the functions that run them, and how many hidden states each holds at its own peak.

An allocation belongs to the innermost of these functions on the Python stack. What a backward pass runs again belongs
to the backward pass. So the code that runs knows nothing of profiles, and a function that is renamed fails here.

A hidden state, d, is tokens × hidden in the dtype of the computation: of the tokens that go through a block together
(under `sweep` a rank's part of a chunk), or of all tokens of the rank. Only activations count: tensors of the step that
belong to blocks, attention, exchange and loss. Tapes, K and V of earlier chunks, weights and the sums of their
gradients do not; the table of owners has them. `alive` is everything that lives at the operation's peak, whoever made
it: its inputs, and with chunks under way what its neighbours hold. `made` is the part of it that the operation itself
allocated.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from ithaca.attention.kernels import seam
from ithaca.attention.walk import Walk
from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE, LOSS
from ithaca.model import block
from ithaca.model.linear import Summed
from ithaca.optimizer.adamw import clip
from ithaca.parallel.collectives import Pending
from ithaca.parallel.exchange import Ulysses
from ithaca.parallel.ring import Ring
from ithaca.parallel.tensor import TensorSpread
from ithaca.profile.memory_log import MemoryLog
from ithaca.schedule import embedding, loss, pre_post_attention
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import phases, table_parameters
from ithaca.schedule.tensor import vocabulary
from ithaca.schedule.whole.attention import Attention

PROJECTION, PROJECTION_BACKWARD = "norm, QKV projection", "QKV projection, backward"
EXCHANGING, HEAD_GRADIENT, SUMS = "exchange", "head gradient", "sums of gradients"
FORWARD, BACKWARD = "attention, forward", "attention, backward"
OUTPUT, MLP, POST_BACKWARD = "output projection", "MLP, forward", "MLP and output projection, backward"
LINEAR_BACKWARD, OF_LOSS = "other gradients of a block", "final norm, head, loss"
EMBEDDING, EMBEDDING_GRADIENT, CLIPPING = "embedding", "embedding gradient", "clipping"

_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    PROJECTION: (block.project_beside,),
    EXCHANGING: (
        *(Ulysses.to_heads, Ulysses.to_tokens, Ring.gather, Ring.merge, Ring.reduce, Pending.wait),
        *(TensorSpread.gather, TensorSpread.reduce),
    ),
    FORWARD: (Walk.forward, Attention.attend, seam._Attend.forward),
    BACKWARD: (Walk.backward, Attention.attend_backward, seam._Attend.backward),
    PROJECTION_BACKWARD: (pre_post_attention.Projection.backward,),
    OUTPUT: (block.output_projection,),
    MLP: (block.mlp, block.mlp_beside),
    POST_BACKWARD: (pre_post_attention.post_attention_backward,),
    LINEAR_BACKWARD: (block._Norm.backward, block._Gated.backward),
    OF_LOSS: (loss._Tiler.add, loss.head_logits, vocabulary._Tiler.add),
    HEAD_GRADIENT: (loss._Tiler.__init__, vocabulary._Tiler.__init__),
    SUMS: (Summed.__init__,),
    EMBEDDING: (embedding._Embed.forward, vocabulary._Embed.forward),
    EMBEDDING_GRADIENT: (embedding._Embed.backward, vocabulary._Embed.backward),
    CLIPPING: (clip,),
}
ORDER = (*_FUNCTIONS,)
RUNS_AGAIN = {POST_BACKWARD}  # a function that runs others again, which then belong to it
OF_WEIGHTS = {HEAD_GRADIENT, SUMS, EMBEDDING_GRADIENT, CLIPPING}  # as large as weights, whatever the length
ACTIVATIONS = {BLOCKS, ATTENTION, EXCHANGE, LOSS}
# As published: slides of FPDT (Fully Pipelined Distributed Transformer), multi-head attention, in hidden states of all
# local tokens
PUBLISHED = {PROJECTION: 3, BACKWARD: 8}
# The phase of step_memory.py that an operation's peak belongs to
PHASES = {BACKWARD: "attention", POST_BACKWARD: "the MLP", EXCHANGING: "the exchange"}


def find_operation(codes: Iterable[CodeType]) -> str | None:
    """Return the operation that a stack of functions, the innermost first, belongs to."""
    names = [name for code in codes if (name := _CODES.get(code))]
    return next((name for name in names if name in RUNS_AGAIN), names[0] if names else None)


_CODES = {inspect.unwrap(function).__code__: name for name, each in _FUNCTIONS.items() for function in each}


@dataclass(frozen=True)
class Held:
    """The bytes that are alive at an operation's own peak."""

    operation: str
    alive: int  # of activations; of an operation that makes gradients of weights, what it made itself
    made: int  # by the operation itself


def held_by_operations(log: MemoryLog) -> list[Held]:
    """Return each operation's peak, in the order of a step."""
    alive: Counter[str | None] = Counter()  # activations by the operation that made them
    weights: Counter[str | None] = Counter()
    total, best = 0, dict[str, Held]()
    for change in log.changes:
        made = log.allocations[change.number]
        if made.before or change.owner not in ACTIVATIONS:
            continue
        operation, of_weights = made.operation, made.operation in OF_WEIGHTS
        mine = weights if of_weights else alive
        mine[operation] += change.size
        total += 0 if of_weights else change.size
        if change.size < 0 or operation is None:
            continue
        now = mine[operation] if of_weights else total
        if operation not in best or now > best[operation].alive:
            best[operation] = Held(operation, now, mine[operation])
    return [best[name] for name in ORDER if name in best]


def predicted_bytes(job: Job) -> dict[str, int]:
    """Return the bytes that `cost.peaks` and `step_memory` predict for the operations that they know."""
    found, kept = dict(phases(job)), job.costs.kept(job, range(job.layers_running))
    peaks = job.costs.peaks(job)
    of_head = job.high * table_parameters(job).unit
    predicted = {
        operation: sum(peaks[phase][owner] for owner in ACTIVATIONS) + kept
        for operation, phase in PHASES.items()
        if phase in peaks
    }
    at_loss = found["the loss"]
    return predicted | {OF_LOSS: at_loss[LOSS] - of_head + at_loss[BLOCKS], HEAD_GRADIENT: of_head}


def multipliers(log: MemoryLog, job: Job) -> list[dict[str, Any]]:
    """Return a row for each operation: bytes, and how many hidden states that is."""
    predicted = predicted_bytes(job)
    together, local = job.hidden(job.block_tokens), job.hidden(job.layout.local)
    return [
        {
            "operation": held.operation,
            "bytes": held.alive,
            "made_bytes": held.made,
            "predicted_bytes": round(predicted[held.operation]) if held.operation in predicted else None,
            "hidden_states": held.alive / together,
            "hidden_states_made": held.made / together,
            "hidden_states_predicted": predicted[held.operation] / together if held.operation in predicted else None,
            "hidden_states_of_local_tokens": held.alive / local,
            "published": PUBLISHED.get(held.operation),
        }
        for held in held_by_operations(log)
    ]
