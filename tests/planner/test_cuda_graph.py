"""When the planner launches passes as CUDA graphs: if a step would wait for the host, and where it can."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ithaca.attention.kernels import facts
from ithaca.cli import app
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.command import read_cluster
from ithaca.planner.hardware import CPU, MARGIN, RUNTIME, Cluster
from ithaca.planner.search import search
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import LIBRARIES_GRAPH, beside_graph, step_memory

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
    assert short.kernel == "auto"
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


def test_room_for_a_validation() -> None:
    """A pass without gradients comes on top of a graph's memory, so a graph is taken only where both fit."""
    job = Job(spec=SMALL, plan=Plan(recipe="dense", checkpoint="none", zero=2, kernel="flash4"), tokens=4 * K)
    needed, beside = step_memory(job).total, LIBRARIES_GRAPH + beside_graph(job)
    assert beside > 2 * SMALL.parameters()  # all weights in bf16, and activations
    for more, graph in ((beside - 2**20, None), (beside + 2**20, True)):
        memory = (needed + more + RUNTIME) / (1 - MARGIN)
        here = cluster("1xH200")
        plan = plan_of(4 * K, replace(here, gpu=replace(here.gpu, memory=memory)), "dense")
        assert (plan.checkpoint, plan.cuda_graph) == ("none", graph)


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
