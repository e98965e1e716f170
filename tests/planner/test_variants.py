"""K and V on the device, in host memory or on disk: the planner takes what is fastest by prediction."""

from dataclasses import replace

import pytest

from ithaca.parallel.axes import Axes
from ithaca.planner.attention_rates import attention_seconds
from ithaca.planner.balance import balance, describe, least_chunks
from ithaca.planner.hardware import Cluster
from ithaca.planner.search import HARDLY, Answer, _cost, fits, fitting, pass_seconds, search
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import PLACED, Plan
from ithaca.schedule.job import Job
from ithaca.schedule.sweep.copies import copies
from ithaca.schedule.variants import Effort, fitting_plans, recipe_variants
from tests.planner.test_search import GPUS, TB, K, M, cluster, spec_of

SLOW = replace(GPUS["A100-80GB"], host=2e9)  # a link on which fetching small tiles would be seen


def every_way(model: str, there: Cluster, tokens: int, axes: Axes, kernel: str) -> list[tuple[Plan, float]]:
    """Every variant that fits, with its cost, none left out."""
    spec, found = spec_of(model), []
    limits = least_chunks(spec, axes, there.gpu, there.machine, kernel)

    def cost(plan: Plan) -> tuple[float, float]:
        seconds = pass_seconds(spec, there, plan, tokens, 1, axes, None)
        return _cost(seconds), seconds.step - seconds.waits

    for variant in recipe_variants("sweep", spec, axes, tokens, there.budget, Effort.FEW, kernel, limits):
        fitting = fitting_plans(variant, spec, axes, tokens, there.budget, Effort.FEW, cost)
        found += [(plan, cost(plan)[0]) for plan, _ in fitting]
    return found


@pytest.mark.parametrize(
    ("model", "gpus", "tokens", "host", "disk"),
    [
        ("llama3-8b", "8xH100-80GB", 7 * M, 1.9 * TB, 0.0),
        ("llama3-8b", "8xH100-80GB", 1 * M, 1.9 * TB, 0.0),
        ("llama2-7b", "4xA100-80GB", 3 * M, 1.0 * TB, 0.0),
        ("llama3.2-1b", "1xRTX4090-24GB", 64 * K, 0.06 * TB, 0.0),
        ("llama3-8b", "8xH100-80GB", 8 * M, 0.5 * TB, 28 * TB),
    ],
)
def test_no_variant_is_faster(model: str, gpus: str, tokens: int, host: float, disk: float) -> None:
    there = cluster(gpus, host, disk)
    spec, axes = spec_of(model), Axes(ulysses=there.count)
    answer = search(spec, there, tokens, "sweep", mesh=(there.count, 1))
    ways = every_way(model, there, tokens, axes, answer.kernel if answer else "auto")
    assert (answer is None) == (not ways)
    assert answer is not None
    assert _cost(answer.seconds) <= HARDLY * min(cost for _, cost in ways)


def test_a_smaller_chunk_where_less_is_computed_again() -> None:
    """Though the best that any placement with that chunk could reach is hardly faster."""
    spec, there = spec_of("qwen3-32b"), cluster(host=2.048 * TB)
    answers = [*fitting(spec, there, 128 * K, "sweep", (1, 1), Effort.FEW)]
    ways = every_way("qwen3-32b", there, 128 * K, Axes(shard=8), "cudnn+flash")
    least = min(cost for _, cost in ways)
    assert min(_cost(answer.seconds) for answer in answers) <= HARDLY * least
    assert min(cost for plan, cost in ways if plan.chunk == 64 * K) > HARDLY * least


def found(model: str, tokens: int, there: Cluster) -> Answer:
    answer = search(spec_of(model), there, tokens)
    assert answer is not None
    return answer


