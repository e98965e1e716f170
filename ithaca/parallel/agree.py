"""Ranks that agree before they go on: a mistake on one rank is the same error on all, never a hang."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ithaca.errors import IthacaError, PlanError
from ithaca.parallel.mesh import Mesh

Result = TypeVar("Result")


def together(mesh: Mesh, work: Callable[[], Result]) -> Result:
    """Do `work` on every rank; when it fails for a user's reason on one, raise that reason on all."""
    result: Any = None
    problem: IthacaError | None = None
    try:
        result = work()
    except IthacaError as error:
        problem = error
    for rank, other in enumerate(_gather(mesh, problem)):
        if other is not None:
            raise problem or type(other)(f"rank {rank}: {other}")
    return result


def same_everywhere(mesh: Mesh, what: str, value: object) -> None:
    """Compare a value's text over the ranks before the first collective that depends on it."""
    digests = _gather(mesh, hashlib.sha256(repr(value).encode()).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise PlanError(f"rank {odd[0]} has another {what} than rank 0: every rank must be given the same")


def _gather(mesh: Mesh, item: Any) -> list[Any]:
    items: list[Any] = [None] * mesh.size
    dist.all_gather_object(items, item, group=mesh.group)
    return items
