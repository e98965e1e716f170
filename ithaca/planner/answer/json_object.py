"""The planner's answer as the object of `ithaca plan --json`. Fields are a contract: later work only adds to them."""

from typing import Any

from ithaca.base import owners
from ithaca.planner.answer.assumptions import assumptions, kernel_text
from ithaca.planner.answer.next_command import plan_options
from ithaca.planner.answer.report import Beside, Question, alternatives, fetched, longest_known, mfu, train_line
from ithaca.planner.batch import Batch
from ithaca.planner.lean import Lean
from ithaca.planner.search import Answer
from ithaca.planner.seconds import bare_seconds

JSON_OWNERS = {  # all other owners are "activations"
    "states": (owners.STATES, owners.GRADIENTS),
    "workspace": (owners.GATHERED, owners.KERNELS, owners.ALLOCATOR),
}


def as_object(
    question: Question, answer: Answer, most: int, limit: str, beside: Beside | None = None
) -> dict[str, Any]:
    """The object of `--json`. `beside`: as in `explain`."""
    parts, gpus = answer.memory.parts, question.cluster.machine.gpus
    memory = {name: sum(parts.get(owner, 0) for owner in names) for name, names in JSON_OWNERS.items()}
    seconds, axes = answer.seconds, answer.axes
    bare = answer.passes * bare_seconds(answer.job(question.spec, question.documents), question.cluster.gpu)
    return {
        "fits": True,
        "model": question.model,
        "gpus": question.gpus,
        "tokens": answer.tokens,
        "max_tokens": longest_known(question, answer, most),
        "limit": limit,
        "recomputed_attention_layers": answer.recomputed(question.spec),
        "plan": plan_options(answer.plan),
        "mesh": axes.grid,
        "kernel": answer.kernel,
        "documents": len(question.documents.lengths(answer.tokens)) if question.documents else 1,
        "memory": {
            "states": memory["states"],
            "activations": answer.memory.total - sum(memory.values()),
            "workspace": memory["workspace"],
            "total": answer.memory.total,
        },
        "memory_by_owner": parts,
        "memory_free": question.cluster.capacity - answer.memory.total,
        "host_bytes": answer.memory.host * gpus,
        "disk_bytes": answer.memory.disk * gpus,
        "seconds_per_step": seconds.step,
        "seconds_by_part": {name: value for name, value in vars(seconds).items() if name not in ("step", "passes")},
        "tokens_per_second_per_gpu": answer.rate,
        "mfu_causal": mfu(question, answer),
        "bare_seconds": bare,
        "over_bare": seconds.step / bare,
        "batch": _batch_object(answer, beside),
        "lean": beside.as_object() if isinstance(beside, Lean) else None,
        "kv_fetch": _fetch_object(question, answer),
        "assumed": [
            f"attention kernel {kernel_text(question.spec, question.cluster, answer, question.documents)}",
            *assumptions(question.spec, question.cluster, answer),
        ],
        "alternatives": alternatives(question, answer, most),
        "train": train_line(question, answer),
    }


def _batch_object(answer: Answer, beside: Beside | None) -> dict[str, Any]:
    return {
        "sequences": answer.batch,
        "tokens": answer.batch * answer.tokens,
        "passes": answer.passes,
        "sequences_per_pass": answer.sequences,
        "sequences_per_group": answer.rows,
        "groups": answer.axes.data,
        **(beside.as_object() if isinstance(beside, Batch) else {}),
    }


def _fetch_object(question: Question, answer: Answer) -> dict[str, Any] | None:
    if (found := fetched(question, answer)) is None:
        return None
    place, balanced, chunk = found
    return {
        "place": place,
        "chunk": chunk,
        "balance_chunk": balanced.chunk,
        "fetch_seconds": balanced.fetch * chunk,
        "attend_seconds": balanced.attend * chunk**2,
    }
