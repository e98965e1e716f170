"""Predicted memory against what a rehearsed rank is seen to hold, owner by owner, and how it follows from the Plan.

The rehearsals run in bf16 on this CPU. What its kernels take for themselves is not a GPU's, so the owners that hold
what kernels make (blocks, attention, exchange, loss) are not compared here.
"""

import json
import os
from collections import Counter
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ithaca.base.owners import BATCH, BLOCKS, GATHERED, GRADIENTS, KEYS, STATES, TAPES
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.model.spec import Spec
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import mesh
from ithaca.planner import memory
from ithaca.planner.memory import Memory, predict_memory
from ithaca.plans.plan import Plan
from ithaca.rehearsal import rehearse
from ithaca.rehearsal.fake_kernels import Weightless
from ithaca.rehearsal.memory_owners import Meter
from tests.nursery import Nursery

K, M = 2**10, 2**20
TOKENS = 512
LAYERS = 4  # of the model; some scenes run two of them

Words = dict[str, Any]
SWEEP: Words = {"recipe": "sweep", "chunk": 128}
SCENES: dict[str, tuple[Words, dict[str, int]]] = {
    "sweep": (SWEEP, {"ulysses": 4}),
    "sweep on a ring": ({**SWEEP, "tile": 25}, {"ulysses": 2, "ring": 2}),
    "o recomputed": ({**SWEEP, "o": "recompute"}, {"ulysses": 4}),
    "x rebuilt": ({**SWEEP, "x": "host, rebuild"}, {"ulysses": 4}),
    "on the device": ({**SWEEP, "x": "device", "o": "device", "residual": "device"}, {"ulysses": 4}),
    "on the host": ({**SWEEP, "kv": "host", "lse": "host"}, {"ulysses": 4}),
    "chunks that do not divide": ({**SWEEP, "chunk": 100}, {"ulysses": 2, "shard": 2}),
    "moments on the host": ({**SWEEP, "optimizer": "host"}, {"ulysses": 4}),
    "untied": ({"recipe": "untied", "tile": 25}, {"ulysses": 4}),
    "hybrid": ({"recipe": "hybrid"}, {"ulysses": 2, "ring": 2}),
    "ulysses selective": ({"recipe": "ulysses", "checkpoint": "selective"}, {"ulysses": 4}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
}
# Run by default; the others where all tests are
ALWAYS = {
    ("sweep on a ring", True, 2),
    ("x rebuilt", True, LAYERS),
    ("on the host", False, 2),
    ("moments on the host", True, 2),
    ("untied", False, 2),
    ("dense", True, 2),
}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full)
    for case in product(SCENES, (True, False), (2, LAYERS))
]


def tiny(tied: bool) -> Spec:
    return read_spec({**PRESETS["tiny"], "tie_word_embeddings": tied})


def watch(name: str, tied: bool, present: int, file: Path) -> None:
    """Rehearse in a process of its own; write what was held when the last and the first block's attention began."""
    # A virtual CPU may announce instructions for bf16 that it does not have
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    meters: list[Meter] = []
    seen: list[Counter[str]] = []

    class Watched(Meter):
        def __init__(self, *args: Any):
            super().__init__(*args)
            meters.append(self)

    class Watching(Weightless):
        def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            seen.append(Counter(meters[0].now))
            return super().backward(*args)

    def in_bf16(scene: rehearse.Scene, spec: Spec) -> ModelSource:
        some = spec.with_layers(scene.layers or spec.layers)
        return ModelSource(some, {}, RandomWeights(some, 0), "bfloat16", None)

    rehearse.Meter, rehearse.Weightless, rehearse._source = Watched, Watching, in_bf16  # pyrefly: ignore
    PRESETS["tiny"] = {**PRESETS["tiny"], "tie_word_embeddings": tied}
    words, axes = SCENES[name]
    plan = Plan(**words)
    start_loopback(4)
    scene = rehearse.Scene(model="tiny", plan=plan, tokens=TOKENS, layers=present, memory_only=True, **axes)
    found = rehearse.play(scene, mesh(**axes))
    dist.destroy_process_group()
    file.write_text(json.dumps({"last": seen[0], "first": seen[-1], "host": found["host_bytes"]}))


def moments(name: str, tied: bool, present: int) -> tuple[memory.Job, dict[str, Counter[str]]]:
    """The same two, predicted."""
    words, axes = SCENES[name]
    job = memory.Job(
        tiny(tied), Plan(**words).settled(), TOKENS, **{"ulysses": 1, "ring": 1, "shard": 1} | axes, present=present
    )
    inside = dict(job.moments())
    return job, {which: job.always() + inside[f"attention of the {which} block"] for which in ("last", "first")}


@pytest.mark.parametrize(("name", "tied", "present"), CASES)
def test_what_a_rehearsed_rank_holds(nursery: Nursery, tmp_path: Path, name: str, tied: bool, present: int) -> None:
    end = nursery.job(watch, name, tied, present, tmp_path / "seen.json")[0]
    assert end.code == 0, end.err
    found = json.loads((tmp_path / "seen.json").read_text())
    job, predicted = moments(name, tied, present)
    block = memory.BF16 * job.block.all
    counters = 4 * sum(1 for _ in tiny(tied).with_layers(present).shapes())  # AdamW's, of steps
    passing = name == "x rebuilt"
    for which in ("last", "first"):
        held = Counter(found[which])
        for owner in (KEYS, TAPES, BATCH, GRADIENTS):
            assert held[owner] == predicted[which][owner], (which, owner)
        if not job.host_states:  # which on this CPU are seen as well
            assert held[STATES] == predicted[which][STATES] + counters
        # Of the blocks that are predicted, the one before is not there when the first is run; and those of an x that
        # is made in passing are needed at the last alone, and are the ones before
        more = passing if which == "last" else 1 + passing
        assert held[GATHERED] == predicted[which][GATHERED] - more * block, which
    words, axes = SCENES[name]
    assert found["host"] == predict_memory(tiny(tied), Plan(**words), TOKENS, **axes).host - job.host_states


