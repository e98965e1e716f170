"""The Plan and the mesh of a run that names none: the planner's answer for the ranks and the memory that are here."""

import math
from dataclasses import dataclass, replace

import torch

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_tokens
from ithaca.config import Config, MeshSection
from ithaca.model.spec import Spec
from ithaca.parallel.agree import least
from ithaca.parallel.mesh import Mesh
from ithaca.planner.hardware import RUNTIME, Cluster, nearest, read_gpus
from ithaca.planner.report import Question, explain, refusal
from ithaca.planner.search import binding, longest, search
from ithaca.plans.plan import Plan
from ithaca.schedule.variants import SHORTEST
from ithaca.tape.budget import host_budget

UNKNOWN = "A100-80GB"  # what a GPU that nobody knows is taken to be like

Chosen = tuple[Plan, MeshSection, list[str]]  # and what there is to say about it


@dataclass(frozen=True)
class Room:
    """Bytes of a GPU, and of a node's memory, that a run can have."""

    gpu: int
    host: int


def find_room(grid: Mesh) -> Room:
    """On the fullest GPU and the fullest node; every rank calls it."""
    free, total = torch.cuda.mem_get_info(grid.device) if grid.device.type == "cuda" else (0, 0)
    # What the driver took for this program is kept back by the planner (Cluster.capacity); what others hold is not
    return Room(*least(grid.group, min(total, free + RUNTIME), host_budget()[0]))


def choose_plan(config: Config, spec: Spec, grid: Mesh, tokens: int, room: Room) -> Chosen:
    """As the configuration has it; what it leaves open is chosen. The mesh is, where none of its options is given."""
    if config.plan is not None:
        return config.plan, config.mesh, []
    mesh = config.mesh
    if grid.device.type != "cuda" or tokens < SHORTEST:
        # Nothing to plan for: memory of a CPU is the host's, and nobody waits for its speed
        return Plan(recipe="dense" if mesh.ring * mesh.ulysses == 1 else "sweep"), mesh, []
    cluster = _here(grid, mesh.replicate, room)
    axes = None if mesh == MeshSection() else (mesh.ulysses, mesh.ring)
    given = config.train.micro_batch or config.train.batch
    sequences = -(-given // mesh.replicate) if given else None  # not given: one for those that share it
    answer = search(spec, cluster, tokens, mesh=axes, sequences=sequences)
    most = longest(spec, cluster)
    asked = Question(config.model.source, spec, cluster, tokens, None, running=True)
    if answer is None:
        raise PlanError(_refusal(asked, most, axes, given))
    lines = explain(asked, answer, most, binding(spec, cluster, None, most))
    if axes is None:
        mesh = replace(mesh, ulysses=answer.axes.ulysses, ring=answer.axes.ring)
    return answer.plan, mesh, lines


def _refusal(asked: Question, most: int, axes: tuple[int, int] | None, sequences: int | None) -> str:
    """Why nothing fits; where the length alone would, what else was asked for. `most`: of a sequence on all GPUs."""
    tokens, cluster = asked.tokens or most, asked.cluster
    given = [f"mesh.ulysses={axes[0]} and mesh.ring={axes[1]}"] if axes else []
    given += [f"{sequences} sequences in a pass"] if sequences and sequences > 1 else []
    if most < tokens:
        alone = ", with train.micro_batch=1 and without options of mesh" if given and most else ""
        return refusal(asked, most) + alone
    return (
        f"{format_tokens(tokens)} tokens of {asked.model} on {cluster.count}x{cluster.gpu.name} do not fit with "
        f"{', and '.join(given)}: train.micro_batch=1 without options of mesh does"
    )


def _here(grid: Mesh, copies: int, room: Room) -> Cluster:
    """The GPUs of one copy of the parameters, with their part of the nodes.

    Of the host's free memory, too, a part is kept back (Cluster.of_host): until the tapes are there, loading the model
    takes some.
    """
    properties = torch.cuda.get_device_properties(grid.device)
    known = read_gpus()
    try:
        gpu = nearest(properties.name, properties.total_memory, known)
    except PlanError:
        # Which Plan is fastest depends little on the rates, and whether it fits not at all
        like, why = known[UNKNOWN], f"assumed as of the {UNKNOWN}: {properties.name} is in no table"
        gpu = replace(like, name=properties.name, sources=dict.fromkeys(like.sources, why))
    count, node = grid.size // copies, grid.node_ranks or grid.size
    gpus = math.gcd(count, node)
    return Cluster(count, replace(gpu, memory=float(room.gpu)), room.host * gpus / node, node_gpus=gpus)
