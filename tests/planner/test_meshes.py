"""Which meshes work, and what their links carry, against counting rank by rank."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ithaca.base.errors import IthacaError, PlanError
from ithaca.cli import app
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.spec import Spec
from ithaca.parallel.head_split import head_rounds, split_heads
from ithaca.parallel.layout import Layout
from ithaca.planner.machine import Machine
from ithaca.planner.meshes import BF16, FP32, choose
from ithaca.plans.plan import Plan
from ithaca.plans.traffic import Sender, block_traffic


def spec_of(name: str) -> Spec:
    return read_spec(find_config(name)[0])


def links_of_every_rank(
    spec: Spec, plan: Plan, machine: Machine, tokens: int, ulysses: int, ring: int
) -> Iterator[tuple[int, int]]:
    """(inside, across) of each GPU of the job in one step, by where every single peer lies."""
    split, plan = split_heads(spec.heads, spec.kv_heads, ulysses), plan.settled()
    layout = Layout(tokens, plan.chunk_of(tokens, True) if plan.sweeps else tokens, ulysses, ring)
    rounds = head_rounds(split, plan.heads_at_once(ulysses))
    for rank in range(machine.ranks):
        start = rank // layout.ranks * layout.ranks
        my_ring, mine = divmod(rank - start, ulysses)

        def sent(there: bool) -> int:
            def counts(ring: int, head: int) -> bool:
                return (machine.node(start + ring * ulysses + head) == machine.node(rank)) == there  # noqa: B023

            sender = Sender(
                mine,  # noqa: B023
                layout.local,
                layout.chunks.count,
                spec.head_size,
                BF16,
                FP32,
                ring,
                my_ring,  # noqa: B023
                counts,
            )
            blocks = [block_traffic(plan, layer, spec.layers, rounds, sender) for layer in range(spec.layers)]
            return sum(way.bytes for block in blocks for way in block)

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
    for choice in choose(spec, plan, machine, 1_000_000, sharing):
        links = list(links_of_every_rank(spec, plan, machine, 1_000_000, choice.ulysses, choice.ring))
        slowest = max(inside / machine.inside + across / machine.across for inside, across in links)
        assert (choice.inside, choice.across) in links
        assert choice.exchange == pytest.approx(slowest)
        assert choice.data * sharing == nodes * gpus


def test_ulysses_stays_inside_a_node() -> None:
    """The ring goes across; K and V are not held twice, as they would be with more Ulysses ranks than their heads."""
    for nodes in (2, 4):
        best = choose(spec_of("llama3-8b"), Plan(recipe="sweep"), Machine(nodes=nodes, gpus=8), 1 << 20)[0]
        assert (best.ulysses, best.ring, best.between_ulysses.across) == (8, nodes, 0)


def test_a_mesh_with_uneven_heads_is_not_best() -> None:
    choices = choose(spec_of("llama3-8b"), Plan(recipe="sweep"), Machine(nodes=2, gpus=6), 1 << 20)
    assert (choices[0].ulysses, choices[0].ring) == (4, 3)
    assert [choice.ulysses for choice in choices[3:]] == [3, 12, 6]
    assert choices[-1].computing == pytest.approx(1.5 * choices[0].computing, rel=0.03)


def test_more_ranks_than_heads() -> None:
    shapes = [
        (mesh.ulysses, mesh.ring)
        for mesh in choose(spec_of("tiny"), Plan(recipe="sweep"), Machine(nodes=8, gpus=8), 4096)
    ]
    assert sorted(shapes) == [(1, 64), (2, 32), (4, 16), (8, 8)]


def test_a_slow_network_is_waited_for() -> None:
    """Then fewer bytes across nodes count for more than K and V that are held twice."""
    spec, plan = spec_of("llama3-8b"), Plan(recipe="sweep")
    slow = choose(spec, plan, Machine(nodes=2, gpus=8, across=1e9), 1 << 18)
    assert slow[0].seconds == min(choice.seconds for choice in slow)
    assert (slow[0].ulysses, slow[0].ring) == (16, 1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"recipe": "dense"}, "recipe 'dense' shares no sequence among GPUs: 'sweep' does"),
        ({"sharing": 3}, "share=3 does not divide 64 GPUs: 1, 2, 4, 8, 16, 32, 64 do"),
        ({"nodes": 0}, "--nodes 0 cannot be planned for: 1 to 1048576 can"),
        ({"gpus": 2000}, "--gpus 2000 cannot be planned for: 1 to 576 can"),
        ({"sharing": 0}, "share=0 does not divide 64 GPUs: 1, 2, 4, 8, 16, 32, 64 do"),
        (
            {"nodes": 1_000_000, "gpus": 500},
            "1000000 nodes of 500 GPUs are 500000000: up to 1048576 can be planned for",
        ),
        (
            {"recipe": "ulysses"},
            "recipe 'ulysses' cannot share a sequence among 64 GPUs, as the model has 32 query heads: 32 can share one "
            "(share=32), or use recipe 'sweep'",
        ),
    ],
)
def test_refused(options: dict, sentence: str) -> None:
    sizes = {"nodes": 8, "gpus": 8} | {name: options[name] for name in ("nodes", "gpus") if name in options}
    with pytest.raises(PlanError) as refused:
        choose(
            spec_of("llama3-8b"),
            Plan(recipe=options.get("recipe", "sweep")),
            Machine(**sizes),
            4096,
            options.get("sharing"),
        )
    assert str(refused.value) == sentence


def said(*words: str) -> str:
    outcome = CliRunner().invoke(app, ["mesh", *words])
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_the_command() -> None:
    text = said("llama3-8b", "--nodes", "2", "--tokens", "5M")
    lines = text.splitlines()
    assert lines[0].startswith("llama3-8b, 5M tokens, recipe 'sweep', 2 × 8 GPUs; 16 share a sequence")
    assert lines[2].startswith("8 × 2  best")
    assert len(lines) == 9
    assert lines[-1] == "ithaca train --set plan.recipe=sweep --set mesh.ulysses=8 --set mesh.ring=2"
    assert "not possible: 64 × 1: more Ulysses ranks than the 32 query heads" in said("llama3-8b", "--nodes", "8")
    assert "not possible: 8 × 1: recipe 'ring' has no Ulysses ranks" in said("llama3-8b", "--recipe", "ring")


def test_what_the_docs_show() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ranks.md").read_text(encoding="utf-8")
    words, shown = re.search(r"^\$ ithaca mesh (.*?)\n(.*?)```", page, re.MULTILINE | re.DOTALL).groups()  # pyrefly: ignore
    assert shown == said(*words.split())


def test_the_command_as_json() -> None:
    found = json.loads(said("llama3-8b", "--nodes", "2", "--share", "8", "--json"))
    assert (found["nodes"], found["gpus"], found["tokens"]) == (2, 8, 1 << 20)
    best = found["meshes"][0]
    assert (best["ulysses"], best["ring"], best["data"]) == (8, 1, 2)
    assert all(mesh["across_bytes"] == 0 for mesh in found["meshes"])
    assert found["not_possible"] == []


@pytest.mark.parametrize(
    "words", [["lama3-8b"], ["tiny", "--recipe", "swep"], ["tiny", "--tokens", "0"], ["tiny", "--inside", "x"]]
)
def test_mistakes_of_the_command(words: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["mesh", *words])
    assert isinstance(outcome.exception, IthacaError)


def test_it_needs_no_torch() -> None:
    asked = "from ithaca.cli import app; app(['mesh', 'tiny'], standalone_mode=False)"
    program = f"import sys; {asked}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
