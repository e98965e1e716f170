"""An answer that explains itself: where bytes and seconds go, what binds, what else there is, how to use it."""

import shlex
from dataclasses import dataclass
from typing import Any

from ithaca.base.owners import KEYS, STATES
from ithaca.base.sizes import format_bytes, format_number, format_seconds, format_tokens
from ithaca.model.spec import Spec
from ithaca.planner.hardware import HERE, MARGIN, MOST_GPUS, RATES, RUNTIME, Cluster, Gpu
from ithaca.planner.search import Answer, longest, search
from ithaca.planner.seconds import DISK
from ithaca.plans.places import KEPT, REBUILD, RECOMPUTE
from ithaca.plans.plan import RECIPE_OPTIONS, Plan
from ithaca.schedule.sweep.rebuild import rebuild_passes
from ithaca.tape.budget import KEPT_BACK

ON = {place: f"on the {place}" for place in KEPT} | {REBUILD: "rebuilt", RECOMPUTE: "recomputed"}
LIMITS = {
    "GPU": "the GPU's memory",
    "host": "the host's memory",
    "disk": "the disk",
    "planner": "what can be planned for",
}


@dataclass(frozen=True)
class Asked:
    """What is planned for; `tokens` None: the longest. `running`: by a run that starts, not by `ithaca plan`."""

    model: str
    spec: Spec
    cluster: Cluster
    tokens: int | None
    recipe: str | None
    running: bool = False

    def name_limit(self, limit: str) -> str:
        """With the option that gives it, where there is one."""
        return LIMITS[limit] + (f" (--{limit})" if limit in ("host", "disk") and not self.running else "")


def explain(asked: Asked, answer: Answer, most: int, limit: str) -> list[str]:
    """The answer in lines: where bytes and seconds go, what binds, what else there is."""
    spec, cluster, parts = asked.spec, asked.cluster, answer.memory.parts
    mesh = " × ".join(
        f"{name} {size}"
        for name, size in (("shard", answer.shard), ("ring", answer.ring), ("ulysses", answer.ulysses))
        if size > 1
    )
    lines = [
        f"{asked.model} at {format_tokens(answer.tokens)} tokens on {cluster.count}x{cluster.gpu.name}: fits, with "
        f"recipe '{answer.plan.recipe}'" + (f" on {mesh}" if mesh else ""),
        "",
        f"a GPU, at its peak ({answer.memory.moment})  {format_bytes(answer.memory.total)} of "
        f"{format_bytes(cluster.capacity)}",
    ]
    how = arithmetic(asked, answer)
    most = longest_known(spec, answer, most)
    once = " where attention runs once" if answer.tokens > most else ""
    width = max(map(len, parts))
    lines += [
        f"  {owner:{width}}  {format_bytes(size):>9}" + (f"  = {how[owner]}" if owner in how else "")
        for owner, size in sorted(parts.items(), key=lambda item: -item[1])
        if size >= answer.memory.total / 1000
    ]
    gpus = cluster.machine.gpus
    lines.append(
        f"a node's host   {format_bytes(answer.memory.host * gpus)} of {format_bytes(cluster.of_host() * gpus)}"
    )
    if cluster.disk:
        lines.append(f"a node's disk   {format_bytes(answer.memory.disk * gpus)} of {format_bytes(cluster.disk)}")
    lines += [f"{name:15} {text}" for name, text in kept(spec, answer).items()]
    free = cluster.capacity - answer.memory.total
    lines.append(f"free on a GPU   {format_bytes(free)}{reinvested(spec, answer)}")
    seconds = answer.seconds
    lines += [
        "",
        f"a step          {format_seconds(seconds.step)} for {_count(answer.sequences, 'sequence')}: "
        f"{format_number(answer.rate)} tokens/s on each GPU, {100 * mfu(asked, answer):.1f} % causal MFU",
        "  "
        + ", ".join(
            f"{name.replace('_', ' ')} {format_seconds(value)}"
            for name, value in vars(seconds).items()
            if name != "step"
        )
        + _hidden(answer),
        "",
        f"the longest context{once} is {format_tokens(most)}, and what limits it is {asked.name_limit(limit)}",
    ]
    lines += [f"  {text}" for text in alternatives(asked, answer, most)]
    lines += ["", "assumed, or measured elsewhere:", *(f"  {text}" for text in _assumed(cluster))]
    lines += ["", train_line(asked, answer)]
    return lines


def longest_known(spec: Spec, answer: Answer, most: int) -> int:
    """Where attention runs once: `most`, found in whole steps, or what was asked, if that is longer and fits so."""
    return most if answer.plan.sweeps and answer.recomputed(spec) else max(most, answer.tokens)


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
    keys = next((need for need in answer.memory.tapes if need.name == "kv" and need.place == "device"), None)
    if keys:
        tokens = answer.memory.tiles.length * keys.ranks
        found[KEYS] = f"{tokens:,} tokens × {_count(keys.features[0], 'head')} × {keys.features[1]} × 2 × (2 + 4) bytes"
    return found


