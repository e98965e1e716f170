"""What `ithaca plan` does: an answer as lines or as JSON, or why there is none."""

import json
from pathlib import Path
from typing import Any

from ithaca.base.errors import PlanError
from ithaca.base.owners import ALLOCATOR, GATHERED, GRADIENTS, KERNELS, STATES
from ithaca.base.sizes import format_bytes, format_tokens
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.cluster import Cluster
from ithaca.planner.explain import Asked, alternatives, assumptions, explain, longest_known, mfu, options, train_line
from ithaca.planner.fitting import Answer
from ithaca.planner.longest import STEP, binding, longest
from ithaca.planner.picture import check_kind, draw
from ithaca.planner.search import search
from ithaca.plans.plan import Plan

PER_PARAMETER = 16  # bytes of weight, gradient and moments
MOST_TRIED = 4096  # GPUs that may be named as enough
PEAK = {"states": (STATES, GRADIENTS), "workspace": (GATHERED, KERNELS, ALLOCATOR)}  # the rest are activations


def run(
    model: str, cluster: Cluster, tokens: int | None, recipe: str | None, as_json: bool, picture: Path | None
) -> None:
    """`ithaca plan MODEL --gpus 8xH100-80GB --tokens 5M`."""
    Plan(recipe="sweep" if recipe is None else recipe)  # which must exist
    if picture:
        check_kind(picture)
    asked = Asked(model, read_spec(find_config(model)[0]), cluster, tokens, recipe)
    most = longest(asked.spec, cluster, recipe)
    wanted = tokens or most
    answer = search(asked.spec, cluster, wanted, recipe) if wanted else None
    if answer is None:
        text = refusal(asked, most)
        if not as_json:
            raise PlanError(text)
        print(json.dumps({"fits": False, "tokens": tokens, "max_tokens": most, "why": text}, indent=2))
        raise SystemExit(PlanError.code)
    limit = binding(asked.spec, cluster, recipe, most)
    if picture:
        draw(asked.model, asked.spec, cluster, most, picture)
    if as_json:
        print(json.dumps(describe(asked, answer, most, limit), indent=2))
    else:
        print("\n".join(explain(asked, answer, most, limit)))


def refusal(asked: Asked, most: int) -> str:
    """Why nothing fits, with both numbers, and what would."""
    spec, cluster = asked.spec, asked.cluster
    name = f"{asked.model} on {cluster.count}x{cluster.gpu.name}"
    if asked.tokens and most:
        limit = binding(spec, cluster, asked.recipe, most)
        have = {"GPU": cluster.gpu.memory, "host": cluster.host, "disk": cluster.disk}[limit]
        option = "train.tokens=" if asked.running else "--tokens "
        return (
            f"{format_tokens(asked.tokens)} tokens of {name} do not fit: {option}{format_tokens(most)} is the "
            f"longest, by {format_bytes(have)} of {asked.name_limit(limit)}"
        )
    enough = _enough(asked)
    hint = f": {enough} GPUs would do" if enough else ""
    states = PER_PARAMETER * spec.parameters() / cluster.count
    if states > cluster.capacity:
        return (
            f"{name} does not fit: weights, gradients and moments alone take {format_bytes(states)} of each GPU, of "
            f"which {format_bytes(cluster.capacity)} can be used{hint}"
        )
    return (
        f"{name} does not fit at any length: a GPU has {format_bytes(cluster.capacity)}, a node "
        f"{format_bytes(cluster.host)} of {asked.name_limit('host')} and {format_bytes(cluster.disk)} of "
        f"{asked.name_limit('disk')}{hint}"
    )


def _enough(asked: Asked) -> int | None:
    """Twice, four times … as many GPUs, in whole nodes, on which it fits; None where there is no such number."""
    count, node = asked.cluster.count, asked.cluster.node_gpus
    while (count := 2 * count) <= MOST_TRIED:
        count = count if count <= node else -(-count // node) * node
        if search(asked.spec, asked.cluster.resized(count), asked.tokens or STEP, asked.recipe):
            return count
    return None


def describe(asked: Asked, answer: Answer, most: int, limit: str) -> dict[str, Any]:
    """The object of `--json`."""
    parts, gpus = answer.memory.parts, asked.cluster.machine.gpus
    memory = {name: sum(parts.get(owner, 0) for owner in owners) for name, owners in PEAK.items()}
    seconds = answer.seconds
    return {
        "fits": True,
        "model": asked.model,
        "gpus": f"{asked.cluster.count}x{asked.cluster.gpu.name}",
        "tokens": answer.tokens,
        "max_tokens": longest_known(asked.spec, answer, most),
        "limit": limit,
        "recomputed_attention_layers": answer.recomputed(asked.spec),
        "plan": options(answer.plan),
        "mesh": {"shard": answer.shard, "ring": answer.ring, "ulysses": answer.ulysses},
        "memory": {
            "states": memory["states"],
            "activations": answer.memory.total - sum(memory.values()),
            "workspace": memory["workspace"],
            "total": answer.memory.total,
        },
        "memory_by_owner": parts,
        "memory_free": asked.cluster.capacity - answer.memory.total,
        "host_bytes": answer.memory.host * gpus,
        "disk_bytes": answer.memory.disk * gpus,
        "seconds_per_step": seconds.step,
        "seconds_by_part": {name: value for name, value in vars(seconds).items() if name != "step"},
        "tokens_per_second_per_gpu": answer.rate,
        "mfu_causal": mfu(asked, answer),
        "assumed": assumptions(asked.cluster.gpu, asked.cluster.machine.nodes),
        "alternatives": alternatives(asked, answer, most),
        "train": train_line(asked, answer),
    }
