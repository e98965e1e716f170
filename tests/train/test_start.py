"""A run that names no Plan: on a CPU the simplest one, on GPUs the planner's for the ranks and the memory there are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ithaca.base.errors import PlanError
from ithaca.base.sizes import format_bytes
from ithaca.config import Config, MeshSection, read_config
from ithaca.data.reader import in_memory
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.model.source import load_model
from ithaca.parallel.axes import Axes
from ithaca.planner.documents import file_documents
from ithaca.planner.hardware import RUNTIME, Cluster, read_gpus
from ithaca.planner.search import search
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import Memory, step_memory
from ithaca.train.folder.run_folder import RunFolder
from ithaca.train.loop import TrainingRun
from ithaca.train.run import train
from ithaca.train.setup import start
from ithaca.train.setup.start import Chosen, choose_plan, free_memory
from tests.nursery import Nursery

K, M = 2**10, 2**20


# On a CPU
def losses(nursery: Nursery, config: Config, path: Path, ranks: int) -> list[float]:
    for end in nursery.job(train, config, path, ranks=ranks):
        assert end.code == 0, end.err
    return [line["loss"] for line in RunFolder(path).read_metrics()]


@pytest.mark.parametrize(
    ("mesh", "recipe", "ranks"), [(MeshSection(), "dense", 1), (MeshSection(ulysses=2), "sweep", 2)]
)
def test_on_a_cpu(
    nursery: Nursery, small_config: Config, tmp_path: Path, mesh: MeshSection, recipe: str, ranks: int
) -> None:
    """The same losses as with the recipe that a user would name; the run names none, and goes on so."""
    config = replace(small_config, mesh=mesh, train=replace(small_config.train, steps=4))
    assert config.plan is None
    named = losses(nursery, replace(config, plan=Plan(recipe=recipe)), tmp_path / "named", ranks)
    found = losses(nursery, config, tmp_path / "run", ranks)
    assert found == named
    saved = RunFolder(tmp_path / "run").saved_config()
    assert saved.plan is None
    assert saved.mesh == mesh
    assert "[plan]" not in (tmp_path / "run" / "config.toml").read_text()
    longer = replace(saved, train=replace(saved.train, steps=6))
    again = losses(nursery, longer, tmp_path / "run", ranks)
    assert (len(again), again[:4]) == (6, found)


def print_options(config: Config, path: Path) -> None:
    """Start a run, and print what its optimizer was given instead of the first step."""

    def steps(run: TrainingRun, _: object) -> bool:
        for group in run.optimizer.param_groups:
            print("optimizer", group["lr"], *group["betas"], group["weight_decay"], flush=True)
        raise SystemExit(0)

    TrainingRun._steps = steps
    train(config, path)


def test_the_optimizer_gets_its_options(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    options = replace(small_config.train, learning_rate=0.02, beta1=0.8, beta2=0.9, weight_decay=0.3)
    (end,) = nursery.job(print_options, replace(small_config, train=options), tmp_path / "run")
    assert (end.code, end.err) == (0, "")
    assert "optimizer 0.02 0.8 0.9 0.3\noptimizer 0.02 0.8 0.9 0.0\n" in end.out


def planned_train(config: Config, path: Path, plan: Plan, mesh: MeshSection) -> None:
    """Train as if the planner had chosen these."""
    start.choose_plan = lambda *_: (plan, mesh, ["so it is"])
    train(config, path)


def test_a_mesh_that_was_chosen(nursery: Nursery, small_config: Config, tmp_path: Path) -> None:
    """Ranks go over to it, and one sequence for those that share it is the batch."""
    mesh, plan = MeshSection(ulysses=2), Plan(recipe="sweep", chunk=16)
    config = replace(small_config, train=replace(small_config.train, steps=2, batch=None))
    named = losses(nursery, replace(config, plan=plan, mesh=mesh), tmp_path / "named", 2)
    ends = nursery.job(planned_train, config, tmp_path / "run", plan, mesh, ranks=2)
    assert [end.code for end in ends] == [0, 0], ends
    assert "so it is" in ends[0].out
    folder = RunFolder(tmp_path / "run")
    assert [line["loss"] for line in folder.read_metrics()] == named
    assert (folder.saved_config().mesh, folder.saved_config().train.batch) == (MeshSection(), 1)


# On GPUs that are not there
@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the driver and the kernel say; a test may change it."""
    said = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 * 10**9, "taken": 6 * 10**8, "host": int(1.9e12)}
    said["capability"] = (9, 0)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda _: SimpleNamespace(name=said["name"], total_memory=said["memory"]),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: said["capability"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (said["memory"] - said["taken"], said["memory"]))
    monkeypatch.setattr(start, "host_budget", lambda: (said["host"], "free memory"))
    monkeypatch.setattr(start, "least", lambda _, *amounts: amounts)
    return said


