"""Between ring ranks, which hold different tokens' K and V for the same heads.

Under `sweep`, K and V stay where they were made. A chunk's queries are gathered from all ranks, each attends to the
keys that it has, and what it found goes back to the rank that the query came from:

    gather    [L, heads, D] of this rank's two runs of a chunk  ->  [R · L, heads, D], the chunk in order
    merge     (o, log-sum-exp) of the chunk on this rank's keys ->  those of its own runs on everybody's keys
    reduce    dq of the chunk by this rank's keys               ->  that of its own runs, by everybody's

Bytes depend on the chunk, not on how many there were before it. Where blocks run over all tokens, K and V travel
(`pass_on`, `everyones`), and their gradients go home (`homeward`). One ring rank has everything.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ithaca.attention.walk import merge
from ithaca.model.precision import at_least_fp32
from ithaca.parallel.transport import Transport


class Ring:
    def __init__(self, transport: Transport | None):
        self._transport = transport
        self.ranks, self.rank = (transport.ranks, transport.rank) if transport else (1, 0)

    def gather(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The chunk's, of tensors with the same tokens and the same dtype."""
        if self._transport is None:
            return tensors
        joined = torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous()
        everyone = joined.new_empty(self.ranks, *joined.shape)
        self._transport.gather(everyone.view(-1), joined.view(-1))()
        runs = everyone.unflatten(1, (2, -1))  # of each rank: one from the front of the chunk, one from the back
        chunk = torch.cat((runs[:, 0], runs[:, 1].flip(0))).flatten(0, 1)
        return chunk.split([tensor.shape[1] for tensor in tensors], 1)

    def merge(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """o [T, H, D], lse [H, T] of the chunk on this rank's keys -> of its own tokens on all keys."""
        if self._transport is None:
            return o, lse
        parts, lses = self._scatter(o), self._scatter(lse.T).transpose(1, 2).contiguous()  # as the merge wants them
        # One's own first: it alone has seen something of every row, and what has not is -inf
        total, lse = parts[self.rank].to(at_least_fp32(o.dtype)), lses[self.rank]
        for rank in (rank for rank in range(self.ranks) if rank != self.rank):
            merge(total, lse, parts[rank], lses[rank])
        return total.to(o.dtype), lse

    def reduce(self, dq: Tensor) -> Tensor:
        if self._transport is None:
            return dq
        return self._scatter(dq).sum(0, dtype=at_least_fp32(dq.dtype)).to(dq.dtype)

    def pass_on(self, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Send K and V, or their gradients, to the next rank; what comes from the one before, when it is asked for."""
        assert self._transport is not None
        sent = torch.stack((k, v))
        here, size = torch.empty_like(sent), sent.numel()
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        wait = self._transport.swap(
            here.view(-1),
            sent.view(-1),
            [size if rank == before else 0 for rank in range(self.ranks)],
            [size if rank == after else 0 for rank in range(self.ranks)],
        )

        def arrive() -> tuple[Tensor, Tensor]:
            wait()
            assert sent.numel() == size  # kept until here: its memory belongs to the stream of the computation
            return here[0], here[1]

        return arrive

    def everyones(self, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V of all ranks."""
        assert self._transport is not None
        mine = torch.stack((k, v))
        here = mine.new_empty(self.ranks, *mine.shape)
        self._transport.gather(here.view(-1), mine.view(-1))()
        return [(part[0], part[1]) for part in here]

    def homeward(self, at_once: bool) -> "Homeward":
        """For the gradients of everybody's K and V, a block after the other."""
        return _AllAtOnce(self) if at_once else _Travelling(self)

    def swap(self, parts: Tensor) -> Tensor:
        """[R, …]: a part for each rank -> a part from each."""
        assert self._transport is not None
        here, sizes = torch.empty_like(parts), [parts[0].numel()] * self.ranks
        self._transport.swap(here.view(-1), parts.view(-1), sizes, sizes)()
        return here

    def _scatter(self, chunk: Tensor) -> Tensor:
        """[R, L, …]: what each rank has for this rank's tokens."""
        runs = chunk.unflatten(0, (2 * self.ranks, -1))
        return self.swap(torch.stack((runs[: self.ranks], runs[self.ranks :].flip(0)), 1).contiguous()).flatten(1, 2)


class Homeward(Protocol):
    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:
        """What this rank's queries give to the gradients of a rank's K and V; owners come in the order of the ring."""
        ...

    def arrived(self) -> tuple[Tensor, Tensor]:
        """The sums over all ranks for one's own."""
        ...


class _Travelling:
    """The sums of a block go with it, one step behind."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._coming: Callable[[], tuple[Tensor, Tensor]] | None = None

    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:  # noqa: ARG002
        if self._coming is not None:
            for total, part in zip((dk, dv), self._coming(), strict=True):
                total += part
        self._coming = self._ring.pass_on(dk, dv)

    def arrived(self) -> tuple[Tensor, Tensor]:
        assert self._coming is not None
        return self._coming()


class _AllAtOnce:
    """All blocks' wait here, and are scattered together."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._parts: dict[int, Tensor] = {}

    def add(self, owner: int, dk: Tensor, dv: Tensor) -> None:
        self._parts[owner] = torch.stack((dk, dv))

    def arrived(self) -> tuple[Tensor, Tensor]:
        total = self._ring.swap(torch.stack([self._parts[rank] for rank in range(self._ring.ranks)])).sum(0)
        return total[0], total[1]
