"""Agreement between ranks: a mistake on one rank becomes an error on all of them, never a hang."""

import hashlib
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ithaca.base.errors import InputError, IthacaError, PlanError, RunError

Result = TypeVar("Result")
Told = TypeVar("Told")


def together(group: dist.ProcessGroup, work: Callable[[], Result]) -> Result:
    """Do `work` on every rank. If it fails on one, raise on all; a user's mistake keeps its class."""
    return together_with(group, work, lambda _: None)[0]


def together_with(
    group: dist.ProcessGroup, work: Callable[[], Result], tell: Callable[[Result], Told]
) -> tuple[Result, list[Told]]:
    """As `together`, and `tell(result)` of every rank in the order of the ranks; it must be picklable."""
    result: Any = None
    problem: Exception | None = None
    told: Any = None
    try:
        result = work()
        told = tell(result)
    except Exception as error:
        problem = error
    found = _gather(group, (_portable(problem), told))
    for rank, (other, _) in enumerate(found):
        if other is not None:
            raise problem or _error_of_rank(rank, other)
    return result, [theirs for _, theirs in found]


def from_first(group: dist.ProcessGroup, work: Callable[[], Result]) -> Result:
    """Do `work` on the first rank only. Every rank gets its result, which must be picklable, or its error."""
    first = dist.get_rank(group) == 0
    box = [together(group, lambda: work() if first else None)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]  # pyrefly: ignore


def same_everywhere(group: dist.ProcessGroup, what: str, value: object) -> None:
    """Raise PlanError unless all ranks have the same value (compared by repr)."""
    digests = _gather(group, hashlib.sha256(repr(value).encode()).hexdigest())
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise PlanError(f"rank {odd[0]} has another {what} than rank 0: every rank must be given the same")


def same_batch(group: dist.ProcessGroup, batch: tuple[int, int], *signs: bool) -> list[bool]:
    """Raise InputError unless all ranks have the same batch; return, for each sign, whether it is True on any rank.

        `batch` is the batch's fingerprint and the number of valid tokens that its loss is divided by. One small
        collective on the
    host, which waits for no device, so that it can run before every pass.
    """
    tensor = torch.tensor([*batch, *(-number for number in batch), *map(int, signs)])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    numbers = tensor.tolist()
    if numbers[0] != -numbers[2]:
        raise InputError("the ranks were given different batches: model.shard needs the same whole batch on every rank")
    if numbers[1] != -numbers[3]:
        raise InputError("the ranks were given different valid_tokens: every rank must be given the same number")
    return [bool(number) for number in numbers[4:]]


def ranks_without(group: dist.ProcessGroup, has: bool) -> list[int]:
    """The ranks whose `has` is False. Collective."""
    return [rank for rank, theirs in enumerate(_gather(group, has)) if not theirs]


def least(group: dist.ProcessGroup, *amounts: int) -> list[int]:
    """The smallest of each amount over the ranks."""
    return [min(theirs) for theirs in zip(*_gather(group, amounts), strict=True)]


def on_this_node(group: dist.ProcessGroup, amount: int) -> tuple[int, int]:
    """The sum of an amount over the ranks on this node, and the number of those ranks.

    Processes are counted, not ranks: in a rehearsal (loopback.py) one process stands for all ranks.
    """
    here, me = socket.gethostname(), os.getpid()
    amounts = {process: theirs for node, process, theirs in _gather(group, (here, me, amount)) if node == here}
    return sum(amounts.values()), len(amounts)


def first_then_others(group: dist.ProcessGroup, what: object, work: Callable[[], None]) -> None:
    """Do `work` on one rank of each node for each `what` (compared by repr), and then on the others.

    Ranks that need the same file find it made by the first. An error on one rank is raised on all.
    """
    place = socket.gethostname(), repr(what)
    first = _gather(group, place).index(place) == dist.get_rank(group)
    together(group, lambda: work() if first else None)
    together(group, lambda: None if first else work())


def _portable(problem: Exception | None) -> tuple[type[IthacaError], str] | None:
    if problem is None:
        return None
    if isinstance(problem, IthacaError):
        return type(problem), str(problem)
    return RunError, f"{type(problem).__name__}: {problem}"


def _error_of_rank(rank: int, problem: tuple[type[IthacaError], str]) -> IthacaError:
    """Another rank's error, with its number. Rank 0's input errors have none: often rank 0 checks input for all."""
    kind, text = problem
    return kind(text) if rank == 0 and not issubclass(kind, RunError) else kind(f"rank {rank}: {text}")


def _gather(group: dist.ProcessGroup, item: Any) -> list[Any]:
    items: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(items, item, group=group)
    return items
