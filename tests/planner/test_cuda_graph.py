"""When the planner launches passes as CUDA graphs: if a step would wait for the host, and where it can."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ithaca.attention.kernels import facts
from ithaca.cli import app
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.command import read_cluster
from ithaca.planner.hardware import CPU, Cluster
from ithaca.planner.search import search
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import LIBRARIES_GRAPH, beside_graph, step_memory
from ithaca.schedule.variants import Effort, fitting_graph, fitting_plans
from ithaca.tape.spec import Budget

K = 2**10
SMALL = read_spec(find_config("smollm2-135m")[0])


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of flash4 is there."""
    monkeypatch.setattr(facts, "_installed", lambda _: True)


def plan_of(tokens: int, cluster: Cluster, recipe: str | None = None) -> Plan:
    answer = search(SMALL, cluster, tokens, recipe)
    assert answer is not None
    return answer.plan


def cluster(gpus: str) -> Cluster:
    return read_cluster(gpus, None, None, "0")


def test_steps_that_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = cluster("1xH200")
    short, long = plan_of(4 * K, here), plan_of(64 * K, here)
    assert (short.recipe, short.zero, short.cuda_graph) == ("dense", 2, True)
    assert not long.cuda_graph
    assert not plan_of(4 * K, here, "sweep").cuda_graph
    assert not plan_of(4 * K, cluster("2xH200")).cuda_graph
    assert (short.kernel, long.kernel) == ("flash4", "auto")  # where it trains, `auto` may be one that cannot
    monkeypatch.setattr(facts, "_installed", lambda _: False)
    for gpus in ("1xH200", "1xA100-80GB"):  # `auto` is cudnn+flash there, which cannot be replayed
        other = plan_of(4 * K, cluster(gpus))
        assert (other.kernel, other.cuda_graph) == ("flash", True)
        assert plan_of(64 * K, cluster(gpus)).kernel == "auto"


def test_a_cpu_has_none() -> None:
    """In a table of the doctor it stands for a GPU."""
    here = cluster("1xH200")
    assert not plan_of(4 * K, replace(here, gpu=replace(here.gpu, name=CPU))).cuda_graph


def test_how_much_it_gives() -> None:
    here = cluster("1xH200")
    answer = search(SMALL, here, 4 * K)
    assert answer is not None
    eager = replace(answer.plan, cuda_graph=False)
    found = {}
    for plan in (answer.plan, eager):
        job = Job(spec=SMALL, plan=replace(plan, kernel="flash4"), tokens=4 * K)
        found[plan.cuda_graph] = job
    assert step_memory(found[True]).total - step_memory(found[False]).total == LIBRARIES_GRAPH
    several = [step_memory(replace(found[graph], passes=2)).parts["gradients"] for graph in (True, False)]
    assert several[0] - several[1] == 4 * SMALL.parameters()


def limited(memory: int) -> Cluster:
    """An H200 of which a Plan may use so many bytes."""
    return cluster("1xH200").limited(memory)


def test_room_for_a_validation() -> None:
    """A pass without gradients comes on top of a graph's memory, so a graph is taken only where both fit."""
    plan, axes = Plan(recipe="dense", checkpoint="none", x="device", kernel="flash4"), Axes()
    job = Job(spec=SMALL, plan=replace(plan, zero=2, cuda_graph=True), tokens=4 * K)
    needed = step_memory(job).total + beside_graph(job)
    for device, graph in ((needed - 1, False), (needed, True)):
        budget = Budget(device, 2**40, 0)
        found = [each for each, _ in fitting_plans(plan, SMALL, axes, 4 * K, budget, Effort.ALL, None, "flash4")]
        assert [each.cuda_graph for each in found] == [None, *[True] * graph, None]
        assert fitting_graph(replace(plan, zero=2), SMALL, axes, 4 * K, budget, "flash4") == [job.plan] * graph


def test_what_a_validation_takes() -> None:
    """Weights in bf16, logits of a tile, and an MLP, counted by hand; what else there is takes less than the logits."""
    job = Job(spec=SMALL, plan=Plan(recipe="dense", checkpoint="none", zero=2, kernel="flash4"), tokens=4 * K)
    weights, logits = 2 * SMALL.parameters(), 2 * SMALL.vocab * min(job.loss_rows, 4 * K)
    mlp = 2 * 4 * K * (3 * SMALL.mlp + 2 * SMALL.hidden)
    assert weights + logits + mlp / 2 < beside_graph(job) < weights + 2 * logits + mlp


def test_less_is_saved_where_that_leaves_room_for_a_graph() -> None:
    """Without a graph the step waits for the host, so one that recomputes is 4.8 times as fast."""
    job = Job(spec=SMALL, plan=Plan(recipe="dense", checkpoint="none", zero=2, kernel="flash4"), tokens=4 * K)
    answer = search(SMALL, limited(step_memory(job).total + 2**20), 4 * K)
    assert answer is not None
    assert (answer.plan.checkpoint, answer.plan.cuda_graph) == ("selective", True)
    assert answer.seconds.step < 0.03


def test_what_installing_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line about a kernel that is missing counts the graph that it makes possible."""
    words = ["plan", "smollm2-135m", "--gpus", "1xH200", "--tokens", "4K"]
    answer = search(SMALL, cluster("1xH200"), 4 * K)
    assert answer is not None
    monkeypatch.setattr(facts, "_installed", lambda _: False)
    assert f"with flash4 a step would take {answer.seconds.step:.3g} s" in CliRunner().invoke(app, words).output


def test_the_answer_says_so() -> None:
    words = ["plan", "smollm2-135m", "--gpus", "1xH200", "--tokens", "4K"]
    said = CliRunner().invoke(app, words).output
    assert "GPU operations: launched as CUDA graphs, all of a pass at once" in said
    assert "--set plan.cuda_graph=true --set plan.zero=2" in said
    assert "CUDA graph" not in CliRunner().invoke(app, [*words[:-1], "64K"]).output