def kept(spec: Spec, answer: Answer) -> dict[str, str]:
    """Where block inputs and attention outputs are."""
    placement = answer.plan.placement(spec.layers)
    found = {"block inputs x": _words(placement.x)}
    if answer.plan.sweeps:
        passes = rebuild_passes(placement, spec)
        found["block inputs x"] += f" ({passes} passes of mix and feed to rebuild)" if passes else ""
        found["outputs o"] = _words(placement.o)
    elif answer.plan.checkpoint:
        found["checkpoint"] = answer.plan.checkpoint
    again = answer.recomputed(spec)
    found["attention"] = "runs once" if not again else f"runs again in backward, in {again} of {spec.layers} layers"
    return found


def _words(words: tuple[str, ...]) -> str:
    return "of " + ", ".join(f"{_count(words.count(word), 'layer')} {ON[word]}" for word in dict.fromkeys(words))


def reinvested(spec: Spec, answer: Answer) -> str:
    """What of the memory beyond the least was used to have fewer copies."""
    placement, settled = answer.plan.placement(spec.layers), answer.plan.settled()
    if not answer.plan.sweeps:
        return ""
    there = [
        f"{name} of {_count(words.count('device'), 'layer')}"
        for name, words in (("x", placement.x), ("o", placement.o))
        if words.count("device")
    ]
    there += [
        name for name, place in (("the gradient", settled.residual), ("log-sum-exps", settled.lse)) if place == "device"
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
    now = answer.seconds.step / answer.sequences
    for count, word in ((2 * cluster.count, "faster"), (cluster.count // 2, "fewer GPUs")):
        if not 1 <= count <= MOST_GPUS or (count > cluster.node_gpus and count % cluster.node_gpus):
            continue
        other = search(spec, cluster.resized(count), answer.tokens, recipe)
        each = other.seconds.step / other.sequences if other else 0.0
        if other and (word != "faster" or each < now):
            times = f"{format_seconds(each)} a sequence instead of {format_seconds(now)}"
            found.append(f"{word}: {count}x{cluster.gpu.name}, {times}")
        if not other and word == "fewer GPUs":
            found.append(f"fewer GPUs: {count}x{cluster.gpu.name} do not hold it")
    return found


def mfu(asked: Asked, answer: Answer) -> float:
    return answer.rate * asked.spec.flops_per_token(answer.tokens) / asked.cluster.gpu.flops


def assumptions(gpu: Gpu, nodes: int) -> list[str]:
    """What was not measured on this GPU, each with its source."""
    names = [name for name in gpu.sources if name != "across" or nodes > 1]
    found = [f"{gpu_number(gpu, name)}: {gpu.sources[name]}" for name in names if gpu.sources[name] != HERE]
    return [
        *found,
        f"{format_bytes(RUNTIME)} of a GPU for the driver and NCCL, {MARGIN:.0%} of it for errors of prediction",
        f"{KEPT_BACK:.0%} of the host kept back",
        f"a disk that writes and reads {DISK / 1e9:g} GB/s",
    ]


def gpu_number(gpu: Gpu, name: str) -> str:
    value, title = getattr(gpu, name), name.replace("_", " ")
    if name in ("flops", *RATES):
        return f"{title} {value / 1e12:.4g} TFLOP/s"
    return f"{title} {value / 1e9:.4g} GB" + ("" if name in ("memory", "ram") else "/s")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def train_line(asked: Asked, answer: Answer) -> str:
    """How to train so; of a run, which has a model and a length, how to name the Plan that was chosen."""
    named = {"model.source": asked.model, "train.tokens": format_tokens(answer.tokens)}
    sets = ({} if asked.running else named) | {
        **{f"plan.{name}": value for name, value in options(answer.plan).items()},
        "mesh.ulysses": answer.ulysses,
        "mesh.ring": answer.ring,
    }
    words = " ".join(f"--set {shlex.quote(f'{name}={value}')}" for name, value in sets.items())
    return f"the same by name: {words}" if asked.running else f"ithaca train {words}"


def options(plan: Plan) -> dict[str, Any]:
    """What differs from a Plan that is told nothing but its recipe."""
    default = Plan(recipe=plan.recipe)
    names = ("recipe", *RECIPE_OPTIONS, "disk", "zero", "optimizer")
    return {
        name: getattr(plan, name)
        for name in names
        if getattr(plan, name) is not None and (name == "recipe" or getattr(plan, name) != getattr(default, name))
    }
