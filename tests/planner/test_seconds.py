"""Predicted time against published tables, and how it follows from the Plan."""

from dataclasses import replace

import pytest

from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Machine, read_gpus
from ithaca.planner.seconds import Seconds, busiest, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Peers, traffic
from ithaca.schedule.job import Job

K, M = 2**10, 2**20
GPU = read_gpus()["H100-80GB"]

# Tokens/s of a GPU, 8 × H100-80GB, Llama3-8B, as the paper on untied Ulysses has them
PUBLISHED = {
    "ulysses": {512 * K: 879, M: 475, 2 * M: 246, 3 * M: 162},
    "untied": {512 * K: 867, M: 473, 2 * M: 246, 3 * M: 166, 4 * M: 126, 5 * M: 98},
}
FPDT = {128 * K: 1172, 256 * K: 885, 512 * K: 621, M: 382, 2 * M: 220, 3 * M: 153, 4 * M: 120}
# Qwen3-32B on 16 × H100-80GB, 8 Ulysses × 2 ring ranks
UNTIED_RING = {512 * K: 204, M: 113, 2 * M: 59.6, 3 * M: 40.4, 4 * M: 30.0}


def predicted(model: str, plan: Plan, tokens: int, nodes: int = 1, ulysses: int = 8, ring: int = 1) -> Seconds:
    job = Job(spec=read_spec(find_config(model)[0]), plan=plan, tokens=tokens, axes=Axes(ring=ring, ulysses=ulysses))
    return predict_seconds(job, GPU, Machine(nodes=nodes, gpus=8))


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_speed(recipe: str) -> None:
    for tokens, rate in PUBLISHED[recipe].items():
        found = tokens / 8 / predicted("llama3-8b", Plan(recipe=recipe), tokens).step
        assert found == pytest.approx(rate, rel=0.15), tokens


def test_published_speed_of_head_rounds_in_a_ring() -> None:
    for tokens, rate in UNTIED_RING.items():
        seconds = predicted("qwen3-32b", Plan(recipe="untied"), tokens, nodes=2, ring=2)
        assert tokens / 16 / seconds.step == pytest.approx(rate, rel=0.15), tokens


@pytest.mark.parametrize(("kernel", "longest"), [("flash4", 4 * M), ("cudnn+flash", 2 * M)])
def test_fpdt_is_no_slower_than_published(kernel: str, longest: int) -> None:
    """Much faster where theirs waits for its streams. From 3M on, all is attention, and theirs is faster than cuDNN."""
    shares = [
        tokens / 8 / predicted("llama3-8b", Plan(recipe="fpdt", kernel=kernel), tokens).step / rate
        for tokens, rate in FPDT.items()
        if tokens <= longest
    ]
    assert min(shares) > 1
    assert shares == sorted(shares, reverse=True)


def test_attention_that_runs_once() -> None:
    """At 5M nearly all of a step is attention: (2F + B) / (F + B) of it is saved where o is kept."""
    kept, again = (predicted("llama3-8b", Plan(recipe="sweep", o=o), 5 * M) for o in ("host", "recompute"))
    assert again.attention_forward == 2 * kept.attention_forward
    assert again.attention_backward == kept.attention_backward
    assert again.step / kept.step == pytest.approx(again.computing / kept.computing, rel=0.01)


def test_twice_the_ranks_take_half_the_time() -> None:
    one, two = (
        predicted("llama3-8b", Plan(recipe="sweep"), 5 * M, nodes=nodes, ring=ring) for nodes, ring in ((1, 1), (2, 2))
    )
    assert two.step == pytest.approx(one.step / 2, rel=0.01)


def test_a_slow_link_to_the_host_is_waited_for() -> None:
    spec, machine = read_spec(find_config("llama3-8b")[0]), Machine(nodes=1, gpus=8)
    slow = replace(GPU, host=1e6)

    def seconds(plan: Plan) -> Seconds:
        return predict_seconds(Job(spec=spec, plan=plan, tokens=M, axes=Axes(ulysses=8)), slow, machine)

    found = seconds(Plan(recipe="sweep"))
    assert found.step == pytest.approx(found.copies, rel=1e-3)
    assert seconds(Plan(recipe="sweep", x="device", o="device", residual="device")).copies == 0


def test_optimizer_states_on_the_host_take_their_time() -> None:
    device, host = (predicted("llama3-8b", Plan(recipe="sweep", optimizer=place), M) for place in ("device", "host"))
    assert host.optimizer > 10 * device.optimizer
    assert host.step - device.step == pytest.approx(host.optimizer - device.optimizer)


def test_the_gpus_of_a_node_share_its_disk() -> None:
    """The same rank on a node with eight times the GPUs waits eight times as long for it, but not for its host."""
    spec, plan = read_spec(find_config("llama3-8b")[0]), Plan(recipe="sweep", x="disk", o="disk", disk="/scratch")

    def copies(plan: Plan, gpus: int) -> float:
        job = Job(spec=spec, plan=plan, tokens=M, axes=Axes(ulysses=8))
        return predict_seconds(job, GPU, Machine(nodes=8 // gpus, gpus=gpus)).copies

    assert copies(plan, 8) == pytest.approx(8 * copies(plan, 1))
    hosted = Plan(recipe="sweep")
    assert copies(hosted, 8) == copies(hosted, 1)


@pytest.mark.parametrize("o", ["recompute*7, host*25", "host*25, recompute*7", "host", "recompute"])
def test_layers_that_send_more_are_counted(o: str) -> None:
    """Only layers that recompute attention send its queries and outputs again."""
    spec = read_spec(find_config("llama3-8b")[0])
    plan = Plan(recipe="sweep", chunk=64 * K, o=o).settled_for(spec)
    job = Job(spec=spec, plan=plan, tokens=M, axes=Axes(ulysses=4, ring=2))
    messages = [message for layer in range(spec.layers) for way in job.costs.messages(job, layer) for message in way]
    peers = Peers.all(4, 2, 0)
    sent = [traffic([each for each in messages if each.ring == ring], job, peers).bytes for ring in (False, True)]
    found = busiest(job, Machine(nodes=1, gpus=8))
    assert [(each.inside, each.across) for each in found] == [(each, 0) for each in sent]
