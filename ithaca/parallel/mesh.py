"""The ranks of a job as a grid with the axes replicate × shard × ring × ulysses × tensor.

`ring`, `ulysses` and `tensor` together are the context ranks, which share one sequence. `replicate` and `shard` are the
data ranks, which take different sequences. FSDP2 cuts parameters over shard × ring × ulysses and copies them over
replicate. Tensor ranks have different parameters (tensor_parts.py). Tensor or Ulysses ranks have neighbouring numbers,
so they lie within a node where a node has enough ranks.
"""

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ithaca.base.errors import PlanError
from ithaca.base.sizes import nearest_divisors
from ithaca.base.torch_private import abort_groups
from ithaca.parallel.agree import same_everywhere
from ithaca.parallel.axes import Axes
from ithaca.parallel.hangs import answering, set_timeout
from ithaca.parallel.joining import TORCH_SECONDS, checked_seconds, join_job
from ithaca.parallel.nccl import SHARES, prepare_sharing


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, seen from one of them."""

    axes: Axes
    rank: int
    device: torch.device
    parameters: DeviceMesh  # shard · ring · ulysses, which FSDP2 cuts over; before it replicate, if more than one
    group: dist.ProcessGroup  # all ranks of the grid
    ulysses_group: dist.ProcessGroup | None = None  # None: a group of one rank; likewise the next three
    ring_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None  # all ranks that share this rank's sequence
    node_ranks: int | None = None  # how many of the job's ranks this node has; None: all

    @property
    def replicate(self) -> int:
        return self.axes.replicate

    @property
    def shard(self) -> int:
        return self.axes.shard

    @property
    def ring(self) -> int:
        return self.axes.ring

    @property
    def ulysses(self) -> int:
        return self.axes.ulysses

    @property
    def tensor(self) -> int:
        return self.axes.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.axes.tensor

    @property
    def head_rank(self) -> int:
        """This rank's number among the ranks that divide the heads."""
        return self.rank % self.axes.by_heads

    @property
    def size(self) -> int:
        return self.axes.size

    @property
    def context_ranks(self) -> int:
        return self.axes.context

    @property
    def context_rank(self) -> int:
        return self.rank % self.axes.context

    @property
    def data_ranks(self) -> int:
        return self.axes.data

    @property
    def data_rank(self) -> int:
        return self.rank // self.axes.context

    @property
    def parameter_ranks(self) -> int:
        return self.axes.parameter

    @property
    def parameter_rank(self) -> int:
        return self.rank // self.axes.tensor % self.axes.parameter

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that collectives of this grid use, each once."""
        context = (self.ulysses_group, self.ring_group, self.tensor_group, self.context_group)
        used = (self.group, *self.parameters.get_all_groups(), *(group for group in context if group is not None))
        return list(dict.fromkeys(used))

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def gpu_ranks(self) -> int:
        """Ranks that share this rank's GPU, itself among them."""
        return -(-(self.node_ranks or self.size) // torch.cuda.device_count()) if self.gpu else 1

    @property
    def several_nodes(self) -> bool:
        return self.node_ranks is not None and self.node_ranks < self.size

    @property
    def first_on_node(self) -> bool:
        """Whether this rank is the first of its node. Every node is assumed to have the same number of ranks."""
        return self.rank % (self.node_ranks or self.size) == 0


def mesh(
    *,
    ulysses: int = 1,
    ring: int = 1,
    tensor: int = 1,
    shard: int | None = None,
    replicate: int = 1,
    device: str | None = None,
    timeout: float | None = None,
    share_gpus: bool = False,
) -> Mesh:
    """Lay a grid over this job's ranks. Without `shard`, that axis takes the ranks that the others leave.

    Joins the job (torchrun's environment) if this process has not joined one. `device` is 'cuda' or 'cpu'; without it,
    'cuda' is used where there is a GPU. `timeout` is how many seconds to wait for the other ranks; without it, five
    minutes. A rank that does not come, or ends meanwhile, raises a LostRankError on the others. `share_gpus` lets a
    node have more ranks than GPUs, which then take turns.
    """
    seconds, place = checked_seconds(timeout), _device(device, share_gpus)
    joined = _join(place, seconds)
    assert dist.group.WORLD is not None
    with answering(dist.group.WORLD):
        asked = {"replicate": replicate, "shard": shard, "ring": ring, "ulysses": ulysses, "tensor": tensor}
        made = _make_mesh(asked, place, seconds)
    if joined:
        set_timeout([dist.group.WORLD], TORCH_SECONDS)
    return made


def _make_mesh(asked: dict[str, int | None], place: torch.device, seconds: float) -> Mesh:
    axes = _fitted(asked, dist.get_world_size())
    assert dist.group.WORLD is not None
    if "cpu" not in dist.get_backend_config():
        raise PlanError(
            f"torch.distributed was begun with {dist.get_backend_config()} alone, and ranks also agree in host memory: "
            "begin it with 'cpu:gloo,cuda:nccl', or leave that to ithaca.mesh"
        )
    same_everywhere(dist.group.WORLD, "mesh", (axes, place.type))
    return Mesh(
        axes,
        dist.get_rank(),
        place,
        _parameter_mesh(place.type, seconds, axes),
        dist.group.WORLD,
        **_context_groups(place.type, seconds, axes),
        node_ranks=_node_ranks(axes.size),
    )


def _node_ranks(ranks: int) -> int:
    """Ranks on this node; `ranks` if the environment does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _fitted(asked: dict[str, int | None], world: int) -> Axes:
    """The axes that were asked for, over all ranks of the job. None stands for the ranks that the others leave."""
    named = {name: 1 if size is None else size for name, size in asked.items()}
    for name, size in named.items():
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{name}={size} is not a number of ranks: 1 or more is")
    axes = Axes(**named)
    if axes.ulysses > 1 and axes.tensor > 1:
        raise PlanError(
            f"ulysses={axes.ulysses} and tensor={axes.tensor} both divide the heads among ranks: set one of them to 1; "
            f"tensor={axes.by_heads} or ulysses={axes.by_heads} takes as many ranks"
        )
    others = axes.size // axes.shard
    if asked["shard"] is None:
        if world % others:
            fitting = nearest_divisors(world, others)
            raise PlanError(
                f"{_options(axes)} needs {others} ranks, which do not divide the job's {world}: {fitting} would, and "
                f"so would a job of {others} (--ranks {others})"
            )
        return replace(axes, shard=world // others)
    if axes.size != world:
        fitting = f", and so would mesh.shard={world // others}" if world % others == 0 else ""
        raise PlanError(
            f"{_options(axes)} needs {axes.size} ranks, but the job has {world}: a job of {axes.size} "
            f"(--ranks {axes.size}) would fit{fitting}"
        )
    return axes


def _options(axes: Axes) -> str:
    """The axes with more than one rank, as a configuration names them: 'mesh.ring=2 × mesh.ulysses=4'."""
    return " × ".join(f"mesh.{name}={size}" for name, size in vars(axes).items() if size > 1)


def describe_crossing(mesh: Mesh, rings: bool) -> list[str]:
    """A warning if messages between heads cross nodes, with axes that keep them inside.

    `rings`: the recipe can use a ring.
    """
    here, ranks = mesh.node_ranks, mesh.axes.by_heads
    if here is None or not mesh.several_nodes or here % ranks == 0:
        return []
    nodes = max((first + ranks - 1) // here - first // here + 1 for first in range(0, mesh.size, ranks))
    inside = math.gcd(ranks, here)
    kind, sent = ("tensor", "gathers and sums") if mesh.tensor > 1 else ("Ulysses", "all-to-alls")
    recipe = "" if rings else "plan.recipe=sweep, "
    return [
        f"the {ranks} {kind} ranks of a sequence lie on {nodes} nodes of {here} ranks, so their {sent} cross nodes; "
        f"{recipe}mesh.{kind.lower()}={inside} and mesh.ring={mesh.ring * ranks // inside} would keep them inside"
    ]


def alone(device: str | None = None) -> Mesh:
    """A grid of this process only, even within a larger job. Without a job, it starts one of one rank."""
    place = _device(device)
    if not dist.is_initialized():
        _start_alone(place)

    def make() -> list[dist.ProcessGroup]:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return [group]

    (group,) = _made_once("alone", make)
    return Mesh(Axes(), 0, place, DeviceMesh.from_group(group, place.type, mesh_dim_names=("parameters",)), group)


def host_mesh(parameters: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks for tensors in host memory. Not collective: it uses the groups that exist."""
    groups = parameters.get_all_groups()
    return DeviceMesh.from_group(groups, "cpu", parameters.mesh, mesh_dim_names=parameters.mesh_dim_names)


# Groups have threads and sockets of their own until the job ends, so all meshes of a job share them. torch owns them;
# here are only weak references, so that they end with the job.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, list[weakref.ref[dist.ProcessGroup]]]]
_made = weakref.WeakKeyDictionary()


def _made_once(key: object, make: Callable[[], list[dist.ProcessGroup]]) -> list[dist.ProcessGroup]:
    """The groups that `make` made for this key in this job."""
    assert dist.group.WORLD is not None
    of_job = _made.setdefault(dist.group.WORLD, {})
    groups = [group for ref in of_job.get(key, ()) if (group := ref()) is not None]
    if not groups:
        groups = make()
        of_job[key] = [weakref.ref(group) for group in groups]
    return groups


def _device_mesh(device: str, seconds: float, **sizes: int) -> DeviceMesh:
    """A torch DeviceMesh over all ranks of the job. `seconds` is how long ranks wait for each other to make it."""
    shape, names = tuple(sizes.values()), tuple(sizes)
    ranks = torch.arange(math.prod(shape)).view(shape)
    groups = _made_once(
        (device, *sizes.items()), lambda: [_group_along(ranks, axis, name, seconds) for axis, name in enumerate(names)]
    )
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def _parameter_mesh(device: str, seconds: float, axes: Axes) -> DeviceMesh:
    """The ranks that FSDP2 cuts parameters over and, if there are copies, averages gradients over."""
    copies = {} if axes.replicate == 1 else {"replicate": axes.replicate}
    sizes = {**copies, "parameters": axes.parameter}
    if axes.tensor == 1:
        return _device_mesh(device, seconds, **sizes)
    grid = _device_mesh(device, seconds, **sizes, tensor=axes.tensor)
    groups, ranks = grid.get_all_groups()[:-1], grid.mesh[..., dist.get_rank() % axes.tensor]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=tuple(sizes))


