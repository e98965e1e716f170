"""The ways in which a recipe fits some GPUs at one length, each an Answer.

Under `sweep` x and o of each layer go to the fastest place that has room (plans/fill.py), and only what has room in
none is made again; the other recipes are tried from what computes least to what holds least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ithaca.base.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.planner.cluster import Cluster
from ithaca.planner.machine import Machine
from ithaca.planner.memory import Memory, predict_memory
from ithaca.planner.meshes import choose
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import CHUNK, Plan
from ithaca.plans.tape_specs import device_bytes, host_bytes
from ithaca.schedule.sweep.placement import Kept, try_place
from ithaca.schedule.sweep.rebuild import fewest_kept

LOCAL_CHUNK = 8192  # tokens of a rank from which on its matrix products run at their best
LEAST_CHUNK = CHUNK // 8  # tokens; what a still smaller one would save is little
SCRATCH = "/scratch"  # a folder on the disk, for the user to replace
SHORTEST, LONGEST = 128, 2**32  # tokens that can be planned for; the former a tile of attention


@dataclass(frozen=True)
class Answer:
    """A Plan that fits, on a mesh."""

    plan: Plan
    tokens: int
    ulysses: int
    ring: int
    shard: int  # times that sequences are at work beside each other
    rows: int  # sequences of a pass for those that share them, where they have most
    sequences: int  # of a pass, over all GPUs
    memory: Memory
    seconds: Seconds

    @property
    def rate(self) -> float:
        """Tokens a second and GPU."""
        return self.sequences * self.tokens / self.seconds.step / (self.shard * self.ring * self.ulysses)

    def recomputed(self, spec: Spec) -> int:
        """Layers whose attention runs twice."""
        if self.plan.sweeps:
            return self.plan.placement(spec.layers).o.count(RECOMPUTE)
        return 0 if self.plan.checkpoint in ("none", "selective") else spec.layers


def fitting(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    mesh: tuple[int, int] | None,
    choices: list[Kept],
    rows: int = 1,
) -> Iterator[Answer]:
    """On one mesh, with so many sequences for those that share them; `choices` of what `sweep` may keep."""
    if mesh is None:
        return
    sharing = mesh[0] * mesh[1]
    shard = cluster.count // sharing
    for plan in _plans(recipe, rows * tokens, sharing):
        for fitted, memory in fit(spec, cluster, plan, rows * tokens, *mesh, shard, choices):
            seconds = pass_seconds(spec, cluster, fitted, tokens, rows, mesh)
            answer = Answer(fitted, tokens, *mesh, shard, rows, rows * shard, memory, seconds)
            yield answer
            if recipe == "sweep" and not answer.recomputed(spec):
                return  # what holds less is no faster


def mesh_of(spec: Spec, cluster: Cluster, plan: Plan, tokens: int, sharing: int) -> tuple[int, int] | None:
    """The best ulysses × ring of so many; None where there is none."""
    if not plan.shares or sharing == 1:
        return (1, 1) if sharing == 1 else None
    return _best_mesh(spec, plan, cluster.machine, 2 ** (tokens.bit_length() - 1), sharing)


@lru_cache(maxsize=1024)  # which is nearly the same for all lengths, and asked for again and again
def _best_mesh(spec: Spec, plan: Plan, machine: Machine, tokens: int, sharing: int) -> tuple[int, int] | None:
    try:
        best = choose(spec, plan, machine, tokens, sharing)[0]
    except PlanError:
        return None
    return best.ulysses, best.ring


def pass_seconds(spec: Spec, cluster: Cluster, plan: Plan, tokens: int, rows: int, mesh: tuple[int, int]) -> Seconds:
    """Of a pass over several sequences, none of which sees another."""
    return predict_seconds(spec, plan, cluster.gpu, cluster.machine, rows * tokens, *mesh, attended=tokens)


def _plans(recipe: str, tokens: int, sharing: int) -> Iterator[Plan]:
    """What a recipe may be told, from what computes least to what holds least."""
    if recipe == "sweep":
        for chunk in _chunks(tokens, sharing):
            yield Plan(recipe="sweep", chunk=chunk, tile=min(LOCAL_CHUNK, chunk))
        return
    for optimizer in ("device", "host"):
        for options in _options(recipe):
            yield Plan(recipe=recipe, optimizer=optimizer, **options)


def _chunks(tokens: int, sharing: int) -> list[int]:
    """From the largest that is of use on, each half of the one before. Ring ranks gather the queries of a whole chunk,
    so that among many of them only small ones fit."""
    largest = min(max(CHUNK, LOCAL_CHUNK * sharing), tokens)
    least = max(min(LEAST_CHUNK, largest // 8), min(SHORTEST, largest))
    return [chunk for halved in range(largest.bit_length()) if (chunk := largest >> halved) >= least]


def _options(recipe: str) -> list[dict[str, Any]]:
    if recipe == "untied":
        return [{"x": "device"}, {"x": "host"}]
    tile = {"tile": 8192}
    full = [{"checkpoint": "full", "x": x, **tile} for x in ("device", "host")]
    return [{"checkpoint": "none", "x": "device"}, {"checkpoint": "selective", "x": "device", **tile}, *full]


def fit(
    spec: Spec, cluster: Cluster, plan: Plan, tokens: int, ulysses: int, ring: int, shard: int, choices: list[Kept]
) -> Iterator[tuple[Plan, Memory]]:
    """The Plan in every way that it fits, from the fastest places on, with what it takes."""
    variants = _places(plan) if plan.sweeps and plan.kv is None else [plan]
    for variant in variants:
        fitted = _placed(spec, cluster, variant, tokens, ulysses, ring, shard, choices) if plan.sweeps else variant
        if fitted is None:
            continue
        memory = predict_memory(spec, fitted, tokens, ulysses, ring, shard)
        if memory.total <= cluster.capacity and memory.host <= cluster.of_host() and memory.disk <= cluster.of_disk():
            yield fitted, memory


def _places(plan: Plan) -> Iterator[Plan]:
    """Where what is small or read often may lie, from the fastest on."""
    for optimizer in ("device", "host"):
        for kv, lse in (("device", "device"), ("device", "host"), ("host", "host")):
            yield replace(plan, optimizer=optimizer, kv=kv, lse=lse)


def _placed(
    spec: Spec, cluster: Cluster, plan: Plan, tokens: int, ulysses: int, ring: int, shard: int, choices: list[Kept]
) -> Plan | None:
    """x and o of every layer in what all else leaves of GPU, host and disk."""
    least = predict_memory(spec, replace(plan, x="host", o="host", residual="host"), tokens, ulysses, ring, shard)
    device = cluster.capacity - least.total + device_bytes(least.tapes, least.tiles)
    states = least.host - host_bytes(least.tapes, least.tiles, gpu=True)
    host, disk = cluster.of_host() - states, cluster.of_disk()
    if device <= 0 or host < 0 or _least(spec, least) > device + host + disk:
        return None
    return try_place(plan, spec, tokens, device, host, disk, ulysses, ring, SCRATCH, choices)


def _least(spec: Spec, memory: Memory) -> int:
    """Bytes below which nothing can be placed: every o and a few x, or every x alone; and the gradient."""
    length, rows = memory.tiles.length, {need.name: need.row for need in memory.tapes}
    few = rows["o"] * spec.layers + rows["x"] * fewest_kept(spec.layers)
    return length * (min(few, rows["x"] * spec.layers) + rows["residual"])
