"""GPU operations that a schedule's cost counts, against the operations of real steps on a CPU.

A CPU runs other kernels than a GPU: what is fused there is several operations here, and FSDP2 copies less. So growth is
compared, with layers, tiles, chunks and loss tiles, and within a factor of 2.5.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ithaca.assemble import apply
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.source import ModelSource, RandomWeights
from ithaca.parallel.axes import Axes
from ithaca.planner.hardware import Machine, read_gpus
from ithaca.planner.seconds import CAST, LEAST, SHARDED, SHARDING, Seconds, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.rehearsal.rehearse import loopback_mesh
from ithaca.schedule.costs import PER_SHARDED_LAYER
from ithaca.schedule.job import Job
from tests.nursery import Nursery

K = 2**10
BAND = 2.5
TOKENS = 512
DEVICE = {"x": "device", "o": "device", "residual": "device", "loss_tile": TOKENS}
SWEEP = {"recipe": "sweep", "chunk": TOKENS, "tile": TOKENS, **DEVICE}
DENSE = {"recipe": "dense", "checkpoint": "selective", "tile": TOKENS, "loss_tile": TOKENS}
KEPT = {"recipe": "dense", "checkpoint": "none", "loss_tile": TOKENS}
# More of one thing: (layers, options) before and after
GROWTH: dict[str, tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "layers of a sweep": ((1, SWEEP), (3, SWEEP)),
    "layers with everything kept": ((1, KEPT), (3, KEPT)),
    "layers with selective checkpoints": ((1, DENSE), (3, DENSE)),
    "tiles of a sweep": ((2, SWEEP), (2, SWEEP | {"tile": TOKENS // 4})),
    "tiles under dense": ((2, DENSE), (2, DENSE | {"tile": TOKENS // 4})),
    "tiles of the loss": ((1, KEPT), (1, KEPT | {"loss_tile": TOKENS // 8})),
    "chunks": ((2, SWEEP | {"tile": TOKENS // 4}), (2, SWEEP | {"chunk": TOKENS // 4, "tile": TOKENS // 4})),
    "visits": (
        (2, SWEEP | {"chunk": TOKENS // 4, "tile": TOKENS // 4}),
        (2, SWEEP | {"chunk": TOKENS // 8, "tile": TOKENS // 8}),
    ),
}
# These compute nothing
VIEWS = ("view", "slice", "detach", "t.default", "transpose", "as_strided", "split", "select", "unsqueeze", "expand")
VIEWS += ("empty", "permute", "alias", "unbind", "squeeze", "narrow", "_local_scalar", "record", "resize")


class Operations(TorchDispatchMode):
    """Counts the operations of torch that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not any(word in str(function) for word in VIEWS)
        return function(*args, **(kwargs or {}))


def count_all(file: Path) -> None:
    """In a process of its own: the operations of forward and backward of every step in GROWTH."""
    grid, found = loopback_mesh(Axes(), "cpu"), {}
    for name, pair in GROWTH.items():
        found[name] = []
        for layers, options in pair:
            spec = read_spec(find_config("tiny")[0]).with_layers(layers)
            model = apply(ModelSource(spec, {}, RandomWeights(spec, 0), "auto", None), Plan(**options), grid)
            model.allocate(1, TOKENS, lambda _: None)
            tokens = torch.arange(TOKENS)[None] % spec.vocab
            batch, counted = model.shard(tokens, tokens, None), Operations()
            with counted:
                model(batch).backward()
            found[name].append(counted.count)
    file.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def counted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    file = tmp_path_factory.mktemp("counts") / "counts.json"
    (end,) = nursery.job(count_all, file)
    assert end.code == 0, end.err
    return json.loads(file.read_text())


def launches(layers: int, options: dict[str, Any]) -> float:
    spec = read_spec(find_config("tiny")[0]).with_layers(layers)
    job = Job(spec=spec, plan=Plan(**options), tokens=TOKENS)
    return job.costs.work(job).launches


@pytest.mark.parametrize("name", GROWTH)
def test_growth(counted: dict[str, list[int]], name: str) -> None:
    before, after = GROWTH[name]
    seen, said = counted[name][1] - counted[name][0], launches(*after) - launches(*before)
    assert seen > 0
    assert seen / BAND < said < seen * BAND


# Measured on an H200 with kernel flash4: SmolLM2-135M, 64K tokens in 17 documents (bench/results/operations-…)
MEASURED = Path("bench/results/operations-smollm2-135m-64K.json")


def test_profiles() -> None:
    """Within 8 %: copies of tapes to the host and back are not counted, and products are split differently by size."""
    rows = json.loads((Path(__file__).parents[2] / MEASURED).read_text())["results"]
    assert len(rows) == 2
    for row in rows:
        options = {name: row["plan"][name] for name in ("recipe", "checkpoint", "tile") if name in row["plan"]}
        spec = read_spec(find_config(row["model"])[0])
        job = Job(spec=spec, plan=Plan(**options).settled_for(spec), tokens=row["tokens"])
        assert job.costs.work(job).launches == pytest.approx(row["operations"], rel=0.08)


def test_a_small_model_waits_for_its_launches() -> None:
    """The same work in smaller tiles takes as long as the host needs to launch it; a large model does not notice."""
    gpu, machine = read_gpus()["H200-141GB"], Machine(nodes=1, gpus=1)

    def step(model: str, tile: int) -> tuple[float, float]:
        options = {"chunk": 64 * K, "tile": tile, "x": "device", "o": "device", "residual": "device"}
        plan = Plan(recipe="sweep", kernel="flash4", zero=2, **options)
        job = Job(spec=read_spec(find_config(model)[0]), plan=plan, tokens=64 * K, documents=(4 * K,) * 16)
        found = predict_seconds(job, gpu, machine)
        work = job.costs.work(job)
        assert work.python > 0
        assert found.launching == pytest.approx((work.launches + work.python) / gpu.launches)
        return found.step - found.optimizer, found.launching

    coarse, fine = step("smollm2-135m", 64 * K), step("smollm2-135m", 8 * K)
    assert coarse[0] > coarse[1]
    assert fine[0] == fine[1] > 1.5 * coarse[0]
    assert step("llama3-8b", 8 * K)[0] < 1.02 * step("llama3-8b", 64 * K)[0]


def test_one_rank_without_fsdp() -> None:
    """Under ZeRO-2 it saves the host FSDP2's hooks, and the GPU all copies but one cast; replicas save nothing."""
    gpu, machine = read_gpus()["H200-141GB"], Machine(nodes=1, gpus=1)
    spec = read_spec(find_config("llama3-8b")[0])

    def both(axes: Axes) -> list[tuple[Seconds, float]]:
        jobs = [
            Job(spec=spec, plan=Plan(recipe="sweep", chunk=64 * K, zero=zero), tokens=64 * K, axes=axes)
            for zero in (3, 2)
        ]
        return [(predict_seconds(job, gpu, machine), job.costs.work(job).launches) for job in jobs]

    (with_fsdp, more), (without, fewer) = both(Axes())
    assert more - fewer == PER_SHARDED_LAYER * spec.layers
    assert with_fsdp.launching - without.launching == pytest.approx(
        (more - fewer + SHARDED * spec.layers) / gpu.launches
    )
    assert without.computing > with_fsdp.launching  # so the step is the GPU's
    copies = (SHARDING - CAST) * spec.parameters() / gpu.bandwidth
    assert with_fsdp.step - without.step == pytest.approx(copies + LEAST * (more - fewer))
    (with_fsdp, _), (replica, _) = both(Axes(replicate=2))
    assert replica.step == with_fsdp.step