def _group_along(ranks: torch.Tensor, axis: int, name: str, seconds: float) -> dist.ProcessGroup:
    """This rank's group along an axis of a grid of all ranks, as init_device_mesh makes it, which has no timeout."""
    assert dist.group.WORLD is not None
    own = dist.group.WORLD
    if ranks.shape[axis] == dist.get_world_size():
        return own
    for row in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
        # Every rank takes part in making every group
        group = dist.new_group(row, timeout=timedelta(seconds=seconds), group_desc=f"mesh_{name}")
        if dist.get_rank() in row:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    set_timeout([own], TORCH_SECONDS)
    return own


def _context_groups(device: str, seconds: float, axes: Axes) -> dict[str, dist.ProcessGroup]:
    """A group for each axis along which a sequence is shared, and one for all ranks that share it."""
    sizes = {"ring": axes.ring, "ulysses": axes.ulysses, "tensor": axes.tensor}
    shared = {name: size for name, size in sizes.items() if size > 1}
    if not shared:
        return {}
    grid = _device_mesh(device, seconds, data=axes.data, **shared)
    groups = {f"{name}_group": grid.get_group(name) for name in shared}
    if len(shared) == 1:
        (groups["context_group"],) = groups.values()
    else:
        whole = _device_mesh(device, seconds, data=axes.data, context=axes.context)
        groups["context_group"] = whole.get_group("context")
    return groups


