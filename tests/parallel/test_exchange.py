"""Tiles between tokens and heads, over forked ranks, against plain slices of the whole."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.parallel.collectives import Group
from ithaca.parallel.exchange import Alone, Ulysses
from ithaca.parallel.head_split import head_rounds, split_heads, usable_rounds
from ithaca.parallel.loopback import Loopback

TOKENS, SIZE = 5, 4  # of each rank, and of each head

# query heads, key/value heads, ranks: even, uneven, key/value heads that several ranks hold
COUNTS = [(8, 8, 2), (8, 2, 2), (6, 3, 2), (8, 1, 2), (8, 8, 3), (8, 2, 3), (14, 2, 4), (6, 3, 4), (8, 1, 4), (8, 8, 8)]
counts_of_heads = pytest.mark.parametrize("counts", COUNTS, ids=str)


def exchange() -> Ulysses:
    assert dist.group.WORLD is not None
    return Ulysses(Group(dist.group.WORLD))


def numbers(seed: int, *shape: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def all_heads_there_and_back(counts: tuple[int, int, int]) -> None:
    heads, kv_heads, ranks = counts
    split, over = split_heads(*counts), exchange()
    rank, mine = over.rank, slice(over.rank * TOKENS, (over.rank + 1) * TOKENS)
    q, o = (numbers(seed, ranks * TOKENS, heads, SIZE) for seed in (1, 2))
    k, v = (numbers(seed, ranks * TOKENS, kv_heads, SIZE) for seed in (3, 4))

    found = over.to_heads(split, (q[mine], o[mine]), (k[mine], v[mine])).wait()
    for tensors, wanted, held in zip(found, ((q, o), (k, v)), (split.q[rank], split.kv[rank]), strict=True):
        for tensor, whole in zip(tensors, wanted, strict=True):
            assert torch.equal(tensor, whole[:, list(held)])

    queries, sums = over.to_tokens(split, *found).wait()
    for tensor, whole in zip(queries, (q, o), strict=True):
        assert torch.equal(tensor, whole[mine])
    holders = torch.tensor([sum(head in held for held in split.kv) for head in range(kv_heads)])
    for tensor, whole in zip(sums, (k, v), strict=True):
        assert torch.allclose(tensor, whole[mine] * holders[:, None], rtol=1e-14)


@counts_of_heads
def test_all_heads_there_and_back(ranks, counts: tuple[int, int, int]) -> None:
    ranks(counts[2]).run(all_heads_there_and_back, counts)


def in_rounds(counts: tuple[int, int, int], at_once: int) -> None:
    """Only some heads of a tensor are given; some ranks have none of them."""
    heads, kv_heads, ranks = counts
    over = exchange()
    rank, mine = over.rank, slice(over.rank * TOKENS, (over.rank + 1) * TOKENS)
    q, k = numbers(1, ranks * TOKENS, heads, SIZE), numbers(2, ranks * TOKENS, kv_heads, SIZE)
    back, sums = torch.full_like(q[mine], torch.nan), torch.full_like(k[mine], torch.nan)
    for group in head_rounds(split_heads(*counts), at_once):
        for split in group:
            first = split is group[0]
            keys = (k[mine][:, list(split.kv_heads)],) if first else ()
            (queries,), there = over.to_heads(split, (q[mine][:, list(split.q_heads)],), keys).wait()
            assert torch.equal(queries, q[:, list(split.q[rank])])
            assert len(there) == len(keys)
            if there:
                assert torch.equal(there[0], k[:, list(split.kv[rank])])
            (back[:, list(split.q_heads)],), again = over.to_tokens(split, (queries,), there).wait()
            if again:
                sums[:, list(split.kv_heads)] = again[0]
    assert torch.equal(back, q[mine])
    split = split_heads(*counts)
    holders = torch.tensor([sum(head in held for held in split.kv) for head in range(kv_heads)])
    assert torch.allclose(sums, k[mine] * holders[:, None], rtol=1e-14)


@counts_of_heads
def test_in_rounds(ranks, counts: tuple[int, int, int]) -> None:
    for at_once in usable_rounds(split_heads(*counts)):
        ranks(counts[2]).run(in_rounds, counts, at_once)


def keys_alone(counts: tuple[int, int, int]) -> None:
    """K and V without queries; and what comes back of a head is the sum of what different ranks make of it."""
    _, kv_heads, ranks = counts
    split, over = split_heads(*counts), exchange()
    mine = slice(over.rank * TOKENS, (over.rank + 1) * TOKENS)
    k = numbers(1, ranks * TOKENS, kv_heads, SIZE)
    queries, (there,) = over.to_heads(split, (), (k[mine],)).wait()
    assert queries == ()
    assert torch.equal(there, k[:, list(split.kv[over.rank])])

    made = [numbers(10 + rank, ranks * TOKENS, len(split.kv[rank]), SIZE) for rank in range(ranks)]
    wanted = torch.zeros_like(k)
    for held, part in zip(split.kv, made, strict=True):
        wanted[:, list(held)] += part
    _, (total,) = over.to_tokens(split, (), (made[over.rank],)).wait()
    assert torch.allclose(total, wanted[mine], rtol=1e-14, atol=1e-14)


@counts_of_heads
def test_keys_alone(ranks, counts: tuple[int, int, int]) -> None:
    ranks(counts[2]).run(keys_alone, counts)


def sum_in_bfloat16() -> list[float]:
    split, over = split_heads(8, 1, 4), exchange()
    part = torch.full((4, 1, 1), (256.0, 1.0, 1.0, 1.0)[over.rank], dtype=torch.bfloat16)
    _, (total,) = over.to_tokens(split, (), (part,)).wait()
    assert total.dtype == torch.bfloat16
    return total.flatten().tolist()


def test_replicas_are_summed_in_fp32(ranks) -> None:
    """256 + 1 is 256 in bfloat16; 259 is rounded once."""
    assert ranks(4).run(sum_in_bfloat16) == [[260.0]] * 4


def several_under_way() -> None:
    split, over = split_heads(6, 3, 2), exchange()
    mine = slice(over.rank * TOKENS, (over.rank + 1) * TOKENS)
    wholes = [numbers(seed, 2 * TOKENS, 6, SIZE) for seed in range(4)]
    sources = [whole[mine].clone() for whole in wholes]
    coming = [over.to_heads(split, (source,)) for source in sources]
    for source in sources:
        source.fill_(torch.nan)  # it is packed by now
    there = []
    for one, whole in reversed(list(zip(coming, wholes, strict=True))):
        there.append(one.wait()[0][0])
        assert torch.equal(there[-1], whole[:, list(split.q[over.rank])])
    going = [over.to_tokens(split, (tensor,)) for tensor in there]
    for one, whole in zip(going, reversed(wholes), strict=True):
        assert torch.equal(one.wait()[0][0], whole[mine])


def test_several_are_under_way_at_a_time(ranks) -> None:
    ranks(2).run(several_under_way)


def kept_until_it_arrives() -> None:
    split, over = split_heads(8, 8, 2), exchange()
    tensor = numbers(1, 2 * TOKENS, 4, SIZE)
    sent = weakref.ref(tensor)
    coming = over.to_tokens(split, (tensor,))
    del tensor
    assert sent() is not None
    first = coming.wait()
    timeout = time.monotonic() + 300
    while sent() is not None and time.monotonic() < timeout:
        time.sleep(0.01)  # gloo's thread wakes the waiting one before it lets go of the message itself
    assert sent() is None
    assert coming.wait() is first


def test_what_is_sent_is_kept_until_it_arrives(ranks) -> None:
    ranks(2).run(kept_until_it_arrives)


def parts_of_a_wider_tensor() -> None:
    """Tensors that do not lie in one piece, as parts of a projection or of a message do not."""
    split, over = split_heads(8, 2, 2), exchange()
    mine = slice(over.rank * TOKENS, (over.rank + 1) * TOKENS)
    wide = numbers(1, 2 * TOKENS, 12, SIZE)
    parts = wide[mine].split((8, 2, 2), 1)
    (q,), kv = over.to_heads(split, parts[:1], parts[1:]).wait()
    assert not q.is_contiguous()
    (back,), (k, v) = over.to_tokens(split, (q,), kv).wait()
    assert torch.equal(torch.cat((back, k, v), 1), wide[mine])
    (alone,), _ = over.to_tokens(split, (q,)).wait()
    assert torch.equal(alone, wide[mine][:, :8])


def test_parts_of_a_wider_tensor(ranks) -> None:
    ranks(2).run(parts_of_a_wider_tensor)


def test_one_rank_alone_sends_nothing() -> None:
    split, q, k = split_heads(8, 2, 1), numbers(1, 5, 8, 4), numbers(2, 5, 2, 4)
    for way in (Alone().to_heads, Alone().to_tokens):
        (queries,), (keys,) = way(split, (q,), (k,)).wait()
        assert queries is q
        assert keys is k


@pytest.mark.parametrize("counts", [(8, 8, 4), (14, 2, 4), (6, 3, 4)], ids=str)
def test_one_rank_that_stands_for_all_gets_the_same_shapes(ranks, counts: tuple[int, int, int]) -> None:
    heads, kv_heads, count = counts
    split, over = split_heads(*counts), Ulysses(Group(Loopback(0, count)))
    q, k = numbers(1, TOKENS, heads, SIZE), numbers(2, TOKENS, kv_heads, SIZE)
    found = over.to_heads(split, (q,), (k,)).wait()
    back = over.to_tokens(split, *found).wait()
    assert all(tensor.isfinite().all() for tensors in (*found, *back) for tensor in tensors)
    shapes = [[tensor.shape for tensor in tensors] for tensors in (*found, *back)]
    assert ranks(count).run(shapes_of_first_rank, counts)[0] == shapes


def shapes_of_first_rank(counts: tuple[int, int, int]) -> list[list[torch.Size]]:
    split, over = split_heads(*counts), exchange()
    found = over.to_heads(split, (numbers(1, TOKENS, counts[0], SIZE),), (numbers(2, TOKENS, counts[1], SIZE),))
    back = over.to_tokens(split, *found.wait())
    return [[tensor.shape for tensor in tensors] for tensors in (*found.wait(), *back.wait())]
