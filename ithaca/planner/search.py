"""The fastest Plan that fits some GPUs, and the longest context that does.

For each number of GPUs that can share a sequence, on its best mesh (meshes.py), every recipe that is allowed is given
what there is: under `sweep` x and o of each layer go to the fastest place that has room (plans/fill.py), and only what
has room in none is made again; the other recipes are tried from what computes least to what holds least. What fits
(memory.py) is compared by tokens a second (seconds.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ithaca.errors import PlanError
from ithaca.model.spec import Spec
from ithaca.planner.hardware import Gpu
from ithaca.planner.machine import MOST_GPUS, Machine
from ithaca.planner.memory import Memory, predict_memory
from ithaca.planner.meshes import choose
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.fill import Kept, every_choice, least_choices, some_choices, try_place
from ithaca.plans.needs import device_bytes, host_bytes
from ithaca.plans.places import RECOMPUTE
from ithaca.plans.plan import CHUNK, Plan
from ithaca.plans.rebuild import fewest_kept

RUNTIME = 1_500_000_000  # bytes of a GPU that the driver and NCCL take: assumed
MARGIN = 0.04  # of a GPU, by which a prediction may be off (bench/results/rehearsals-fresh.json)
KEPT_BACK = 0.05  # of a node's memory, for the programs themselves (tape/budget.py)
LOCAL_CHUNK = 8192  # tokens of a rank from which on its matrix products run at their best
LEAST_CHUNK = CHUNK // 8  # tokens; what a still smaller one would save is little
LONGEST = 2**32  # tokens
STEP = 2**16  # tokens by which the longest context is told
SAME = 1.02  # rates within that are no difference
PREFERRED = ("sweep", "dense", "ulysses", "untied", "hybrid", "ring", "alst")
SCRATCH = "/scratch"  # a folder on the disk, for the user to replace
SHORTEST = 128  # tokens: a tile of attention
MORE = (1.1, 2.0)  # times what there is, by which it is seen what helps


@dataclass(frozen=True)
class Cluster:
    """The GPUs that are planned for, with what their nodes have; `host` and `disk` are bytes of a node."""

    count: int
    gpu: Gpu
    host: float
    disk: float = 0.0
    node_gpus: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST_GPUS:
            raise PlanError(f"--gpus {self.count}x{self.gpu.name} cannot be planned for: 1 to {MOST_GPUS} GPUs can")
        if self.count > self.node_gpus and self.count % self.node_gpus:
            below = self.count - self.count % self.node_gpus
            raise PlanError(
                f"--gpus {self.count}x{self.gpu.name} does not fill nodes of {self.node_gpus} GPUs: {below} or "
                f"{below + self.node_gpus} do, or say how many a node has with --node-gpus"
            )

    @property
    def machine(self) -> Machine:
        nodes = max(self.count // self.node_gpus, 1)
        return Machine(nodes=nodes, gpus=self.count // nodes, inside=self.gpu.inside, across=self.gpu.across)

    @property
    def capacity(self) -> int:
        """Bytes of a GPU that a Plan may be predicted to take."""
        return max(int((1 - MARGIN) * self.gpu.memory) - RUNTIME, 0)

    def of_host(self) -> int:
        """Bytes of its node's memory that a rank may take."""
        return int((1 - KEPT_BACK) * self.host / self.machine.gpus)

    def of_disk(self) -> int:
        return int(self.disk / self.machine.gpus)


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


