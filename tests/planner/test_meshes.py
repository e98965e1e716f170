"""Which meshes work, what their links carry (counted rank by rank), and that `plan` and `mesh` agree."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from ithaca.base.errors import IthacaError, PlanError
from ithaca.cli import app
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Machine, read_gpus
from ithaca.planner.meshes import Choice, choose
from ithaca.planner.seconds import busiest
from ithaca.plans.plan import Plan
from ithaca.schedule.costs import Peers, traffic
from ithaca.schedule.job import Job

GPU = read_gpus()["H100-80GB"]


def spec_of(name: str) -> Spec:
    return read_spec(find_config(name)[0])


def shape(choice: Choice) -> tuple[int, int]:
    return choice.axes.ulysses, choice.axes.ring


def links_of_every_rank(job: Job, machine: Machine) -> Iterator[tuple[int, int]]:
    """(inside, across) of each GPU of the job in one step, by where every single peer lies."""
    ulysses, ring = job.axes.ulysses, job.axes.ring
    messages = [
        message for layer in range(job.spec.layers) for way in job.costs.messages(job, layer) for message in way
    ]
    for rank in range(machine.ranks):
        start = rank // job.axes.context * job.axes.context
        my_ring, mine = divmod(rank - start, ulysses)

        def sent(there: bool) -> int:
            def counts(ring: int, head: int) -> bool:
                return (machine.node(start + ring * ulysses + head) == machine.node(rank)) == there  # noqa: B023

            peers = Peers(
                mine,  # noqa: B023
                [head for head in range(ulysses) if head != mine and counts(my_ring, head)],  # noqa: B023
                sum(counts(other, mine) for other in range(ring) if other != my_ring),  # noqa: B023
                ring > 1 and counts((my_ring + 1) % ring, mine),  # noqa: B023
            )
            return traffic(messages, job, peers).bytes

        yield sent(True), sent(False)


@pytest.mark.parametrize(
    ("model", "nodes", "gpus", "sharing"),
    [
        ("llama3-8b", 2, 8, 16),
        ("llama3.2-3b", 2, 6, 12),  # Ulysses ranks that lie on two nodes, and heads that do not divide
        ("llama3-8b", 3, 8, 12),  # sequences that begin in the middle of a node
        ("tiny", 5, 2, 10),
        ("qwen3-32b", 1, 8, 4),
    ],
)
@pytest.mark.parametrize("recipe", ["sweep", "hybrid"])
def test_the_links_of_the_busiest_rank(model: str, nodes: int, gpus: int, sharing: int, recipe: str) -> None:
    spec, plan, machine = spec_of(model), Plan(recipe=recipe), Machine(nodes=nodes, gpus=gpus)
    for choice in choose(spec, plan, GPU, machine, 1_000_000, sharing):
        job = Job(spec=spec, plan=plan, tokens=1_000_000, axes=choice.axes)
        links = list(links_of_every_rank(job, machine))
        slowest = max(inside / machine.inside + across / machine.across for inside, across in links)
        assert (choice.sent.inside, choice.sent.across) in links
        assert choice.seconds.exchange == pytest.approx(slowest)
        assert choice.axes.data * sharing == nodes * gpus


def test_ulysses_stays_inside_a_node() -> None:
    """The ring goes across; K and V are not held twice, as they would be with more Ulysses ranks than their heads."""
    spec, plan, machine = spec_of("llama3-8b"), Plan(recipe="sweep"), Machine(nodes=2, gpus=8)
    best = choose(spec, plan, GPU, machine, 1 << 20)[0]
    assert best.axes == Axes(ring=2, ulysses=8)
    to_ulysses, _ = busiest(Job(spec=spec, plan=plan, tokens=1 << 20, axes=best.axes), machine)
    assert to_ulysses.across == 0


def test_a_long_ring_has_more_to_merge() -> None:
    """Each ring rank merges outputs for all: with four of them that costs more than 1 %, and two are best."""
    choices = choose(spec_of("llama3-8b"), Plan(recipe="sweep"), GPU, Machine(nodes=4, gpus=8), 1 << 20)
    assert shape(choices[0]) == (16, 2)
    other = next(choice for choice in choices if shape(choice) == (8, 4))
    assert other.kv_bytes < choices[0].kv_bytes
    assert 1.01 < other.seconds.step / choices[1].seconds.step < 1.02


def test_a_mesh_with_uneven_heads_is_not_best() -> None:
    choices = choose(spec_of("llama3-8b"), Plan(recipe="sweep"), GPU, Machine(nodes=2, gpus=6), 1 << 20)
    assert shape(choices[0]) == (4, 3)
    assert [choice.axes.ulysses for choice in choices[3:]] == [3, 12, 6]
    assert choices[-1].seconds.computing == pytest.approx(1.5 * choices[0].seconds.computing, rel=0.03)


def test_more_ranks_than_heads() -> None:
    choices = choose(spec_of("tiny"), Plan(recipe="sweep"), GPU, Machine(nodes=8, gpus=8), 4096)
    assert sorted(map(shape, choices)) == [(1, 64), (2, 32), (4, 16), (8, 8)]


def test_a_slow_network_is_waited_for() -> None:
    """Then fewer bytes across nodes count for more than K and V that are held twice."""
    spec, plan = spec_of("llama3-8b"), Plan(recipe="sweep")
    slow = choose(spec, plan, GPU, Machine(nodes=2, gpus=8, across=5e8), 1 << 20)
    assert slow[0].seconds.step == min(choice.seconds.step for choice in slow)
    assert shape(slow[0]) == (16, 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "dense"}, "recipe 'dense' cannot share a sequence among GPUs: use recipe 'sweep'"),
        ({"sharing": 3}, "--share 3 does not divide 64 GPUs: use 1, 2, 4, 8, 16, 32, 64"),
        ({"nodes": 0}, "--nodes 0 is out of range: give 1 to 1048576"),
        ({"gpus": 2000}, "--gpus 2000 is out of range: give 1 to 576"),
        ({"sharing": 0}, "--share 0 does not divide 64 GPUs: use 1, 2, 4, 8, 16, 32, 64"),
        (
            {"nodes": 1_000_000, "gpus": 500},
            "1000000 nodes of 500 GPUs are 500000000 GPUs: give at most 1048576",
        ),
        (
            {"recipe": "ulysses"},
            "recipe 'ulysses' cannot share a sequence among 64 GPUs because the model has 32 query heads: share it "
            "among 32 (--share 32), or use recipe 'sweep'",
        ),
    ],
)
def test_refused(options: dict, sentence: str) -> None:
    sizes = {"nodes": 8, "gpus": 8} | {name: options[name] for name in ("nodes", "gpus") if name in options}
    with pytest.raises(PlanError) as refused:
        choose(
            spec_of("llama3-8b"),
            Plan(recipe=options.get("recipe", "sweep")),
            GPU,
            Machine(**sizes),
            4096,
            options.get("sharing"),
        )
    assert str(refused.value) == sentence


NOTICE = (
    "ithaca mesh is now `ithaca plan --meshes`; without --share it compares every number of GPUs that can share a "
    "sequence\n"
)


def said(*words: str) -> str:
    outcome = CliRunner().invoke(app, ["mesh", *words])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr == NOTICE
    return outcome.stdout


def planned(*words: str) -> Any:
    outcome = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr == ""
    return json.loads(outcome.stdout)


def test_the_command() -> None:
    text = said("llama3-8b", "--nodes", "2", "--tokens", "5M")
    lines = text.splitlines()
    assert lines[0].startswith("llama3-8b at 5M tokens on 16xH100-80GB with recipe 'sweep': meshes, the best first")
    assert lines[3].startswith("8 × 2 ")
    rows = [line for line in lines if re.match(r"\d+ × \d+ ", line)]
    assert len(rows) == 12
    assert [line.endswith("does not fit") for line in rows] == 9 * [False] + 3 * [True]
    assert lines[-1].startswith(
        "ithaca train --set model.source=llama3-8b --set train.tokens=5M --set plan.recipe=sweep"
    )
    assert lines[-1].endswith(" --set mesh.ulysses=8 --set mesh.ring=2 --run runs/llama3-8b-5M")
    assert "Not possible: 64 × 1: more Ulysses ranks than the 32 query heads" in said("llama3-8b", "--nodes", "8")
    assert "Not possible: 8 × 1: recipe 'ring' has no Ulysses ranks" in said("llama3-8b", "--recipe", "ring")
    table = said("llama3-8b", "--recipe", "tensor", "--nodes", "2").splitlines()
    assert table[2].startswith("tensor × ring  sequences")
    assert any(line.startswith("8 × 2 ") for line in table)
    assert "Not possible: 16 × 1: tensor ranks stay within a node, which has 8 GPUs" in table


KEYS = {  # of each mesh, as programs have read them; the last two are newer
    "ulysses",
    "tensor",
    "ring",
    "data",
    "imbalance",
    "inside_bytes",
    "across_bytes",
    "kv_bytes",
    "computing_seconds",
    "exchange_seconds",
    "seconds",
    "tokens_per_second_per_gpu",
    "fits",
}


def test_the_command_as_json() -> None:
    found = json.loads(said("llama3-8b", "--nodes", "2", "--share", "8", "--json"))
    assert set(found) == {"model", "tokens", "recipe", "nodes", "gpus", "assumed", "meshes", "not_possible"}
    assert set(found["assumed"]) == {"inside_bytes_per_second", "across_bytes_per_second", "flops"}
    assert all(set(mesh) == KEYS for mesh in found["meshes"])
    assert (found["nodes"], found["gpus"], found["tokens"]) == (2, 8, 1 << 20)
    best = found["meshes"][0]
    assert (best["ulysses"], best["ring"], best["data"]) == (8, 1, 2)
    assert len(found["meshes"]) == 4
    assert all(mesh["across_bytes"] == 0 for mesh in found["meshes"])
    assert found["not_possible"] == []


def test_links_are_those_that_are_given() -> None:
    words = ["llama3-8b", "--nodes", "2", "--tokens", "256K", "--share", "16", "--across", "1GB", "--inside", "10GB"]
    found = json.loads(said(*words, "--json"))
    assert found["assumed"]["across_bytes_per_second"] == 1e9
    best = found["meshes"][0]
    assert best["exchange_seconds"] == pytest.approx(best["inside_bytes"] / 10e9 + best["across_bytes"] / 1e9)


@pytest.mark.parametrize(
    ("model", "nodes", "tokens", "recipe"),
    [
        ("llama3-8b", 1, "256K", "sweep"),  # once 8 × 1 by `mesh`, a sequence for each GPU by `plan`
        ("llama3-8b", 1, "256K", "ulysses"),
        ("llama3-8b", 1, "256K", "hybrid"),
        ("llama3-8b", 1, "5M", "sweep"),
        ("llama3-8b", 2, "1M", "hybrid"),
        ("qwen3-32b", 4, "512K", "sweep"),
        ("llama3.2-3b", 2, "64K", "alst"),
    ],
)
def test_plan_and_mesh_agree(model: str, nodes: int, tokens: str, recipe: str) -> None:
    """One cost model: the first mesh of the table, by either command, is the mesh of the answer."""
    words = [model, "--gpus", f"{nodes}x8xH100-80GB", "--tokens", tokens, "--recipe", recipe]
    answer = planned(*words)
    table = planned(*words, "--meshes")
    old = json.loads(said(model, "--nodes", str(nodes), "--tokens", tokens, "--recipe", recipe, "--json"))
    assert table == old
    best = table["meshes"][0]
    assert answer["mesh"] == {"shard": best["data"], **{axis: best[axis] for axis in ("ring", "ulysses", "tensor")}}
    assert best["seconds"] == pytest.approx(answer["seconds_per_step"])
    assert best["tokens_per_second_per_gpu"] == pytest.approx(answer["tokens_per_second_per_gpu"])
    fitting = [mesh["tokens_per_second_per_gpu"] for mesh in table["meshes"] if mesh["fits"]]
    assert best["fits"]
    assert max(fitting) <= 1.01 * fitting[0]
    assert fitting[1:] == sorted(fitting[1:], reverse=True)


@pytest.mark.parametrize(
    "words", [["lama3-8b"], ["tiny", "--recipe", "swep"], ["tiny", "--tokens", "0"], ["tiny", "--inside", "x"]]
)
def test_mistakes_of_the_command(words: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["mesh", *words])
    assert isinstance(outcome.exception, IthacaError)


def test_it_needs_no_torch() -> None:
    asked = "from ithaca.cli import app; app(['mesh', 'tiny'], standalone_mode=False)"
    program = f"import sys; {asked}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, stdout=subprocess.DEVNULL)
