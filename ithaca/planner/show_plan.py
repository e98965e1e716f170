"""What `ithaca plan` does: an answer that explains itself, as lines, as JSON, or as a picture over lengths."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ithaca.errors import PlanError
from ithaca.model.named import find_config
from ithaca.model.spec import Spec, read_spec
from ithaca.planner.hardware import Gpu
from ithaca.planner.owners import ALLOCATOR, GATHERED, GRADIENTS, KERNELS, KEYS, STATES
from ithaca.planner.search import KEPT_BACK, RUNTIME, Answer, Cluster, longest, search, binding
from ithaca.plans.needs import has_room_for_x
from ithaca.plans.plan import RECIPE_OPTIONS, Plan
from ithaca.plans.rebuild import rebuild_passes
from ithaca.sizes import format_bytes, format_seconds, format_tokens

PEAK = {"states": (STATES, GRADIENTS), "workspace": (GATHERED, KERNELS, ALLOCATOR)}  # the rest are activations


@dataclass(frozen=True)
class Asked:
    """What is planned for; `tokens` None: the longest."""

    model: str
    spec: Spec
    cluster: Cluster
    tokens: int | None
    recipe: str | None


def run(
    model: str, cluster: Cluster, tokens: int | None, recipe: str | None, as_json: bool, picture: Path | None
) -> None:
    """`ithaca plan MODEL --gpus 8xH100-80GB --tokens 5M`."""
    Plan(recipe=recipe or "sweep")  # which must exist
    asked = Asked(model, read_spec(find_config(model)[0]), cluster, tokens, recipe)
    most = longest(asked.spec, cluster, recipe)
    wanted = tokens or most
    answer = search(asked.spec, cluster, wanted, recipe) if wanted else None
    if answer is None:
        text = refusal(asked, most)
        if as_json:
            print(json.dumps({"fits": False, "tokens": tokens, "max_tokens": most, "why": text}, indent=2))
        raise PlanError(text)
    limit = binding(asked.spec, cluster, recipe, most)
    if picture:
        from ithaca.planner.picture import draw

        draw(asked.model, asked.spec, cluster, most, picture)
    if as_json:
        print(json.dumps(describe(asked, answer, most, limit), indent=2))
    else:
        print("\n".join(explain(asked, answer, most, limit)))


def refusal(asked: Asked, most: int) -> str:
    """Why nothing fits, with both numbers, and what would."""
    spec, cluster = asked.spec, asked.cluster
    name = f"{asked.model} on {cluster.count}x{cluster.gpu.name}"
    per_parameter = 16
    states = per_parameter * spec.parameters() / cluster.count
    if states > cluster.capacity:
        needed = cluster.count
        while per_parameter * spec.parameters() / needed > cluster.capacity / 2:
            needed *= 2
        on_host = (
            f", or plan.optimizer=host, which leaves {format_bytes(states / 2)}"
            if states / 2 < cluster.capacity
            else ""
        )
        return (
            f"{name} does not fit: weights, gradients and moments alone take {format_bytes(states)} of each GPU, which "
            f"has {format_bytes(cluster.capacity)}: {needed} GPUs hold them{on_host}"
        )
    if asked.tokens and most:
        limit = binding(spec, cluster, asked.recipe, most)
        have = {"GPU": cluster.gpu.memory, "host": cluster.host, "disk": cluster.disk}[limit]
        return (
            f"{format_tokens(asked.tokens)} tokens of {name} do not fit: with {format_bytes(have)} of {limit} memory "
            f"{'a GPU' if limit == 'GPU' else 'a node'} the longest is {format_tokens(most)} (--tokens {format_tokens(most)})"
        )
    return (
        f"{name} does not fit at any length: a GPU has {format_bytes(cluster.capacity)}, a node "
        f"{format_bytes(cluster.host)} (--host) and {format_bytes(cluster.disk)} of disk (--disk)"
    )


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
        "max_tokens": most,
        "limit": limit,
        "recomputed_attention_layers": answer.recomputed(asked.spec),
        "plan": _options(answer.plan),
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


def mfu(asked: Asked, answer: Answer) -> float:
    return answer.rate * asked.spec.flops_per_token(answer.tokens) / asked.cluster.gpu.flops


def assumptions(gpu: Gpu, nodes: int) -> list[str]:
    """What no machine has measured, or another one has."""
    names = [name for name in gpu.sources if name != "across" or nodes > 1]
    found = [
        f"{name} {gpu_number(gpu, name)}: {gpu.sources[name]}"
        for name in names
        if "measured here" not in gpu.sources[name]
    ]
    return [
        *found,
        f"{format_bytes(RUNTIME)} of a GPU for the driver and NCCL",
        f"{KEPT_BACK:.0%} of the host kept back",
    ]


def gpu_number(gpu: Gpu, name: str) -> str:
    value, unit = getattr(gpu, name), "FLOP/s" if name in ("flops", "matmul") or "attention" in name else "B"
    return f"{value:.3g} {unit}" + ("/s" if name in ("bandwidth", "inside", "across", "host") else "")


def explain(asked: Asked, answer: Answer, most: int, limit: str) -> list[str]:
    """The answer in lines: where bytes and seconds go, what binds, what else there is."""
    spec, cluster, parts = asked.spec, asked.cluster, answer.memory.parts
    mesh = " × ".join(
        f"{name} {size}"
        for name, size in (("shard", answer.shard), ("ring", answer.ring), ("ulysses", answer.ulysses))
        if size > 1
    )
    lines = [
        f"{asked.model} at {format_tokens(answer.tokens)} tokens on {cluster.count}x{cluster.gpu.name}: fits, with recipe "
        f"'{answer.plan.recipe}'" + (f" on {mesh}" if mesh else ""),
        "",
        f"a GPU, at its peak ({answer.memory.moment})  {format_bytes(answer.memory.total)} of {format_bytes(cluster.capacity)}",
    ]
    how = arithmetic(asked, answer)
    width = max(map(len, parts))
    lines += [
        f"  {owner:{width}}  {format_bytes(size):>9}" + (f"  = {how[owner]}" if owner in how else "")
        for owner, size in sorted(parts.items(), key=lambda item: -item[1])
        if size >= answer.memory.total / 1000
    ]
    gpus = cluster.machine.gpus
    lines.append(f"a node's host   {format_bytes(answer.memory.host * gpus)} of {format_bytes(cluster.host)}")
    if cluster.disk:
        lines.append(f"a node's disk   {format_bytes(answer.memory.disk * gpus)} of {format_bytes(cluster.disk)}")
    lines += [f"{name:15} {text}" for name, text in kept(spec, answer).items()]
    free = cluster.capacity - answer.memory.total
    lines.append(f"free on a GPU   {format_bytes(free)}{reinvested(spec, answer)}")
    seconds = answer.seconds
    lines += [
        "",
        f"a step          {format_seconds(seconds.step)}: {answer.rate:.0f} tokens/s on each GPU, "
        f"{100 * mfu(asked, answer):.1f} % causal MFU",
        "  "
        + ", ".join(
            f"{name.replace('_', ' ')} {format_seconds(value)}"
            for name, value in vars(seconds).items()
            if name != "step"
        )
        + _hidden(answer),
        "",
        f"the longest context is {format_tokens(most)}, and the {limit}{'' if limit == 'GPU' else chr(39) + 's memory'} is what limits it",
    ]
    lines += [f"  {text}" for text in alternatives(asked, answer, most)]
    lines += ["", "assumed: " + "; ".join(_assumed(cluster)), "", train_line(asked, answer)]
    return lines


def _assumed(cluster: Cluster) -> list[str]:
    return [text for text in assumptions(cluster.gpu, cluster.machine.nodes) if "data sheet" not in text]


def _hidden(answer: Answer) -> str:
    return (
        "; exchange, copies and weights beside the computing"
        if answer.plan.sweeps
        else "; copies and weights beside the computing"
    )


def arithmetic(asked: Asked, answer: Answer) -> dict[str, str]:
    """How the numbers that a user could check come about."""
    spec, plan, ranks = asked.spec, answer.plan, asked.cluster.count
    each = 12 if plan.optimizer == "device" else 4
    found = {
        STATES: f"{spec.parameters():,} parameters × {each} bytes / {ranks}",
    }
    keys = next((need for need in answer.memory.tapes if need.name == "keys" and need.place == "device"), None)
    if keys:
        tokens = answer.memory.tiles.length * keys.ranks
        found[KEYS] = f"{tokens:,} tokens × {keys.features[0]} heads × {keys.features[1]} × 2 × (2 + 4) bytes"
    return found


def kept(spec: Spec, answer: Answer) -> dict[str, str]:
    """Where block inputs and attention outputs are."""
    placement = answer.plan.placement(spec.layers)
    found = {"block inputs x": _words(placement.x)}
    if answer.plan.sweeps:
        passes = rebuild_passes(placement, has_room_for_x(spec))
        found["block inputs x"] += f" ({passes} passes of mix and feed to rebuild)" if passes else ""
        found["outputs o"] = _words(placement.o)
    else:
        found["checkpoint"] = answer.plan.checkpoint or "full"
    again = answer.recomputed(spec)
    found["attention"] = "runs once" if not again else f"runs again in backward, in {again} of {spec.layers} layers"
    return found


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(f"{word} {words.count(word)}" for word in dict.fromkeys(words)) + " layers"


def reinvested(spec: Spec, answer: Answer) -> str:
    """What of the memory beyond the least was used to have fewer copies."""
    placement, settled = answer.plan.placement(spec.layers), answer.plan.settled()
    if not answer.plan.sweeps:
        return ""
    there = [
        f"{name} of {words.count('device')} layers"
        for name, words in (("x", placement.x), ("o", placement.o))
        if words.count("device")
    ]
    there += [
        name for name, place in (("the gradient", settled.gradient), ("log-sum-exps", settled.lse)) if place == "device"
    ]
    return f"; what was left went into {', '.join(there)} on the device" if there else ""


def alternatives(asked: Asked, answer: Answer, most: int) -> list[str]:
    """The nearest other answers: longer, faster, fewer GPUs."""
    spec, cluster, recipe = asked.spec, asked.cluster, asked.recipe
    found = []
    if most > answer.tokens and (other := search(spec, cluster, most, recipe)):
        found.append(f"longer: {format_tokens(most)} tokens, {format_seconds(other.seconds.step)} a step")
    if recipe in (None, "sweep"):
        again = longest(spec, cluster, recipe, recomputing=True, from_=most) if most else 0
        if again > 1.01 * most:
            found.append(f"longer: {format_tokens(again)} tokens where attention may run again in backward")
    for count, word in ((2 * cluster.count, "faster"), (cluster.count // 2, "fewer GPUs")):
        if count and (count <= cluster.node_gpus or count % cluster.node_gpus == 0):
            share = replace(cluster, count=count, **_per_node(cluster, count))
            if other := search(spec, share, answer.tokens, recipe):
                time = other.seconds.step / other.shard
                found.append(
                    f"{word}: {count}x{cluster.gpu.name}, {format_seconds(time)} a sequence instead of {format_seconds(answer.seconds.step / answer.shard)}"
                )
            elif word == "fewer GPUs":
                found.append(f"fewer GPUs: {count}x{cluster.gpu.name} do not hold it")
    return found


def _per_node(cluster: Cluster, count: int) -> dict[str, float]:
    """A node keeps its memory; part of one has its share."""
    now, then = cluster.machine.gpus, min(count, cluster.node_gpus)
    return {"host": cluster.host * then / now, "disk": cluster.disk * then / now}


def train_line(asked: Asked, answer: Answer) -> str:
    sets = {
        "model.source": asked.model,
        "train.tokens": format_tokens(answer.tokens),
        **{f"plan.{name}": value for name, value in _options(answer.plan).items()},
        "mesh.ulysses": answer.ulysses,
        "mesh.ring": answer.ring,
    }
    return "ithaca train " + " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in sets.items())


def _options(plan: Plan) -> dict[str, Any]:
    """What differs from a Plan that is told nothing but its recipe."""
    default = Plan(recipe=plan.recipe)
    names = ("recipe", *RECIPE_OPTIONS, "zero", "optimizer")
    return {
        name: getattr(plan, name)
        for name in names
        if getattr(plan, name) is not None and (name == "recipe" or getattr(plan, name) != getattr(default, name))
    }
