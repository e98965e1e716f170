"""What a pass sends and copies, counted where it happens; and what the schedule's cost says of the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import ithaca
from ithaca.parallel.batch import Batch
from ithaca.parallel.collectives import Group
from ithaca.schedule.costs import Copies, Peers, Traffic, traffic
from ithaca.tape.disk import Disk


class Sent:
    """Collectives of this rank, and the bytes of theirs that leave it."""

    def __init__(self) -> None:
        self._total = Traffic(0, 0)

    def add(self, leaving: int) -> None:
        self._total += Traffic(1, leaving)

    def take(self) -> Traffic:
        """What was sent since the last call."""
        found, self._total = self._total, Traffic(0, 0)
        return found


@contextmanager
def counting_messages() -> Iterator[Sent]:
    """Count what leaves this rank over Ulysses, ring and tensor ranks. FSDP2's own messages are not among it."""
    sent = Sent()

    def counted(name: str) -> Callable[..., Any]:
        whole = getattr(Group, name)

        def counts(over: Group, target: Tensor, source: Tensor, *sizes: list[int]) -> Any:
            leaving = (over.ranks - 1) * min(source.numel(), target.numel())
            if name == "all_to_all":
                assert source.numel() == sum(sizes[1])
                leaving = sum(sizes[1]) - sizes[1][over.rank]
            sent.add(leaving * source.element_size())
            return whole(over, target, source, *sizes)

        return counts

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all", "all_gather", "reduce_scatter"):
            patch.setattr(Group, name, counted(name))
        yield sent


def sent_messages(model: ithaca.Model, batch: Batch) -> list[Traffic]:
    """What a pass sends from this rank: forward, and backward."""
    with counting_messages() as sent:
        loss = model(batch)
        forward = sent.take()
        loss.backward()
        return [forward, sent.take()]


def stated_messages(model: ithaca.Model, tokens: int, documents: tuple[int, ...] | None = None) -> list[Traffic]:
    """What the schedule's cost says that a rank sends in all layers: forward, and backward; None: one document."""
    job, mesh = replace(model.reservation.job(tokens), documents=documents), model.mesh
    peers = Peers.all(mesh.axes.by_heads, mesh.ring, mesh.head_rank)
    blocks = [job.costs.messages(job, layer) for layer in range(job.spec.layers)]
    return [traffic([message for block in blocks for message in block[way]], job, peers) for way in (0, 1)]


class Copied:
    """Bytes of tiles that were copied to the device and from it, or read from the disk and written to it."""

    def __init__(self) -> None:
        self._total = Copies()

    def counted(self, copy: Callable[..., Any], into: bool) -> Callable[..., Any]:
        """The same copy, counted. Its second tensor, or the last one, is as large as the tile."""

        def counts(*args: Any, **kwargs: Any) -> Any:
            size = [arg for arg in args if isinstance(arg, Tensor)][-1].nbytes
            self._total += Copies(into=size) if into else Copies(out=size)
            return copy(*args, **kwargs)

        return counts

    def take(self) -> Copies:
        """What was copied since the last call."""
        found, self._total = self._total, Copies()
        return found


@contextmanager
def counting_copies(model: ithaca.Model) -> Iterator[Copied]:
    """Count what this model's tapes copy to the device and from it."""
    copied = Copied()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_in", "copy_out"):
            patch.setattr(model.engine, name, copied.counted(getattr(model.engine, name), name == "copy_in"))
        yield copied


@contextmanager
def counting_disk() -> Iterator[Copied]:
    """Count what tapes read from the disk and write to it."""
    copied = Copied()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fetch", "store"):
            patch.setattr(Disk, name, copied.counted(getattr(Disk, name), name == "fetch"))
        yield copied
