"""The all-to-all of Ulysses: from all heads of some tokens to some heads of all tokens, and back.

A rank computes projections and MLP for some tokens of a tile with all heads. It attends to all tokens of the tile with
some heads. One all-to-all leads from the first to the second, and one leads back:

    to_heads     [t, all heads, D] of each rank  ->  [C · t, this rank's heads, D], tokens in order
    to_tokens    the way back; a key/value head that several ranks hold comes back as the sum over them

All tensors of one call travel as one message to each rank, [tokens, heads of all tensors, D], so that the received
memory is used without a copy. The call overlaps with the computation until the handle's `wait()`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ithaca.base.owners import EXCHANGE, owned_by
from ithaca.base.precision import at_least_fp32
from ithaca.parallel.collectives import Group, Pending
from ithaca.parallel.head_split import HeadSplit

Tensors = tuple[Tensor, ...]


Exchanged = Pending[tuple[Tensors, Tensors]]  # query-like and key-like tensors


class Exchange(ABC):
    """Moves tensors from a split by tokens to a split by heads, and back.

    Query-like tensors have the query heads of the split, key-like ones its key/value heads, in order.
    """

    ranks: int
    rank: int

    @abstractmethod
    def to_heads(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged: ...

    @abstractmethod
    def to_tokens(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged: ...


class Alone(Exchange):
    """One rank, which has all tokens and all heads."""

    ranks, rank = 1, 0

    def to_heads(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:  # noqa: ARG002
        return Pending(lambda: (tuple(queries), tuple(keys)))

    def to_tokens(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:
        return self.to_heads(split, queries, keys)


class Ulysses(Exchange):
    """Several ranks. A rank's tile has `runs` runs of tokens; after `to_heads` each run is whole and in order."""

    def __init__(self, group: Group, runs: int = 1):
        self._group, self.ranks, self.rank, self._runs = group, group.ranks, group.rank, runs

    @owned_by(EXCHANGE)
    def to_heads(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:
        tokens, size, example = *_tokens_and_size(queries, keys), (*queries, *keys)[0]
        widths = self._widths(split, len(queries), len(keys))
        sent = example.new_empty(tokens * sum(widths) * size)
        blocks = _blocks(sent, tokens, widths, size)
        for block, q, kv in zip(blocks, split.q_parts, split.kv_parts, strict=True):
            torch.cat([*(tensor[:, q] for tensor in queries), *(tensor[:, kv] for tensor in keys)], 1, out=block)
        mine = widths[self.rank]
        here = example.new_empty(self.ranks * tokens, mine, size)
        head, q_count = tokens * size, len(queries)
        coming = self._group.all_to_all(
            here.view(-1), sent, [mine * head] * self.ranks, [width * head for width in widths]
        )
        counts = [len(split.q[self.rank])] * q_count + [len(split.kv[self.rank])] * len(keys)

        def arrived(_: Tensor) -> tuple[Tensors, Tensors]:
            tokens = here if self._runs == 1 else _reordered(here, self.ranks, self._runs)
            parts = tokens.split(counts, 1)
            return tuple(parts[:q_count]), tuple(parts[q_count:])

        return coming.then(arrived)

    @owned_by(EXCHANGE)
    def to_tokens(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:
        rows, size = _tokens_and_size(queries, keys)
        tokens, widths = rows // self.ranks, self._widths(split, len(queries), len(keys))
        tensors = (*queries, *keys)
        sent = torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0].contiguous()
        sent = sent if self._runs == 1 else _reordered(sent, self._runs, self.ranks)
        here = sent.new_empty(tokens * sum(widths) * size)
        head = tokens * size
        coming = self._group.all_to_all(
            here, sent.view(-1), [width * head for width in widths], [widths[self.rank] * head] * self.ranks
        )
        q_count, kv_count = len(queries), len(keys)

        def arrived(_: Tensor) -> tuple[Tensors, Tensors]:
            blocks = _blocks(here, tokens, widths, size)
            parts = [
                block.split([len(q)] * q_count + [len(kv)] * kv_count, 1)
                for block, q, kv in zip(blocks, split.q, split.kv, strict=True)
            ]
            back = tuple(torch.cat([part[index] for part in parts], 1) for index in range(q_count))
            sums = tuple(_joined(split, [part[q_count + index] for part in parts]) for index in range(kv_count))
            return back, sums

        return coming.then(arrived)

    @staticmethod
    def _widths(split: HeadSplit, queries: int, keys: int) -> list[int]:
        """The number of heads, over all tensors, that go to or come from each rank."""
        return [queries * len(q) + keys * len(kv) for q, kv in zip(split.q, split.kv, strict=True)]


class Reordered(Exchange):
    """No communication: tensor ranks have gathered all tokens. Reorders them from rank order to sequence order."""

    ranks, rank = 1, 0

    def __init__(self, tensor_ranks: int, runs: int):
        self._tensor_ranks, self._runs = tensor_ranks, runs

    def to_heads(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:  # noqa: ARG002
        return self._all(queries, keys, self._tensor_ranks, self._runs)

    def to_tokens(self, split: HeadSplit, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()) -> Exchanged:  # noqa: ARG002
        return self._all(queries, keys, self._runs, self._tensor_ranks)

    @staticmethod
    def _all(queries: Sequence[Tensor], keys: Sequence[Tensor], outer: int, inner: int) -> Exchanged:
        with owned_by(EXCHANGE):
            found = [tuple(_reordered(x, outer, inner) for x in tensors) for tensors in (queries, keys)]
        return Pending(lambda: (found[0], found[1]))


def _reordered(x: Tensor, outer: int, inner: int) -> Tensor:
    """Rows in the order (outer, inner) -> rows in the order (inner, outer)."""
    return x.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _joined(split: HeadSplit, parts: list[Tensor]) -> Tensor:
    """Key-like heads from all ranks; a head that several ranks hold is summed in at least fp32."""
    if not split.replicated:
        return torch.cat(parts, 1)
    tokens, _, size = parts[0].shape
    dtype = parts[0].dtype
    total = parts[0].new_zeros(tokens, len(split.kv_heads), size, dtype=at_least_fp32(dtype))
    for heads, part in zip(split.kv_parts, parts, strict=True):
        total[:, heads] += part
    return total.to(dtype)


def _tokens_and_size(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[int, int]:
    tokens, _, size = (*queries, *keys)[0].shape
    return tokens, size


def _blocks(flat: Tensor, tokens: int, widths: list[int], size: int) -> list[Tensor]:
    """The parts of a message that go to or come from each rank, [tokens, heads, D] each."""
    parts = flat.split([tokens * width * size for width in widths])
    return [part.view(tokens, width, size) for part, width in zip(parts, widths, strict=True)]
