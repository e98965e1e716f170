"""Predicted memory against what a rehearsed rank is seen to hold, owner by owner, and how it follows from the Plan.

The rehearsals run in bf16 on this CPU. What its kernels take for themselves is not a GPU's, so the owners that hold
what kernels make (blocks, attention, exchange, loss) are not compared here.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ithaca.attention.kernels.seam import Kernel
from ithaca.base.owners import BATCH, BLOCKS, GATHERED, GRADIENTS, KEYS, STATES, TAPES
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.model.spec import Spec
from ithaca.parallel.axes import Axes
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import mesh
from ithaca.plans.plan import CHUNK, Plan
from ithaca.rehearsal import rehearse
from ithaca.rehearsal.fake_kernels import FakeKernel
from ithaca.rehearsal.memory_meter import Meter
from ithaca.schedule.embedding import LookedUp
from ithaca.schedule.job import BF16, Job
from ithaca.schedule.step_memory import Memory, block_parameters, host_states, phases, resident, step_memory
from ithaca.tape.spec import KV_STAGED, STAGED
from tests.nursery import Nursery

K, M = 2**10, 2**20
TOKENS = 512
LAYERS = 4  # of the model; some scenes run two of them

Words = dict[str, Any]
SWEEP: Words = {"recipe": "sweep", "chunk": 128}
SCENES: dict[str, tuple[Words, dict[str, int]]] = {
    "sweep": (SWEEP, {"ulysses": 4}),
    "sweep on a ring": ({**SWEEP, "tile": 25}, {"ulysses": 2, "ring": 2}),
    "fpdt": ({"recipe": "fpdt", "chunks": 4}, {"ulysses": 4}),
    "fpdt on a ring": ({"recipe": "fpdt", "chunks": 5}, {"ulysses": 2, "ring": 2}),
    "o recomputed": ({**SWEEP, "o": "recompute"}, {"ulysses": 4}),
    "x rebuilt": ({**SWEEP, "x": "host, rebuild"}, {"ulysses": 4}),
    "many chunks": ({**SWEEP, "chunk": 64}, {"ulysses": 4}),
    "x looked up": ({**SWEEP, "x": "rebuild, host"}, {"ulysses": 4}),
    "no x saved": ({**SWEEP, "x": "rebuild"}, {"ulysses": 4}),
    "on the device": ({**SWEEP, "x": "device", "o": "device", "residual": "device"}, {"ulysses": 4}),
    "on the host": ({**SWEEP, "kv": "host", "lse": "host"}, {"ulysses": 4}),
    "chunks that do not divide": ({**SWEEP, "chunk": 100}, {"ulysses": 2, "shard": 2}),
    "moments on the host": ({**SWEEP, "optimizer": "host"}, {"ulysses": 4}),
    "head rounds": ({**SWEEP, "heads": 4}, {}),
    "head rounds on a ring": ({**SWEEP, "heads": 4, "x": "host, rebuild", "residual": "device"}, {"ring": 2}),
    "untied": ({"recipe": "untied", "tile": 25}, {"ulysses": 4}),
    "untied on a ring": ({"recipe": "untied", "tile": 25}, {"ulysses": 2, "ring": 2}),
    "hybrid": ({"recipe": "hybrid"}, {"ulysses": 2, "ring": 2}),
    "ulysses selective": ({"recipe": "ulysses", "checkpoint": "selective"}, {"ulysses": 4}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
    "tensor": ({"recipe": "tensor", "x": "host", "tile": 25}, {"tensor": 2, "shard": 2}),
    "tensor selective": ({"recipe": "tensor", "checkpoint": "selective"}, {"tensor": 2, "ring": 2}),
    "tensor alone": ({"recipe": "tensor", "zero": 1}, {"tensor": 4}),
    "sweep alone": ({**SWEEP, "x": "host, rebuild", "zero": 2}, {}),
    "selective alone": ({"recipe": "dense", "checkpoint": "selective", "zero": 1}, {}),
}
# Run by default; the others where all tests are
ALWAYS = {
    ("sweep on a ring", True, 2),
    ("x rebuilt", True, LAYERS),
    ("many chunks", False, LAYERS),
    ("many chunks", True, 2),
    ("x looked up", False, LAYERS),
    ("x looked up", True, LAYERS),
    ("no x saved", False, LAYERS),
    ("on the host", False, 2),
    ("head rounds", True, 2),
    ("moments on the host", True, 2),
    ("fpdt", True, LAYERS),
    ("untied", False, 2),
    ("untied on a ring", True, 2),
    ("dense", True, 2),
    ("tensor", True, LAYERS),
    ("tensor selective", False, 2),
    ("tensor alone", False, LAYERS),
    ("sweep alone", True, LAYERS),
    ("selective alone", False, 2),
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
    seen: list[Counter[str]] = []
    looking: list[Counter[str]] = []  # while x of layer 0 is looked up: forward, and again backward
    read = LookedUp.read

    class Watching(FakeKernel):
        def __init__(self, kernel: Kernel, meter: Meter):
            super().__init__(kernel)
            self._meter = meter

            def read_rows(*args: Any) -> Tensor:
                found = read(*args)
                looking.append(Counter(meter.now))
                return found

            LookedUp.read = read_rows  # pyrefly: ignore

        def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            seen.append(Counter(self._meter.now))
            return super().backward(*args)

    PRESETS["tiny"] = {**PRESETS["tiny"], "tie_word_embeddings": tied}
    words, axes = SCENES[name]
    start_loopback(Axes(**axes).size)
    scene = rehearse.Scene(
        model="tiny",
        plan=Plan(**words),
        tokens=TOKENS,
        layers=present,
        memory_only=True,
        axes=Axes(**axes),
        dtype="bfloat16",
    )
    found = rehearse.run_scene(scene, mesh(**axes), watch=Watching)
    dist.destroy_process_group()
    states = {"last": seen[0], "first": seen[-1], "look-up": looking[-1:]}
    file.write_text(json.dumps({**states, "host": found["host_bytes"]}))


def predict(name: str, tied: bool, present: int) -> tuple[Job, dict[str, Counter[str]]]:
    """The same two, predicted."""
    words, axes = SCENES[name]
    job = Job(spec=tiny(tied), plan=Plan(**words), tokens=TOKENS, axes=Axes(**axes), layers_run=present)
    inside = dict(phases(job))
    return job, {which: resident(job) + inside[f"attention of the {which} block"] for which in ("last", "first")}


@pytest.mark.parametrize(("name", "tied", "present"), CASES)
def test_what_a_rehearsed_rank_holds(nursery: Nursery, tmp_path: Path, name: str, tied: bool, present: int) -> None:
    end = nursery.job(watch, name, tied, present, tmp_path / "seen.json")[0]
    assert end.code == 0, end.err
    found = json.loads((tmp_path / "seen.json").read_text())
    job, predicted = predict(name, tied, present)
    block = BF16 * block_parameters(job).all
    counters = 4 * sum(1 for _ in tiny(tied).with_layers(present).shapes())  # AdamW's, of steps
    passing = job.costs.passing_bytes(job)
    for which in ("last", "first"):
        held = Counter(found[which])
        for owner in (KEYS, TAPES, BATCH, GRADIENTS):
            assert held[owner] == predicted[which][owner], (which, owner)
        if not host_states(job):  # which on this CPU are seen as well
            assert held[STATES] == predicted[which][STATES] + counters
        # Of the blocks that are predicted, the one before is not there when the first is run; and those of an x that
        # is made in passing are needed at the last alone, and are the ones before
        more = (block if passing else 0) if which == "last" else block + passing
        assert held[GATHERED] == predicted[which][GATHERED] - (more if job.axes.parameter > 1 else 0), which
    assert found["host"] == step_memory(job).host - host_states(job)
    if "the look-up of x" in job.costs.peaks(job):
        inside = resident(job) + dict(phases(job))["the look-up of x of the first block"]
        assert Counter(*found["look-up"])[GATHERED] == inside[GATHERED] - block  # of the one before, as above


# From here on arithmetic alone
def llama(plan: Plan, tokens: int = M, **axes: int) -> Memory:
    return step_memory(llama_job(plan, tokens, **axes))


def llama_job(plan: Plan, tokens: int = M, **axes: int) -> Job:
    spec = read_spec(find_config("llama3-8b")[0])
    by_heads = plan.entry.axes(8, 1)
    return Job(spec=spec, plan=plan, tokens=tokens, axes=replace(by_heads, **axes))


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
    Plan(recipe="fpdt"),
    Plan(recipe="tensor"),
    Plan(recipe="tensor", checkpoint="selective", tile=8192),
    Plan(recipe="tensor", checkpoint="none"),
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
    axis = "tensor" if plan.entry.tensor else "ulysses"
    found = [llama(plan, **{axis: ranks}) for ranks in (1, 2, 4, 8)]
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
    assert found.phase in dict(phases(llama_job(plan)))


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
    all_on_disk = llama(
        Plan(recipe="sweep", disk="/scratch", **dict.fromkeys(("x", "o", "lse", "residual", "kv"), "disk"))
    )
    assert all_on_disk.disk == hosted.host + lse + hosted.parts[KEYS]
    tile, keys = CHUNK // 8 * 4096 * 2, CHUNK * 128 * 4  # of x, and of the sums of a gradient of K
    assert all_on_disk.host == STAGED * tile + KV_STAGED * keys
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
        job = Job(spec=tiny(True), plan=Plan(recipe="dense", x=words), tokens=TOKENS, layers_run=3)
        held[words] = resident(job)[BLOCKS]
    assert held == {"host, device": TOKENS * 256 * BF16, "device, host": 0}