# From here on arithmetic alone
def llama(plan: Plan, tokens: int = M, **axes: int) -> Memory:
    return predict_memory(read_spec(find_config("llama3-8b")[0]), plan, tokens, **{"ulysses": 8} | axes)


PLANS = [
    Plan(recipe="sweep"),
    Plan(recipe="sweep", o="recompute"),
    Plan(recipe="sweep", x="host, rebuild*7", kv="host", lse="host"),
    Plan(recipe="sweep", x="device", o="device", residual="device"),
    Plan(recipe="ulysses"),
    Plan(recipe="ulysses", checkpoint="selective", tile=8192),
    Plan(recipe="ulysses", checkpoint="none"),
    Plan(recipe="alst"),
    Plan(recipe="untied"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.recipe}-{plan.x}-{plan.o}-{plan.checkpoint}")
def test_it_grows_with_the_tokens(plan: Plan) -> None:
    found = [llama(plan, tokens) for tokens in range(64 * K, 2 * M, 96 * K)]
    for fewer, more in pairwise(found):
        assert fewer.total <= more.total
        assert fewer.host <= more.host
    assert found[0].total + found[0].host < found[-1].total + found[-1].host


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.recipe}-{plan.x}-{plan.o}-{plan.checkpoint}")
def test_more_ranks_take_less(plan: Plan) -> None:
    found = [llama(plan, ulysses=ranks) for ranks in (1, 2, 4, 8)]
    for fewer, more in pairwise(found):
        assert more.total < fewer.total
        assert more.host <= fewer.host
    # And data ranks, which cut the states alone
    states = [llama(plan, shard=shard).parts[STATES] for shard in (1, 2, 4)]
    assert states == [states[0], states[0] / 2, states[0] / 4]


def test_ring_ranks_take_less() -> None:
    found = [llama(Plan(recipe="sweep"), 8 * M, ring=ring) for ring in (1, 2, 4)]
    assert found[0].total > found[1].total > found[2].total
    assert found[0].host == 2 * found[1].host == 4 * found[2].host


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.recipe}-{plan.x}-{plan.o}-{plan.checkpoint}")
def test_parts_and_total(plan: Plan) -> None:
    found = llama(plan)
    assert found.total == sum(found.parts.values())
    assert all(type(size) is int and size > 0 for size in found.parts.values())
    spec = read_spec(find_config("llama3-8b")[0])
    moments = memory.Job(spec, plan.settled(), M, 8, 1, 1, spec.layers).moments()
    assert found.moment in dict(moments)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_moments_of_the_optimizer_on_the_host(ranks: int) -> None:
    """8 bytes of 12 for each parameter of a rank are then the host's."""
    device, host = (
        llama(Plan(recipe="sweep", optimizer=place), ulysses=1, shard=ranks) for place in ("device", "host")
    )
    moved = 8 * 8_030_261_248 / ranks
    assert device.parts[STATES] - host.parts[STATES] == pytest.approx(moved, rel=1e-3)  # rows that do not divide
    assert host.host - device.host == device.parts[STATES] - host.parts[STATES]
    assert device.parts[STATES] == 3 * host.parts[STATES]


def test_what_is_kept_where() -> None:
    """By hand: Llama3-8B has 32 layers of 4096 features, 32 and 8 heads of 128."""
    local = M // 8
    hosted = llama(Plan(recipe="sweep"))
    assert hosted.parts[KEYS] == 2 * M * 128 * (2 + 4)  # one key/value head of each rank, for all tokens
    assert hosted.host == local * 4096 * 2 * (32 + 32 + 1)  # x, o, gradient
    everything = llama(Plan(recipe="sweep", x="device", o="device", residual="device"))
    lse = 32 * M * 4 * 4
    assert everything.parts[TAPES] == hosted.host + lse
    assert everything.host == everything.disk == 0
    on_disk = llama(Plan(recipe="sweep", o="disk", disk="/scratch"))
    assert on_disk.disk == local * 4096 * 2 * 32
    assert on_disk.host == pytest.approx(local * 4096 * 2 * 33, rel=0.1)  # and what passes through
    selective = llama(Plan(recipe="ulysses", checkpoint="selective"))
    full = llama(Plan(recipe="ulysses", checkpoint="full"))
    assert selective.total > full.total


def test_an_x_from_the_disk_takes_what_one_from_the_host_does() -> None:
    """The slots it passes through, and, where a block is run whole, all of it beside the block."""
    on_host, on_disk = llama(Plan(recipe="alst")), llama(Plan(recipe="alst", x="disk", disk="/scratch"))
    assert on_disk.parts == on_host.parts
    assert on_disk.disk == on_host.host


def test_absent_layers_are_the_last() -> None:
    """Of four, alternating, the fourth is held for a rehearsal of three."""
    held = {}
    for words in ("host, device", "device, host"):
        plan = Plan(recipe="dense", x=words).settled()
        held[words] = memory.Job(tiny(True), plan, TOKENS, 1, 1, 1, present=3).always()[BLOCKS]
    assert held == {"host, device": TOKENS * 256 * memory.BF16, "device, host": 0}
