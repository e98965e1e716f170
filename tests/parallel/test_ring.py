"""Between ring ranks: what is added up in fp32, what is kept until it has arrived, how many bytes that is."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.documents import Pieces
from ithaca.attention.merge import merge
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.axes import Axes
from ithaca.parallel.collectives import Group
from ithaca.parallel.layout import Layout
from ithaca.parallel.loopback import Loopback
from ithaca.parallel.ring import Ring
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Peers, traffic
from ithaca.schedule.job import Job
from ithaca.schedule.whole.ring_kernel import RingKernel

BF16 = torch.bfloat16


def group_ring() -> Ring:
    assert dist.group.WORLD is not None
    return Ring(Group(dist.group.WORLD))


class Numbers:
    """A kernel in which a query finds and gets the number of a key, and a key that of a query; one pair at a time."""

    name = "numbers"

    def forward(self, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.full_like(q, k.flatten()[0].item()), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    def backward(self, _: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, ...]:
        mine, other = (tensor.flatten()[0].item() for tensor in (q, k))
        return torch.full_like(q, other), torch.full_like(k, mine), torch.full_like(v, mine)


def around(ring: Ring, bounds: tuple[int, ...], gathers: bool) -> RingKernel:
    kernel: Any = Numbers()
    return RingKernel(kernel, ring, Layout(bounds[-1], bounds[-1], 1, ring.ranks), bounds, gathers)


def merge_in_fp32(o_sum: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    assert o_sum.dtype == lse.dtype == torch.float32
    merge(o_sum, lse, o_part, lse_part)


NUMBERS = (256.0, 1.0, 1.0, 1.0)  # of each rank; 256 + 1 is 256 in bfloat16


def sums_in_bfloat16() -> dict[str, list[float]]:
    ring = group_ring()
    chunk = torch.full((8, 1, 2), NUMBERS[ring.rank], dtype=BF16)
    found = {"dq": ring.reduce(chunk).wait()}
    tokens, lse, pieces = chunk[:2], torch.zeros(1, 2), Pieces.documents((0, 2))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("parallel.ring", "schedule.whole.ring_kernel"):
            patch.setattr(f"ithaca.{module}.merge", merge_in_fp32)
        found["o"], _ = ring.merge(chunk, torch.zeros(1, 8)).wait()
        for way in ("around", "gather"):
            attention = around(ring, (0, 8), way == "gather")
            found[f"o {way}"], _ = attention.forward(*[tokens] * 3, pieces, 1.0)
            gradients = attention.backward(*[tokens] * 5, lse, pieces, 1.0)
            found |= zip((f"dq {way}", f"dk {way}", f"dv {way}"), gradients, strict=True)
    assert {tensor.dtype for tensor in found.values()} == {BF16}
    return {name: tensor[:, 0, 0].tolist() for name, tensor in found.items()}


def test_sums_are_taken_in_fp32(ranks) -> None:
    every = [NUMBERS[min(token, 7 - token)] for token in range(8)]  # rank r has tokens r and 7 - r
    for rank, found in enumerate(ranks(4).run(sums_in_bfloat16)):
        assert found["dq"] == rounded([259.0] * 2)
        assert found["o"] == rounded([259.0 / 4] * 2)  # all alike: the mean
        tokens = rank, 7 - rank
        for way in ("around", "gather"):
            means = [sum(every[: token + 1]) / (token + 1) for token in tokens]
            assert found[f"o {way}"] == pytest.approx(means, rel=2**-8)
            assert found[f"dq {way}"] == rounded([sum(every[: token + 1]) for token in tokens])
            assert found[f"dk {way}"] == found[f"dv {way}"] == rounded([sum(every[token:]) for token in tokens])


def rounded(numbers: list[float]) -> list[float]:
    return torch.tensor(numbers).to(BF16).tolist()


class Watched(Loopback):
    """Receives zeros, counts the bytes that are sent, and checks at the wait that what was sent still exists."""

    def __init__(self, ranks: int):
        super().__init__(0, ranks)
        self.bytes = 0

    def all_to_all_single(
        self,
        target: Tensor,
        source: Tensor,
        target_sizes: list[int],
        source_sizes: list[int],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        assert (sum(target_sizes), sum(source_sizes)) == (target.numel(), source.numel())
        return self._send(target, source, sum(source_sizes[1:]))

    def all_gather_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return self._send(target, source, (self.size() - 1) * source.numel())

    def reduce_scatter_single(self, target: Tensor, source: Tensor, opts: Any = None) -> dist.Work:  # noqa: ARG002
        return self._send(target, source, source.numel() - target.numel())

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _send(self, target: Tensor, source: Tensor, leaving: int) -> Any:
        self.bytes += leaving * source.element_size()
        return _Watch(target, weakref.ref(source.untyped_storage()))


class _Watch:
    def __init__(self, target: Tensor, sent: weakref.ref):
        self._target, self._sent = target, sent

    def wait(self) -> None:
        assert self._sent() is not None, "the tensor that is sent was freed before the wait"
        self._target.zero_()


TOKENS, HEADS, KV_HEADS, SIZE = 8, 4, 2, 16


def passes(plan: Plan, ring: Ring) -> None:
    """What one block sends over the ring in bf16, of one chunk, forward and backward."""
    q, o, do, k, v = (torch.zeros(TOKENS, heads, SIZE, dtype=BF16) for heads in (HEADS,) * 3 + (KV_HEADS,) * 2)
    lse = torch.zeros(HEADS, TOKENS)
    if plan.sweeps:
        (queries,) = ring.gather(q).wait()
        ring.merge(queries, torch.zeros(HEADS, len(queries))).wait()
        gradients = ring.gather(q, o, do)
        ring.gather(lse.T[..., None]).wait()
        ring.reduce(gradients.wait()[0]).wait()
    else:
        pieces = Pieces.documents((0, TOKENS))
        attention = around(ring, (0, TOKENS * ring.ranks), plan.travel == "gather")
        attention.forward(q, k, v, pieces, 1.0)
        attention.backward(do, q, k, v, o, lse, pieces, 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "sweep", "chunk": 1024},
        {"recipe": "ring", "checkpoint": "selective"},
        {"recipe": "ring", "checkpoint": "selective", "travel": "gather"},
    ],
)
def test_what_is_sent_in_bfloat16(options: dict, ranks: int) -> None:
    """Sums and log-sum-exps are fp32 in it; and it is kept until it has arrived."""
    plan, group = Plan(**options), Watched(ranks)
    passes(plan, Ring(Group(group)))
    spec = replace(read_spec(PRESETS["tiny"]), heads=HEADS, kv_heads=KV_HEADS, head_size=SIZE).with_layers(1)
    job = Job(spec=spec, plan=plan, tokens=TOKENS * ranks, axes=Axes(ring=ranks))
    messages = [message for way in job.costs.messages(job, 0) for message in way]
    assert group.bytes == traffic(messages, job, Peers.all(1, ranks, 0)).bytes