def test_the_host_where_it_pays_and_the_device_where_it_does_not() -> None:
    """At 7M, K and V in host memory make room for chunks of 64K; at 1M there is room for everything."""
    assert found("llama3-8b", M, cluster()).plan.kv == "device"
    answer = found("llama3-8b", 7744 * K, cluster(host=2.048 * TB))
    assert (answer.plan.kv, answer.plan.chunk) == ("host", 64 * K)
    there, axes = cluster(host=2.048 * TB), answer.axes
    ways = every_way("llama3-8b", there, 7744 * K, axes, answer.kernel)
    on_device = min(cost for plan, cost in ways if plan.kv == "device")
    assert on_device > 1.01 * answer.seconds.step


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100-80GB", "RTX4090-24GB"])
@pytest.mark.parametrize(("model", "axes"), [("llama2-7b", Axes()), ("llama3-8b", Axes(ulysses=8)), ("tiny", Axes())])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_balance_chunk_is_where_predicted_times_meet(gpu: str, model: str, axes: Axes, place: str) -> None:
    """Against the bytes of the tapes, and the attention of two chunks less that of each alone."""
    spec, there = spec_of(model), Cluster(axes.size, GPUS[gpu], 1e12)
    plan = Plan(recipe="sweep", kv=place, disk="/tmp" if place == "disk" else None)

    def visit(chunk: int) -> list[tuple[float, float]]:
        """Seconds to fetch and to attend, forward and backward."""
        jobs = [Job(spec=spec, plan=replace(plan, chunk=chunk, tile=1), tokens=n * chunk, axes=axes) for n in (1, 2)]
        one, two = (attention_seconds(job, replace(job.costs.work(job), call=64 * K), there.gpu) for job in jobs)
        attend = [(two[way] - 2 * one[way]) / spec.layers for way in (0, 1)]
        tile = {tape.name: sum(tape.row for _ in tape.layers) * chunk for tape in jobs[1].tapes}
        kv, sums = tile["kv"], tile["kv_gradients"]
        if place == "host":
            return [(each / there.gpu.host, seconds) for each, seconds in zip((kv, kv + sums), attend, strict=True)]
        read, write = there.gpu.disk_read / there.count, there.gpu.disk_write / there.count
        fetch = kv / read, (kv + sums) / read + sums / write
        return list(zip(fetch, attend, strict=True))

    job = Job(spec=spec, plan=plan, tokens=M, axes=axes)
    chunk = balance(job, there.gpu, there.machine).chunk
    assert all(fetch <= attend for fetch, attend in visit(axes.context * -(-chunk // axes.context)))
    below = (chunk - 1) // axes.context * axes.context
    assert below == 0 or any(fetch > attend for fetch, attend in visit(below))


def test_no_chunk_below_the_balance_chunk() -> None:
    spec, axes = spec_of("llama2-7b"), Axes(ulysses=4)
    there = Cluster(4, SLOW, 1e12, 28e12)
    limits = least_chunks(spec, axes, there.gpu, there.machine, "cudnn+flash")
    assert 64 * K < limits["host"] < limits["disk"]
    for effort in Effort:
        plans = recipe_variants("sweep", spec, axes, 16 * M, there.budget, effort, "cudnn+flash", limits)
        assert {plan.kv for plan in plans} == {"device", "host", "disk"}
        for plan in plans:
            assert plan.chunk is not None
            assert plan.chunk >= limits.get(plan.kv or "", 0)
    # A sequence shorter than that is a single chunk, which fetches nothing
    short = recipe_variants("sweep", spec, axes, 4 * K, there.budget, Effort.FEW, "cudnn+flash", limits)
    assert {plan.chunk for plan in short if plan.kv != "device"} == {4 * K}


def test_attention_waits_for_k_and_v_below_it() -> None:
    """Also where x, o and all else on the device leave the link to them."""
    spec, there = spec_of("llama2-7b"), Cluster(4, SLOW, 1e12)
    here = dict.fromkeys((*PLACED, "optimizer"), "device") | {"kv": "host"}
    job = Job(spec=spec, plan=Plan(recipe="sweep", **here), tokens=4 * M, axes=Axes(ulysses=4))
    chunk = 1 << balance(job, there.gpu, there.machine).chunk.bit_length()

    def waits(size: int) -> float:
        plan = replace(job.plan, chunk=size)
        return predict_seconds(replace(job, plan=plan), there.gpu, there.machine).waits

    assert waits(chunk) == 0
    # Just below, the copies of a pass are shorter than the pass. Many chunks, because a chunk's own are not fetched
    size = int(0.98 * balance(job, there.gpu, there.machine).chunk)
    just_below = replace(job, plan=replace(job.plan, chunk=size), tokens=64 * size)
    backward = predict_seconds(just_below, there.gpu, there.machine).passes[1]
    assert backward.copies < backward.computing
    assert backward.waits > 0
    assert waits(chunk // 8) > 2 * waits(chunk // 4) > 0


def test_k_and_v_are_part_of_the_copies() -> None:
    job = Job(spec=spec_of("llama3-8b"), plan=Plan(recipe="sweep", kv="host"), tokens=M, axes=Axes(ulysses=8))
    work, without = job.costs.work(job), copies(replace(job, plan=Plan(recipe="sweep")), ("host", "disk"))
    assert work.host == without + work.kv
    assert work.kv.forward.into < work.kv.backward.into
    assert 0 < work.kv.backward.out < work.kv.backward.into


def test_the_reason_is_printed() -> None:
    there = cluster()
    job = Job(spec=spec_of("llama3-8b"), plan=Plan(recipe="sweep", kv="host"), tokens=M, axes=Axes(ulysses=8))
    assert describe(balance(job, there.gpu, there.machine), 64 * K) == (
        "Chunks of 64K: fetching a tile of K and V takes 1.83 ms, attending to it 40.6 ms; they balance at 3K"
    )


def test_less_than_fits_does_not_fit() -> None:
    """What `fits` says without asking how fast is what a search finds."""
    spec, there = spec_of("llama3-8b"), cluster()
    for tokens in (6 * M, 8 * M):
        answer = search(spec, there, tokens, "sweep", mesh=(8, 1))
        assert fits(spec, there, tokens, "sweep", (8, 1), Effort.LEAST) == (answer is not None)


def test_log_sum_exps_and_residual_go_to_the_disk_before_k_and_v() -> None:
    answer = found("llama3-8b", 90 * M, cluster(disk=28 * TB))
    assert answer.recomputed(spec_of("llama3-8b")) == 0
    assert (answer.plan.kv, answer.plan.residual) == ("host", "disk")
    assert answer.seconds.waits == 0
