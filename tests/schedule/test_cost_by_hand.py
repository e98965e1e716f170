"""Bytes and seconds counted by hand, tensor by tensor, where a prediction as a whole would hide a mistake in one."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from ithaca.attention.documents import Pieces
from ithaca.attention.kernels.naive import Naive
from ithaca.base.owners import ATTENTION, BLOCKS, EXCHANGE, GATHERED, GRADIENTS
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import AttentionRates, Cluster, Machine, read_gpus
from ithaca.planner.search import longest, search
from ithaca.planner.seconds import BETWEEN, LEAST, Seconds, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.rehearsal.memory_meter import Meter
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import phases, resident, step_memory

K, M = 2**10, 2**20
BF16, FP32 = 2, 4
GPU = read_gpus()["H100-80GB"]
LLAMA, QWEN = (read_spec(find_config(name)[0]) for name in ("llama3-8b", "qwen3-8b"))
# Both have layers of 4096 features with 32 query and 8 key/value heads of 128; MLPs of 14336 and 12288
E = Q = 4096
KV = 1024
LLAMA_BLOCK = E * (Q + 2 * KV) + Q * E + 3 * E * 14336 + 2 * E  # parameters
QWEN_BLOCK = E * (Q + 2 * KV) + Q * E + 3 * E * 12288 + 2 * E + 2 * 128  # norms of q and k among them


def phases_of(plan: Plan, tokens: int, ulysses: int, ring: int = 1, spec: Spec = QWEN) -> dict[str, Counter[str]]:
    return dict(phases(Job(spec=spec, plan=plan, tokens=tokens, axes=Axes(ring=ring, ulysses=ulysses))))


@pytest.mark.parametrize("again", [False, True])
def test_a_sweep_over_both_axes(again: bool) -> None:
    """Chunks of 64K over 2 × 2 ranks, four of them under way beside one that is at work; eight if o is recomputed."""
    plan = Plan(recipe="sweep", kernel="cudnn+flash", chunk=64 * K, tile=8 * K, o="recompute" if again else "host")
    found = phases_of(plan, M, 2, 2)
    T = 16 * K
    q, k = T * 2 * 16 * 128 * BF16, T * 2 * 4 * 128 * BF16  # of half of the heads, and the tokens of two ranks
    local, gathered = T * Q * BF16, 2 * q
    workspace = 2.03 * gathered + 2 * 4 * k  # dq in fp32, two numbers a row; dk and dv of each of 4 query heads
    exchange = 2 * (q + 2 * k) + 3 * q + 3 * gathered + 2 * gathered  # dq, dk, dv; q, o, do gathered; dq reduced
    if again:  # q; q gathered; o merged, beside q; o back, in another order, beside q; do, beside q and o
        exchange += local + q + q + gathered + q + 2 * gathered + local + 3 * q + local + 3 * q
    else:
        exchange += 3 * local + 3 * q
    under_way = 8 if again else 4
    projection = T * (E + Q + KV) * BF16  # the normed x; q and k before their own norms
    block = FP32 * QWEN_BLOCK
    mlp = found["the MLP of the first block"]
    assert mlp[BLOCKS] == 5 * 8 * K * 12288 * BF16 + 3 * 8 * K * E * BF16 + local + under_way * projection + block
    assert mlp[EXCHANGE] == exchange
    assert mlp[ATTENTION] == (2 * q + local if again else 0)
    attention = found["attention of the first block"]
    assert attention[BLOCKS] == (1 + under_way) * projection + block
    assert attention[EXCHANGE] == exchange + 2 * 3 * gathered
    # dq and workspace, dk and dv; sums in fp32 of two visits
    assert attention[ATTENTION] == gathered * (1 + 3) + workspace + 4 * k


@pytest.mark.parametrize(("travel", "copies"), [("gather", 2 * 3), ("around", 2 + 3 * 2)])
def test_k_and_v_that_travel(travel: str, copies: int) -> None:
    found = phases_of(Plan(recipe="hybrid", travel=travel), 128 * K, 2, 2)["attention of the first block"]
    T = 32 * K
    q, k = T * 2 * 16 * 128 * BF16, T * 2 * 4 * 128 * BF16
    assert found[EXCHANGE] == 3 * q + 2 * k + copies * 2 * k


@pytest.mark.parametrize(("travel", "copies"), [("gather", 2 * 3), ("around", 2 + 3 * 2)])
def test_k_and_v_of_a_round_that_travel(travel: str, copies: int) -> None:
    """One query head on each of two ranks, and the key/value head that it reads."""
    plan = Plan(recipe="untied", travel=travel, kernel="flash4")
    found = phases_of(plan, 128 * K, 2, 2)["attention of the first block"]
    T = 32 * K
    own = kv = T * 2 * 128 * BF16
    sent = T * 2 * 128 * BF16  # of both ranks' heads, local tokens
    assert found[EXCHANGE] == 2 * sent + 3 * own + 2 * kv + copies * 2 * kv
    # dq, its sum in fp32 and the kernel's; dk and dv, and their sums over the rounds
    assert found[ATTENTION] == own + 2 * own + 2.03 * own + 2 * kv + 4 * kv


@pytest.mark.parametrize(("spec", "ulysses"), [(LLAMA, 1), (LLAMA, 4), (QWEN, 1)])
def test_everything_that_a_block_makes(spec: Spec, ulysses: int) -> None:
    """x, two norms, a sum; q, k, v, o, 32 numbers of lse; with Ulysses o twice; with norms of q and k these twice."""
    plan = Plan(recipe="ulysses" if ulysses > 1 else "dense", checkpoint="none")
    found = phases_of(plan, 8 * K * ulysses, ulysses, spec=spec)["the MLP of the last block"]
    T, mlp, block = 8 * K, *((14336, LLAMA_BLOCK) if spec is LLAMA else (12288, QWEN_BLOCK))
    again = (Q if ulysses > 1 else 0) + (Q + KV if spec is QWEN else 0)
    kept = T * BF16 * (4 * E + 2 * Q + again + 2 * KV + 3 * mlp) + T * FP32 * 32
    # dy; gradients of gate, up and their product, which is freed
    assert found[BLOCKS] == spec.layers * kept + T * (E + 2 * mlp) * BF16 + FP32 * block


@pytest.mark.parametrize(("tile", "checkpoint"), [(8 * K, "full"), (2 * K, "full"), (8 * K, "selective")])
def test_a_single_tile_makes_no_room_for_its_gradients(tile: int, checkpoint: str) -> None:
    plan = Plan(recipe="dense", checkpoint=checkpoint, tile=tile)
    found = phases_of(plan, 8 * K, 1, spec=LLAMA)["the MLP of the last block"]
    T = 8 * K
    wide = 5 * tile * 14336 + (2 if tile == T else 3) * tile * E  # with the sum and its norm
    gradients = E if tile == T else 2 * E + Q  # dy; dx and do, which tiles write
    again = E + 2 * Q + 2 * KV if checkpoint == "full" else Q  # normed x, q, k, v, o; or o, which is kept
    kept, lse = 32 * T * E * BF16, T * FP32 * 32
    lses = lse if checkpoint == "full" else 32 * lse
    more = 31 * T * Q * BF16 if checkpoint == "selective" else 0
    assert found[BLOCKS] == kept + more + BF16 * (wide + T * (gradients + again)) + lses + FP32 * LLAMA_BLOCK


@pytest.mark.parametrize(("travel", "copies"), [("gather", 4 * 3), ("around", 2 + 3 * 2)])
def test_what_a_ring_adds_if_everything_is_kept(travel: str, copies: int) -> None:
    """As many heads of keys as of queries, and an MLP that makes no room when it is freed."""
    spec = replace(LLAMA, kv_heads=32, mlp=1024)
    plan = Plan(recipe="ring", checkpoint="none", travel=travel, kernel="flash4")
    found = phases_of(plan, 32 * K, 1, 4, spec=spec)["attention of the last block"]
    q = k = 8 * K * Q * BF16
    # do; dq, its sum in fp32 and the kernel's; dk and dv; K and V that travel, and the sums of their gradients
    assert found[ATTENTION] == q + q + 2 * q + 2.03 * q + 2 * k + copies * 2 * k - 3 * 8 * K * 1024 * BF16


def test_a_message_is_there_twice() -> None:
    """Under `selective`, as it is sent and as it arrives, beside q, k, v and do."""
    found = phases_of(Plan(recipe="ulysses", checkpoint="selective"), 32 * K, 4, spec=LLAMA)
    sent, attention = (found[f"{name} of the last block"] for name in ("the exchange", "attention"))
    T = 8 * K
    assert sent[EXCHANGE] == 2 * T * (3 * Q + 2 * KV) * BF16
    assert sent[BLOCKS] - attention[BLOCKS] == T * (2 * Q + 2 * KV) * BF16 - T * 32 * FP32
    assert sent.total() > attention.total()


@pytest.mark.parametrize(("ranks", "zero"), [(1, 2), (1, 3), (8, 3)])
def test_a_second_pass_finds_the_gradients_of_all_layers(ranks: int, zero: int) -> None:
    """They are there while it runs, and what it adds to them is only on its way."""
    plan = Plan(recipe="ulysses" if ranks > 1 else "dense", checkpoint="selective", zero=zero)
    jobs = [Job(spec=LLAMA, plan=plan, tokens=8 * K, axes=Axes(ulysses=ranks), passes=count) for count in (1, 2)]
    (first, inside), (second, again) = ((resident(job), dict(phases(job))) for job in jobs)
    everything = FP32 * 8_030_261_248 // ranks
    assert second[GRADIENTS] - first[GRADIENTS] == everything
    head, reduced = FP32 * (128256 + 1) * E, FP32 * LLAMA_BLOCK if zero == 3 else 0
    assert inside["attention of the first block"][GRADIENTS] == (head + FP32 * 31 * LLAMA_BLOCK) // ranks + reduced
    assert again["attention of the first block"][GRADIENTS] == reduced
    assert again["the embedding's gradient"][GRADIENTS] == (FP32 * 128256 * E if zero == 3 else 0)
    for job in jobs:
        job_memory = step_memory(job)
        assert job_memory.total >= sum((resident(job) + dict(phases(job))[job_memory.phase]).values())
    assert step_memory(jobs[1]).total > step_memory(jobs[0]).total


def test_what_is_not_cut_over_ranks() -> None:
    """ZeRO-2 has all weights on every rank; ZeRO-1 all gradients of blocks as well, if a step has several passes."""
    jobs = {
        zero: Job(spec=LLAMA, plan=Plan(recipe="ulysses", zero=zero), tokens=M, axes=Axes(ulysses=8), passes=2)
        for zero in (1, 2, 3)
    }
    found = {zero: step_memory(job).parts for zero, job in jobs.items()}
    assert found[2][GATHERED] == found[1][GATHERED] == BF16 * 8_030_261_248
    assert found[3][GATHERED] < BF16 * 8_030_261_248 / 8
    assert found[1][GRADIENTS] - found[2][GRADIENTS] == FP32 * 32 * LLAMA_BLOCK
    assert step_memory(replace(jobs[1], passes=1)).parts == step_memory(replace(jobs[2], passes=1)).parts


# Seconds
def rates_of(kernel: str) -> AttentionRates:
    found = GPU.rates(kernel)
    assert found is not None
    return found


def seconds(plan: Plan, tokens: int = M, ulysses: int = 8, machine: Machine | None = None) -> Seconds:
    job = Job(spec=LLAMA, plan=plan, tokens=tokens, axes=Axes(ulysses=ulysses))
    return predict_seconds(job, GPU, machine or Machine(nodes=1, gpus=8))


def test_a_disk_is_shared_by_the_gpus_of_a_node() -> None:
    found = seconds(Plan(recipe="sweep", o="disk", disk="/scratch"))
    assert [each.disk for each in found.passes] == pytest.approx(2 * [32 * M * Q * BF16 / 4e9])
    assert found.copies == pytest.approx(2 * 32 * M * Q * BF16 / 4e9)  # written forward, read backward


def test_reading_and_writing_share_a_disk() -> None:
    """Forward, x is written by one layer and read by the next; 2 disks are twice as fast."""
    job = Job(spec=LLAMA, plan=Plan(recipe="sweep", x="disk", disk="/scratch"), tokens=M, axes=Axes(ulysses=8))
    gpu, machine = replace(GPU, disk_read=2e9, disk_write=1e9), Machine(nodes=1, gpus=8)
    one, two = (predict_seconds(job, gpu, machine, disks) for disks in (1, 2))
    x = 32 * M * E * BF16
    assert one.passes[0].disk == pytest.approx(x / 1e9 + x / 2e9)
    assert two.passes[0].disk == one.passes[0].disk / 2
    assert two.passes[0].host == one.passes[0].host


def test_a_disk_that_is_idle_forward_does_not_help_backward() -> None:
    """A step whose disk has enough time on the whole waits for it forward, where attention runs for a third as long."""
    job = Job(spec=LLAMA, plan=Plan(recipe="sweep", o="disk", disk="/scratch"), tokens=M, axes=Axes(ulysses=8))
    free = predict_seconds(job, replace(GPU, disk_read=1e15, disk_write=1e15), Machine(nodes=1, gpus=8))
    forward, backward = free.passes
    assert forward.computing < backward.computing / 2
    written = 32 * M * Q * BF16
    rate = written / ((forward.computing + backward.computing) / 2)  # in both passes together there is time for it
    found = predict_seconds(job, replace(GPU, disk_read=rate, disk_write=rate), Machine(nodes=1, gpus=8))
    assert found.copies == pytest.approx(forward.computing + backward.computing)
    assert found.step - free.step == pytest.approx(written / rate - forward.computing)


def test_the_rank_with_most_heads_is_waited_for() -> None:
    """Of 8 key/value heads over 3 ranks it has three, with 12 queries."""
    found = seconds(Plan(recipe="ulysses", kernel="cudnn"), 64 * K, 3, Machine(nodes=1, gpus=3))
    rate = rates_of("cudnn+flash").backward
    assert found.attention_backward == pytest.approx(2.5 * 2 * 32 * 12 * 128 * (64 * K) ** 2 / rate, rel=1e-4)


@pytest.mark.parametrize(("nodes", "ranks", "link"), [(1, 8, 450e9), (2, 16, 50e9)])
def test_weights_are_gathered_twice_and_reduced(nodes: int, ranks: int, link: float) -> None:
    found = seconds(Plan(recipe="sweep"), machine=Machine(nodes=nodes, gpus=8))
    assert found.weights == pytest.approx(8_030_261_248 * (ranks - 1) / ranks * (2 * BF16 + FP32) / link)


def test_weights_are_waited_for_where_there_is_little_else() -> None:
    found = seconds(Plan(recipe="dense"), 1 * K, 1, Machine(nodes=1, gpus=8, inside=1e9))
    assert found.step == pytest.approx(found.weights + found.optimizer)


def products(plan: Plan) -> float:
    """Seconds of products and bytes, without the least time of every operation."""
    job = Job(spec=LLAMA, plan=plan, tokens=M, axes=Axes(ulysses=8))
    return seconds(plan).linear - LEAST * job.costs.work(job).launches


def test_products_that_run_again() -> None:
    project, mix_and_feed = E * (Q + 2 * KV), Q * E + 3 * E * 14336
    kept, few = (products(Plan(recipe="sweep", x=x)) for x in ("host", "host, rebuild"))
    assert few - kept == pytest.approx(BETWEEN * M / 8 * 2 * 16 * mix_and_feed / GPU.matmul)
    once, in_rounds = (products(Plan(recipe=recipe)) for recipe in ("ulysses", "untied"))
    assert in_rounds - once == pytest.approx(BETWEEN * M / 8 * 2 * 32 * project / GPU.matmul)


# Nodes
def test_more_or_fewer_gpus_with_what_their_nodes_have() -> None:
    for usual in (False, True):  # what was given for a node stays; what is usual follows from the GPUs on it
        there = Cluster(8, GPU, 2e12, 8e12, usual=usual)
        half, twice = (there.resized(count) for count in (4, 16))
        assert (half.host, half.disk) == (1e12 if usual else 2e12, 8e12)
        assert (twice.host, twice.disk) == (2e12, 8e12)


def test_tapes_have_what_moments_leave_of_the_host() -> None:
    """On one GPU the moments of 8B parameters must be there, 60 GiB; the rest is filled, and no more than that."""
    there = Cluster(1, GPU, 256e9)
    answer = search(LLAMA, there, longest(LLAMA, there))
    assert answer is not None
    assert answer.plan.optimizer == "host"
    assert 0.9 < answer.memory.host / (0.95 * 256e9) <= 1


def test_scores_of_the_naive_kernel() -> None:
    """Two documents, of which the longer one has the larger scores: what its backward holds, counted by a meter."""
    spec = replace(QWEN, layers=1, heads=4, kv_heads=2, head_size=16)
    job = Job(spec=spec, plan=Plan(recipe="dense", kernel="naive"), tokens=1024, documents=(768, 256), itemsize=4)
    q, k, v = (torch.randn(1024, heads, 16) for heads in (4, 2, 2))
    kernel, pieces, scale = Naive(), Pieces.documents((0, 768, 1024)), 0.25
    o, lse = kernel.forward(q, k, v, pieces, scale)
    with Meter(torch.device("cpu"), torch.float32) as meter:
        kernel.backward(torch.randn_like(o), q, k, v, o, lse, pieces, scale)
    scores = 4 * 4 * 768 * 768
    assert 4 * scores < meter.peak.total() < 5.5 * scores
    beside = job.kernel.workspace(q.nbytes, k.nbytes, 2, 1024, True)
    assert job.workspace(q.nbytes, k.nbytes) - beside == 4 * scores