def chosen(
    *overrides: str,
    ranks: int = 8,
    node: int | None = None,
    model: str = "llama3-8b",
    tokens: int = 5 * M,
    sharing: int = 1,
) -> Chosen:
    config = read_config(None, [f"model.source={model}", *overrides])
    grid: Any = SimpleNamespace(device=torch.device("cuda"), size=ranks, node_ranks=node, group=None, gpu_ranks=sharing)
    return choose_plan(config, load_model(model, config.model.dtype), grid, tokens, free_memory(grid))


def cluster(count: int, host: float = 1.9e12, node: int = 8) -> Cluster:
    return Cluster(count, read_gpus()["H100-80GB"], host, node_gpus=node)


def memory_of(plan: Plan, tokens: int, axes: Axes, passes: int = 1) -> Memory:
    spec = read_spec(find_config("llama3-8b")[0])
    return step_memory(Job(spec=spec, plan=plan, tokens=tokens, axes=axes, passes=passes))


def test_ranks_that_share_a_gpu_share_its_memory(machine: dict[str, Any]) -> None:
    alone, shared = (
        free_memory(SimpleNamespace(device=torch.device("cuda"), group=None, gpu_ranks=count))  # pyrefly: ignore
        for count in (1, 4)
    )
    free = machine["memory"] - machine["taken"]
    assert alone.gpu == min(machine["memory"], free + RUNTIME)
    assert shared.gpu == min(machine["memory"] // 4, free // 4 + RUNTIME)
    with pytest.raises(PlanError):
        chosen(sharing=8)


def test_it_is_the_planner_s_answer(machine: dict[str, Any]) -> None:  # noqa: ARG001
    plan, mesh, said = chosen()
    spec = read_spec(find_config("llama3-8b")[0])
    wanted = search(spec, cluster(8), 5 * M)
    assert wanted is not None
    assert plan == wanted.plan
    assert mesh == MeshSection(ulysses=8)
    assert said[0] == "llama3-8b at 5M tokens on 8xH100-80GB: fits with recipe 'sweep'; 8 GPUs share each sequence"
    assert said[-1].startswith("To name this Plan yourself: --set plan.recipe=sweep --set plan.chunk=65536 ")
    assert said[-1].endswith(" --set mesh.ulysses=8 --set mesh.ring=1")
    assert not any("--host" in line or "--verbose" in line for line in said)  # which are options of ithaca plan


def test_the_memory_is_what_there_is(machine: dict[str, Any]) -> None:
    """Of the GPU that is here, not of the one in the table; and of the host."""
    roomy = chosen(tokens=2 * M)[0]
    machine["memory"] = 50 * 10**9
    smaller = chosen(tokens=2 * M)[0]
    assert smaller != roomy
    assert memory_of(smaller, 2 * M, Axes(ulysses=8)).total < 50e9 < memory_of(roomy, 2 * M, Axes(ulysses=8)).total
    machine |= {"memory": 80 * 10**9, "taken": 31_500_000_000}
    assert chosen(tokens=2 * M)[0] == smaller  # what another program holds, beyond what this one's driver takes
    machine["host"] = 2 * 10**11
    with pytest.raises(
        PlanError,
        match=r"2M tokens of llama3-8b on 8xH100-80GB do not fit: train.tokens=\w+ is the longest if attention runs "
        r"once, \w+ if it is recomputed; limited by",
    ):
        chosen(tokens=2 * M)


def test_several_nodes(machine: dict[str, Any]) -> None:  # noqa: ARG001
    plan, mesh, said = chosen(ranks=16, node=8)
    wanted = search(read_spec(find_config("llama3-8b")[0]), cluster(16), 5 * M)
    assert wanted is not None
    assert (plan, mesh.ulysses, mesh.ring) == (wanted.plan, wanted.axes.ulysses, wanted.axes.ring)
    assert "16 GPUs share each sequence (8 Ulysses × 2 ring ranks)" in said[0]


@pytest.mark.parametrize(
    ("given", "mesh", "recipes"),
    [
        (["mesh.ulysses=2", "mesh.ring=2"], MeshSection(ulysses=2, ring=2), {"sweep", "hybrid"}),
        (["mesh.ring=4"], MeshSection(ring=4), {"sweep", "hybrid", "ring"}),
        (["mesh.shard=8"], MeshSection(shard=8), {"sweep", "dense"}),
    ],
)
def test_a_mesh_that_is_given(machine: dict[str, Any], given: list[str], mesh: MeshSection, recipes: set[str]) -> None:  # noqa: ARG001
    plan, found, _ = chosen(*given, tokens=64 * K)
    assert found == mesh
    assert plan.recipe in recipes
    sharing = mesh.ulysses * mesh.ring
    memory = memory_of(plan, 64 * K, Axes(shard=8 // sharing, ring=mesh.ring, ulysses=mesh.ulysses))
    assert memory.total <= cluster(8).capacity


def test_copies_of_the_parameters(machine: dict[str, Any]) -> None:
    """Each is cut over half of the GPUs, and has half of the node."""
    _, mesh, said = chosen("mesh.replicate=2", tokens=64 * K)
    assert mesh == MeshSection(replicate=2)
    assert "on 4xH100-80GB" in said[0]
    states = next(line for line in said if line.startswith("  states"))
    assert states.endswith("bytes / 4")
    assert any(line.startswith("Host memory: ") and line.endswith("of 841 GiB") for line in said)
    machine["memory"] = 24 * 10**9
    chosen(tokens=64 * K)
    with pytest.raises(PlanError, match=r"on 4xH100-80GB do not fit with .* without options of mesh does"):
        chosen("mesh.replicate=2", tokens=64 * K)


def test_a_copy_on_one_gpu_is_not_alone(machine: dict[str, Any]) -> None:  # noqa: ARG001
    """It averages its gradients with the others, which takes FSDP2."""
    asked = {"model": "llama3.2-1b", "tokens": 8 * K}
    assert chosen(ranks=1, **asked)[0].zero == 2
    assert chosen("mesh.replicate=2", ranks=2, **asked)[0].zero == 3


@pytest.mark.parametrize(
    ("given", "axes", "sequences", "rows"),
    [
        (["train.batch=8", "mesh.shard=8"], Axes(shard=8), 8, 1),
        (["train.batch=32", "mesh.shard=8"], Axes(shard=8), 32, 4),
        (["train.batch=32", "train.micro_batch=16", "mesh.shard=8"], Axes(shard=8), 16, 2),
        (["train.micro_batch=9", "mesh.shard=8"], Axes(shard=8), 9, 2),  # of the rank with most
        (["train.batch=4", "mesh.ulysses=4"], Axes(shard=2, ulysses=4), 4, 2),
        (["train.batch=32", "mesh.replicate=2"], Axes(shard=4), 16, 4),  # of each copy
    ],
)
def test_sequences_of_a_pass_count(
    machine: dict[str, Any],  # noqa: ARG001
    given: list[str],
    axes: Axes,
    sequences: int,
    rows: int,
) -> None:
    """Those of a rank lie side by side: memory is that of one sequence as long as all."""
    plan, _, said = chosen(*given, tokens=64 * K)
    assert any(line.startswith("A step: ") and f" for {sequences} sequences; " in line for line in said)
    assert " at 64K tokens on " in said[0]
    memory = memory_of(plan, rows * 64 * K, axes, passes=2 if given[1] == "train.micro_batch=16" else 1)
    assert f" {format_bytes(memory.total)} of {format_bytes(cluster(8).capacity)} at the peak" in said[2]


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (["train.batch=1"], 1),
        (["train.batch=3"], 3),
        (["train.batch=8", "train.micro_batch=2"], 2),
        (["train.batch=12"], 4),  # of eight data ranks some would have two, and the others wait
        ([], 8),
    ],
)
def test_no_rank_is_without_a_sequence(machine: dict[str, Any], given: list[str], most: int) -> None:  # noqa: ARG001
    """Which a step would refuse: where there are fewer sequences than GPUs, these share them."""
    _, mesh, said = chosen(*given, tokens=64 * K)
    data_ranks = 8 // (mesh.ulysses * mesh.ring)
    assert data_ranks <= most
    sequences = {"train.micro_batch=2": 2, "train.batch=12": 12}.get(given[-1], most) if given else data_ranks
    assert any(line.startswith("A step: ") and f" for {sequences} sequence" in line for line in said)


@pytest.mark.parametrize(
    ("words", "options", "sentence"),
    [
        (
            [],
            {"model": "llama3-70b", "ranks": 2},
            "llama3-70b on 2xH100-80GB does not fit: weights and gradients",
        ),
        (
            [],
            {"tokens": 40 * M},
            r"40M tokens of llama3-8b on 8xH100-80GB do not fit: train.tokens=\w+ is the longest if attention runs "
            r"once, \w+ if it is recomputed; limited by",
        ),
        (
            ["mesh.ulysses=2"],
            {"tokens": 40 * M},
            r"train.tokens=\w+ is the longest if attention runs once, \w+ if it is recomputed; "
            r"limited by .*, with train.micro_batch=1 and without options of mesh",
        ),
        (
            ["mesh.ulysses=2"],
            {"tokens": 6 * M},
            "6M tokens of llama3-8b on 8xH100-80GB do not fit with mesh.ulysses=2 and mesh.ring=1: train.micro_batch=1",
        ),
        (
            ["train.batch=64"],
            {"tokens": 5 * M},
            "5M tokens of llama3-8b on 8xH100-80GB do not fit with 64 sequences in a pass: train.micro_batch=1 without",
        ),
    ],
)
def test_what_does_not_fit(machine: dict[str, Any], words: list[str], options: dict[str, Any], sentence: str) -> None:  # noqa: ARG001
    with pytest.raises(PlanError, match=sentence) as refused:
        chosen(*words, **options)
    assert "\n" not in str(refused.value)


def test_a_gpu_that_nobody_has_described(machine: dict[str, Any]) -> None:
    """Its memory is known; its speed is taken to be another's, and that is said."""
    machine |= {"name": "NVIDIA A30", "memory": 32 * 10**9, "capability": (8, 0)}
    plan, mesh, said = chosen(tokens=64 * K)
    axes = Axes(shard=8 // mesh.ulysses // mesh.ring, ring=mesh.ring, ulysses=mesh.ulysses)
    memory = memory_of(plan, 64 * K, axes)
    assert memory.total < 32 * 10**9
    assert "on 8xNVIDIA A30: fits" in said[0]
    assert any("assumed to be that of the A100-80GB, because NVIDIA A30 is not a known GPU" in line for line in said)
    assert chosen("plan.recipe=sweep") == (Plan(recipe="sweep"), MeshSection(), [])


@pytest.mark.parametrize(
    ("said", "sets"),
    [({}, ["model.dtype=float32"]), ({"name": "Tesla V100", "capability": (7, 0)}, [])],
    ids=["float32", "old GPU"],
)
def test_the_kernels_that_run_here(machine: dict[str, Any], said: dict[str, Any], sets: list[str]) -> None:
    """The planner asks them: it would take CUDA graphs for a small model, but the only kernel cannot be replayed."""
    small = {"ranks": 1, "model": "smollm2-135m", "tokens": 4 * K}
    assert chosen(**small)[0].cuda_graph
    machine |= said
    plan = chosen(*sets, **small)[0]
    assert (plan.cuda_graph, plan.kernel) == (None, "auto")


def test_fewer_tokens_than_a_plan_is_for(machine: dict[str, Any]) -> None:  # noqa: ARG001
    assert chosen(tokens=64) == (Plan(recipe="dense"), MeshSection(), [])
    assert chosen("mesh.ulysses=2", tokens=64) == (Plan(recipe="sweep"), MeshSection(ulysses=2), [])


def test_the_planner_learns_the_documents(machine: dict[str, Any], tmp_path: Path) -> None:  # noqa: ARG001
    """Those of the token file, or of Python's standard library; they are asked for only if it plans."""
    data = in_memory(np.arange(64 * K) % 7, np.arange(0, 64 * K + 1, 4 * K))
    config, source = read_config(None, ["model.source=llama3-8b"]), load_model("llama3-8b")
    grid: Any = SimpleNamespace(device=torch.device("cuda"), size=8, node_ranks=None, group=None, gpu_ranks=1)
    _, _, said = choose_plan(config, source, grid, 64 * K, free_memory(grid), lambda: file_documents(data))
    assert said[1] == f"Documents: {file_documents(data).describe(64 * K)}"
    assert not any(line.startswith("Documents") for line in chosen(tokens=64 * K)[2])
    named = read_config(None, ["model.source=llama3-8b", "plan.recipe=sweep"])
    assert choose_plan(named, source, grid, 64 * K, free_memory(grid), lambda: pytest.fail("asked")) == (
        Plan(recipe="sweep"),
        MeshSection(),
        [],
    )
    library = start._documents(config, RunFolder(tmp_path))
    assert library.packed
    assert len(library.lengths(64 * K)) > 1