def search(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str | None = None,
    mesh: tuple[int, int] | None = None,
    sequences: int | None = None,
) -> Answer | None:
    """The fastest for this length; None where nothing fits.

    `mesh`: ulysses × ring that share a sequence, where that is settled. `sequences`: of a pass, over all GPUs; not
    given: one for those that share it. There must be one for each of those.
    """
    if not SHORTEST <= tokens <= LONGEST:
        raise PlanError(f"--tokens {tokens} cannot be planned for: {SHORTEST}, a tile of attention, to {LONGEST} can")
    found: list[Answer] = []
    for sharing in _divisors(cluster.count) if mesh is None else [mesh[0] * mesh[1]]:
        shard = cluster.count // sharing
        if mesh is None and sequences is not None and shard > sequences:
            continue
        rows = -(-(sequences or 1) // shard)
        if answer := _best_of(spec, cluster, tokens, sharing, recipe, mesh, rows):
            found.append(replace(answer, sequences=sequences or shard))
        if len(found) > 1 and found[-1].rate <= found[-2].rate:
            break  # with more GPUs to a sequence there is now only more to exchange
    best = _preferred(found)
    return best and _refined(spec, cluster, best)


def _refined(spec: Spec, cluster: Cluster, answer: Answer) -> Answer:
    """The same with every choice of what is kept."""
    if not answer.plan.sweeps:
        return answer
    mesh = answer.ulysses, answer.ring
    settled = replace(answer.plan, x=None, o=None, gradient=None, disk=None)
    every = every_choice(spec.layers)
    fitted = next(_fit(spec, cluster, settled, answer.rows * answer.tokens, *mesh, answer.shard, every), None)
    if fitted is None:
        return answer
    seconds = _seconds(spec, cluster, fitted[0], answer.tokens, answer.rows, mesh)
    return replace(answer, plan=fitted[0], memory=fitted[1], seconds=seconds)


def _seconds(spec: Spec, cluster: Cluster, plan: Plan, tokens: int, rows: int, mesh: tuple[int, int]) -> Seconds:
    """Of a pass over several sequences, none of which sees another."""
    return predict_seconds(spec, plan, cluster.gpu, cluster.machine, rows * tokens, *mesh, attended=tokens)


def longest(
    spec: Spec, cluster: Cluster, recipe: str | None = None, recomputing: bool = False, from_: int = STEP
) -> int:
    """The most tokens, in whole `STEP`s, that fit when all GPUs that can share a sequence; where not even one does, the
    nearest half, quarter … of it, or 0.

    Under `sweep` attention runs once, unless `recomputing` is allowed. `from_`: a length that is known to fit.
    """
    plan = Plan(recipe=recipe or "sweep")
    sizes = [*reversed(_divisors(cluster.count))] if plan.shares else [1]
    choices = least_choices(spec.layers, recomputing)

    def fits(tokens: int) -> bool:
        meshes = (_mesh(spec, cluster, plan, tokens, sharing) for sharing in sizes)
        mesh = next((mesh for mesh in meshes if mesh), None)
        return next(_fitting(spec, cluster, tokens, plan.recipe, mesh, choices), None) is not None

    low, most = max(from_ // STEP, 1), LONGEST // STEP
    if not fits(low * STEP):
        return next((tokens for tokens in _halves(STEP) if fits(tokens)), 0)
    high, growth = low, 2 if low == 1 else 1.2
    while high < most and fits((high := min(int(high * growth) + 1, most)) * STEP):
        low = high
    while high - low > max(low // 256, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def _halves(tokens: int) -> list[int]:
    return [tokens >> halved for halved in range(1, tokens.bit_length()) if tokens >> halved >= SHORTEST]


def binding(spec: Spec, cluster: Cluster, recipe: str | None, most: int) -> str:
    """Which of GPU, host and disk keeps the context from being longer: that of which a tenth more helps most, or,
    where that is less than a step, twice as much. None of them does where no more can be planned for."""
    if most == LONGEST:
        return "planner"
    found: dict[str, int] = {}
    for share in MORE:
        more = {
            "GPU": replace(cluster, gpu=replace(cluster.gpu, memory=cluster.gpu.memory * share)),
            "host": replace(cluster, host=cluster.host * share),
            "disk": replace(cluster, disk=cluster.disk * share),
        }
        found = {name: longest(spec, other, recipe, from_=max(most, STEP)) for name, other in more.items()}
        if max(found.values()) > most:
            break
    return max(found, key=lambda name: found[name])


def _best_of(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    sharing: int,
    recipe: str | None,
    mesh: tuple[int, int] | None,
    rows: int,
) -> Answer | None:
    """The fastest when so many GPUs share a sequence."""
    names = [recipe] if recipe else [name for name in PREFERRED if _suits(Plan(recipe=name), sharing, mesh)]
    meshes = {name: mesh or _mesh(spec, cluster, Plan(recipe=name), tokens, sharing) for name in names}
    some = some_choices(spec.layers)
    found = (answer for name in names for answer in _fitting(spec, cluster, tokens, name, meshes[name], some, rows))
    return _preferred([*found])


def _suits(plan: Plan, sharing: int, mesh: tuple[int, int] | None) -> bool:
    """Whether a recipe is worth a try when so many share a sequence."""
    if sharing == 1:
        return plan.recipe in ("sweep", "dense")
    return plan.shares and (mesh is None or ((mesh[0] == 1 or plan.shares_heads) and (mesh[1] == 1 or plan.rings)))


def _preferred(answers: list[Answer]) -> Answer | None:
    """The fastest; of those as fast, the recipe that is preferred."""
    fastest = max((answer.rate for answer in answers), default=0.0)
    good = (answer for answer in answers if answer.rate * SAME >= fastest)
    return min(good, key=lambda answer: (PREFERRED.index(answer.plan.recipe), -answer.rate), default=None)


def _fitting(
    spec: Spec,
    cluster: Cluster,
    tokens: int,
    recipe: str,
    mesh: tuple[int, int] | None,
    choices: list[Kept],
    rows: int = 1,
) -> Iterator[Answer]:
    if mesh is None:
        return
    sharing = mesh[0] * mesh[1]
    shard = cluster.count // sharing
    for plan in _plans(recipe, rows * tokens, sharing):
        for fitted, memory in _fit(spec, cluster, plan, rows * tokens, *mesh, shard, choices):
            seconds = _seconds(spec, cluster, fitted, tokens, rows, mesh)
            answer = Answer(fitted, tokens, *mesh, shard, rows, rows * shard, memory, seconds)
            yield answer
            if recipe == "sweep" and not answer.recomputed(spec):
                return  # what holds less is no faster


def _mesh(spec: Spec, cluster: Cluster, plan: Plan, tokens: int, sharing: int) -> tuple[int, int] | None:
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


def _fit(
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
    least = predict_memory(spec, replace(plan, x="host", o="host", gradient="host"), tokens, ulysses, ring, shard)
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
    return length * (min(few, rows["x"] * spec.layers) + rows["gradient"])


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
