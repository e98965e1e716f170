"""What prompts take, as decode_cost.py states it, against what a rehearsed rank is seen to hold, owner by owner.

The rehearsals run in bf16 on this CPU. What its kernels take for themselves is not a GPU's, so the owners that hold
what kernels make (blocks, attention, exchange, loss) are not compared here; tests/train/test_tasks.py compares all of
an evaluation with all of a step.
"""

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ithaca.base.owners import ALLOCATOR, GATHERED, KEYS, STATES, TAPES
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.axes import Axes
from ithaca.parallel.loopback import start_loopback
from ithaca.parallel.mesh import mesh
from ithaca.plans.plan import Plan
from ithaca.rehearsal import evaluation
from ithaca.rehearsal.scene import Scene
from ithaca.schedule.decode_cost import cache_place, cache_tapes, evaluation_memory, new_token_bytes
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import block_parameters, step_memory
from tests.nursery import Nursery

K, M = 2**10, 2**20
TOKENS, LAYERS = 512, 4
SWEEP: dict[str, Any] = {"recipe": "sweep", "chunk": 128}
SCENES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sweep": (SWEEP, {"ulysses": 4}),
    "sweep on a ring": ({**SWEEP, "tile": 25}, {"ulysses": 2, "ring": 2}),
    "sweep alone": ({**SWEEP, "x": "host, rebuild", "zero": 2}, {}),
    "on the host": ({**SWEEP, "kv": "host", "residual": "host", "optimizer": "host"}, {"ulysses": 4}),
    "head rounds": ({**SWEEP, "heads": 4}, {}),
    "ulysses": ({"recipe": "ulysses"}, {"ulysses": 4}),
    "alst": ({"recipe": "alst", "tile": 25}, {"ulysses": 4}),
    "hybrid": ({"recipe": "hybrid"}, {"ulysses": 2, "ring": 2}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
}
ALWAYS = {("sweep", "host", 2), ("sweep on a ring", "device", LAYERS), ("ulysses", "device", 2), ("alst", "host", 2)}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full)
    for case in product(SCENES, ("device", "host"), (2, LAYERS))
]


def watch(name: str, place: str, present: int, file: Path) -> None:
    """Rehearse an evaluation in a process of its own, with the cache in a place; write what it held."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"  # a virtual CPU may announce instructions for bf16 that it does not have
    words, axes = SCENES[name]
    start_loopback(Axes(**axes).size)
    evaluation.cache_place = lambda _: place
    scene = Scene(
        model="tiny",
        plan=Plan(**words),
        tokens=TOKENS,
        layers=present,
        memory_only=True,
        axes=Axes(**axes),
        dtype="bfloat16",
    )
    found = evaluation.run_evaluation_scene(scene, mesh(**axes))
    dist.destroy_process_group()
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(("name", "place", "present"), CASES)
def test_what_a_rank_holds(nursery: Nursery, tmp_path: Path, name: str, place: str, present: int) -> None:
    end = nursery.job(watch, name, place, present, tmp_path / "seen.json")[0]
    assert end.code == 0, end.err
    found = json.loads((tmp_path / "seen.json").read_text())
    words, axes = SCENES[name]
    spec = read_spec(PRESETS["tiny"])
    job = Job(spec=spec, plan=Plan(**words), tokens=TOKENS, axes=Axes(**axes), layers_run=present)
    predicted, held = evaluation_memory(job, place, evaluation.CONTINUATIONS, evaluation.NEW_TOKENS), found["memory"]
    for owner in (KEYS, TAPES):
        assert held.get(owner, 0) == predicted.parts.get(owner, 0), owner
    counters = 4 * sum(1 for _ in spec.with_layers(present).shapes())  # AdamW's, of steps
    if job.plan.optimizer == "device":  # on this CPU moments of the host are seen as well
        assert held[STATES] == predicted.parts[STATES] + counters
    assert held.get(GATHERED, 0) <= predicted.parts.get(GATHERED, 0)
    assert found["host_bytes"] == predicted.host
    predictions = ("peak_bytes_predicted", "memory_predicted", "training_peak_bytes_predicted")
    assert [found[name] for name in predictions] == [None, None, None]  # those of a GPU
    own = LAYERS * job.tiles.length * 2 * spec.kv_heads * spec.head_size * 2
    assert cache_tapes(job, place).bytes_of(job.tiles.length) == own
    assert predicted.host >= own if place == "host" else held[KEYS] >= own


# From here on arithmetic alone
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
]
MODELS = ("llama3-8b", "llama2-7b", "llama3.2-1b", "qwen3-32b")


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.recipe}-{plan.x}-{plan.o}-{plan.checkpoint}")
@pytest.mark.parametrize("model", MODELS)
def test_an_evaluation_takes_no_more_than_a_step(model: str, plan: Plan) -> None:
    """On the device, by the place that is chosen; in host memory no more than 2 · Hkv · D / hidden of what x takes."""
    spec = read_spec(find_config(model)[0])
    for tokens in (16 * K, 128 * K, M, 4 * M):
        job = Job(spec=spec, plan=plan, tokens=tokens, axes=Axes(ulysses=8))
        place = cache_place(job)
        found, training = evaluation_memory(job, place, 9, 16), step_memory(job)
        assert found.total <= training.total, (tokens, place)
        without = evaluation_memory(job, place, 9, 16, moments=False)  # of a model alone
        assert without.total <= found.total
        assert found.parts[STATES] == (3 if plan.optimizer == "device" else 1) * without.parts[STATES]


def test_by_hand() -> None:
    """Llama3-8B has 32 layers, 8 key/value heads of 128; 1M tokens on 8 ranks."""
    spec = read_spec(find_config("llama3-8b")[0])
    job = Job(spec=spec, plan=Plan(recipe="sweep"), tokens=M, axes=Axes(ulysses=8))
    assert cache_tapes(job, "device").bytes_of(job.tiles.length) == 32 * 128 * K * 2 * 8 * 128 * 2 == 16 * 2**30
    assert new_token_bytes(job, 9, 16) == 32 * 9 * 16 * 2 * 8 * 128 * 2
    device, host = (evaluation_memory(job, place) for place in ("device", "host"))
    tile = 8 * K * 2 * 8 * 128 * 2  # of a chunk of 64K
    assert device.parts[KEYS] - host.parts[KEYS] == 16 * 2**30 - 3 * tile
    assert host.host - device.host == 16 * 2**30
    assert device.parts[GATHERED] == 3 * 2 * block_parameters(job).all
    assert device.parts[ALLOCATOR] == 2 * (128256 + 1) * 4096  # the head and its norm; a step leaves 2.4 times as much
    assert step_memory(job).parts[ALLOCATOR] == round(2.4 * device.parts[ALLOCATOR])
