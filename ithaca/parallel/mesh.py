"""The ranks of a job as a grid: replicate × shard × ring × ulysses, the last axis within a node.

`ring` and `ulysses` together are the context ranks, which share one sequence; `replicate` and `shard` together are the
data ranks, which take different sequences. Parameters are cut over shard × ring × ulysses and copied over replicate.
"""

import atexit
import math
import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ithaca.base.errors import PlanError
from ithaca.parallel.agree import same_everywhere


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, seen from one of them."""

    replicate: int
    shard: int
    ring: int
    ulysses: int
    rank: int
    device: torch.device
    parameters: DeviceMesh  # shard · ring · ulysses, what FSDP2 cuts over; before it replicate, if more than one
    group: dist.ProcessGroup  # all ranks of the grid
    ulysses_group: dist.ProcessGroup | None = None  # None: of one rank; so for the others
    ring_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None  # all that share this rank's sequence
    node_ranks: int | None = None  # how many of the job's ranks this node has; None: all

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.ring * self.ulysses

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that collectives of this grid go over, each once."""
        context = (self.ulysses_group, self.ring_group, self.context_group)
        used = (self.group, *self.parameters.get_all_groups(), *(group for group in context if group is not None))
        return list(dict.fromkeys(used))

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def several_nodes(self) -> bool:
        return self.node_ranks is not None and self.node_ranks < self.size

    @property
    def first_on_node(self) -> bool:
        """Whether this rank may speak for its node; nodes are taken to have the same number of ranks."""
        return self.rank % (self.node_ranks or self.size) == 0

    @property
    def context_ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        return self.rank // self.context_ranks

    @property
    def context_rank(self) -> int:
        return self.rank % self.context_ranks

    @property
    def parameter_ranks(self) -> int:
        return self.shard * self.ring * self.ulysses

    @property
    def parameter_rank(self) -> int:
        return self.rank % self.parameter_ranks


def mesh(
    *,
    ulysses: int = 1,
    ring: int = 1,
    shard: int | None = None,
    replicate: int = 1,
    device: str | None = None,
) -> Mesh:
    """Lay a grid over this job's ranks; `shard` takes what the other axes leave when it is not given.

    Joins the job (torchrun's environment) where that was not done yet. `device` is 'cuda' where there is one, else
    'cpu'.
    """
    place = _device(device)
    _join(place)
    world = dist.get_world_size()
    given = {"replicate": replicate, "ring": ring, "ulysses": ulysses}
    for name, size in given.items() | ({"shard": shard}.items() if shard is not None else set()):
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{name}={size} is not a number of ranks: 1 or more is")
    others = replicate * ring * ulysses
    if shard is None:
        if world % others:
            product = " × ".join(f"{name} {size}" for name, size in given.items())
            fitting = ", ".join(str(count) for count in range(1, world + 1) if world % count == 0)
            raise PlanError(f"{product} is {others}, which does not divide the job's {world} ranks: {fitting} would")
        shard = world // others
    if others * shard != world:
        product = f"replicate {replicate} × shard {shard} × ring {ring} × ulysses {ulysses}"
        fitting = f"; shard={world // others} would fit" if world % others == 0 else ""
        raise PlanError(f"{product} is {others * shard}, but the job has {world} ranks{fitting}")
    assert dist.group.WORLD is not None
    if "cpu" not in dist.get_backend_config():
        raise PlanError(
            f"torch.distributed was begun with {dist.get_backend_config()} alone, and ranks also agree in host memory: "
            "begin it with 'cpu:gloo,cuda:nccl', or leave that to ithaca.mesh"
        )
    same_everywhere(dist.group.WORLD, "mesh", (replicate, shard, ring, ulysses, place.type))
    sizes = {"parameters": world} if replicate == 1 else {"replicate": replicate, "parameters": world // replicate}
    parameters = _grid(dist.group.WORLD, place.type, **sizes)
    axes = {name: size for name, size in (("ring", ring), ("ulysses", ulysses)) if size > 1}
    groups = _context_groups(dist.group.WORLD, place.type, **axes)
    return Mesh(
        replicate,
        shard,
        ring,
        ulysses,
        dist.get_rank(),
        place,
        parameters,
        dist.group.WORLD,
        **groups,
        node_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
    )


def describe_crossing(mesh: Mesh, rings: bool) -> list[str]:
    """What all-to-alls pay where the Ulysses ranks of a sequence lie on several nodes, and how they need not."""
    here, ulysses = mesh.node_ranks, mesh.ulysses
    if here is None or not mesh.several_nodes or here % ulysses == 0:
        return []
    nodes = max((first + ulysses - 1) // here - first // here + 1 for first in range(0, mesh.size, ulysses))
    inside = math.gcd(ulysses, here)
    recipe = "" if rings else "plan.recipe=sweep, "
    return [
        f"the {ulysses} Ulysses ranks of a sequence lie on {nodes} nodes of {here} ranks: their all-to-alls cross "
        f"nodes; {recipe}mesh.ulysses={inside} and mesh.ring={mesh.ring * ulysses // inside} would keep them inside"
    ]


def alone(device: str | None = None) -> Mesh:
    """A grid of this process only, also within a larger job; outside of one it starts a job of one rank."""
    place = _device(device)
    if not dist.is_initialized():
        _start_alone(place)
    assert dist.group.WORLD is not None
    group, parameters = _alone(dist.group.WORLD, place.type)
    return Mesh(1, 1, 1, 1, 0, place, parameters, group)


# Groups are made once for a job and shared by all its meshes: each has threads and sockets of its own, for good


@lru_cache
def _grid(job: dist.ProcessGroup, device: str, **sizes: int) -> DeviceMesh:  # noqa: ARG001
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _context_groups(job: dist.ProcessGroup, device: str, **axes: int) -> dict[str, dist.ProcessGroup]:
    """One for each axis along which a sequence is shared, and one for all that share it."""
    context = math.prod(axes.values())
    others = dist.get_world_size(job) // context
    grid = _grid(job, device, others=others, **axes) if axes else None
    groups = {f"{name}_group": grid.get_group(name) for name in axes} if grid else {}
    if len(axes) == 1:
        (groups["context_group"],) = groups.values()
    elif axes:
        groups["context_group"] = _grid(job, device, others=others, context=context).get_group("context")
    return groups


@lru_cache
def _alone(job: dist.ProcessGroup, device: str) -> tuple[dist.ProcessGroup, DeviceMesh]:  # noqa: ARG001
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group, DeviceMesh.from_group(group, device, mesh_dim_names=("parameters",))


def host_mesh(parameters: DeviceMesh) -> DeviceMesh:
    """The same ranks, for tensors in host memory. Nothing collective: the groups are those that are there."""
    groups = parameters.get_all_groups()
    return DeviceMesh.from_group(groups, "cpu", parameters.mesh, mesh_dim_names=parameters.mesh_dim_names)


def _device(name: str | None) -> torch.device:
    if name not in (None, "cpu", "cuda"):
        raise PlanError(f"device '{name}' is not known: 'cuda' and 'cpu' are")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("device 'cuda' was asked for, but there is no CUDA GPU here: use 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if local >= count:
        raise PlanError(f"this is rank {local} of its node, but the node has {count} GPUs: start {count} ranks")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(device: torch.device) -> None:
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(_backend(device))
            atexit.register(_leave)
        else:
            _start_alone(device)


def _start_alone(device: torch.device) -> None:
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    """A job that was joined here is left here; NCCL complains of one that is not."""
    if dist.is_initialized():
        dist.destroy_process_group()
