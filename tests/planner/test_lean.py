"""The Plan with the least GPU memory: never more than the fastest, nothing on the device that can be elsewhere."""

import pytest

from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Cluster
from ithaca.planner.lean import ROOM, leanest
from ithaca.planner.search import fits, search
from ithaca.schedule.variants import Effort
from tests.planner.test_search import GPUS, TB, K, M, check, cluster, spec_of

GiB = 2**30


def test_three_billion_parameters_at_5m() -> None:
    spec, there = spec_of("llama3.2-3b"), cluster()
    found = leanest(spec, there, 5 * M)
    assert found is not None
    plan = found.answer.plan
    assert found.answer.memory.total <= 18 * GiB
    assert found.answer.recomputed(spec) == 0
    assert (plan.kv, plan.lse, plan.residual, plan.optimizer) == ("host", "host", "host", "host")
    assert {*plan.placement(spec.layers).x, *plan.placement(spec.layers).o} <= {"host", "rebuild"}
    assert found.fastest == search(spec, there, 5 * M)
    assert 1 <= found.answer.seconds.step / found.fastest.seconds.step < 1.05
    check(found.answer, spec, there, 5 * M)


@pytest.mark.parametrize(
    ("model", "there", "tokens"),
    [
        ("tiny", cluster("1xRTX4090-24GB", 64e9), 8 * K),
        ("llama3-8b", cluster(), 128 * K),
        ("llama3-8b", cluster("1xH200-141GB"), 512 * K),
        ("llama2-7b", cluster("4xA100-80GB", TB), 2 * M),
        ("qwen3-32b", cluster("16xH100-80GB"), M),
        ("llama3-8b", cluster(host=1.0), M),  # nothing can leave the device
    ],
)
def test_never_more_than_the_fastest(model: str, there: Cluster, tokens: int) -> None:
    spec = spec_of(model)
    found = leanest(spec, there, tokens)
    assert found is not None
    assert found.least <= found.answer.memory.total <= found.fastest.memory.total
    assert found.answer.recomputed(spec) <= found.fastest.recomputed(spec)
    check(found.answer, spec, there, tokens)


def test_the_least_memory() -> None:
    """On the mesh of all GPUs."""
    spec, there = spec_of("llama3-8b"), cluster()
    found = leanest(spec, there, M)
    assert found is not None
    assert found.answer.axes == Axes(ulysses=8)
    assert found.least <= found.answer.memory.total <= ROOM * found.least
    assert fits(spec, there.limited(found.least), M, "sweep", (8, 1), Effort.LEAST_ONCE)
    less = there.limited(int(0.97 * found.least))
    assert not fits(spec, less, M, "sweep", (8, 1), Effort.LEAST_ONCE)


def test_a_tenth_more_memory_is_far_faster() -> None:
    spec, there = spec_of("llama3-8b"), cluster()
    found = leanest(spec, there, 128 * K)
    assert found is not None
    alone = search(spec, there.limited(found.least), 128 * K, "sweep")
    assert alone is not None
    assert found.answer.rate > 1.3 * alone.rate


def test_where_nothing_fits() -> None:
    assert leanest(spec_of("llama3-8b"), Cluster(1, GPUS["RTX4090-24GB"], 64e9), M) is None


def test_a_limit_in_bytes() -> None:
    for size in (10**9, 11_999_999_999, 70 * GiB):
        assert 0 <= cluster().limited(size).capacity - size <= 2


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8b", 8 * K), ("llama3.2-1b", 8 * K)])
def test_the_least_is_never_more_than_the_answer(model: str, tokens: int) -> None:
    """The search for the least is exact to 64 MiB alone, and a recipe may need no more than that."""
    found = leanest(spec_of(model), cluster(), tokens, "dense")
    assert found is not None
    assert found.least <= found.answer.memory.total