def _device(name: str | None, share: bool = False) -> torch.device:
    if name not in (None, "cpu", "cuda"):
        raise PlanError(f"device '{name}' is not known: 'cuda' and 'cpu' are")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("device 'cuda' was asked for, but there is no CUDA GPU here: use 'cpu'")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    share = share or os.environ.get(SHARES) == "1"  # set by this process before, or by its user
    if local >= count and not share:
        raise PlanError(
            f"this is rank {local} of its node, but the node has {count} GPUs: start {count} ranks, or let ranks share "
            "a GPU with run.share_gpus=true, share_gpus=True of ithaca.mesh, or --share-gpus of ithaca doctor"
        )
    if share and _node_ranks(1) > count:
        prepare_sharing(count)
    torch.cuda.set_device(local % count)
    return torch.device("cuda", local % count)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _join(device: torch.device, seconds: float) -> bool:
    """Join the job, unless this process has done so. Return whether it did it here."""
    if dist.is_initialized():
        return False
    if "RANK" in os.environ:
        join_job(_backend(device), seconds)
        atexit.register(_leave)
    else:
        _start_alone(device)
    return True


def _start_alone(device: torch.device) -> None:
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_leave)


def _leave() -> None:
    """Leave the job when Python ends; NCCL warns of a job that is not left.

    After an error that nobody caught, other ranks may still be in a message, and NCCL would wait for them for ever.
    """
    if not dist.is_initialized():
        return
    if hasattr(sys, "last_value"):  # Python sets it when it prints such an error
        abort_groups()
    else:
        dist.destroy_process_group()
