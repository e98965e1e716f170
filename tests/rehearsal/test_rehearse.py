"""A rehearsed rank takes the memory that a real one does, and says who holds it."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ithaca
from ithaca.base.owners import ALLOCATOR, GRADIENTS, HOST, KERNELS
from ithaca.model.families import read_spec
from ithaca.model.presets import PRESETS
from ithaca.parallel.axes import Axes
from ithaca.plans.plan import Plan
from ithaca.rehearsal import kernel_bound, rehearse
from ithaca.rehearsal.rehearse import run_scene
from ithaca.rehearsal.scene import Scene
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory
from tests.nursery import Ended, Nursery

SCENES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "sweep": ({"recipe": "sweep", "chunk": 512, "tile": 100}, {"ulysses": 2, "ring": 2}),
    "sweep-device": ({"recipe": "sweep", "chunk": 512, "x": "device", "o": "device"}, {"ulysses": 4}),
    "untied": ({"recipe": "untied", "tile": 100}, {"ulysses": 4}),
    "untied-ring": ({"recipe": "untied", "tile": 100}, {"ulysses": 2, "ring": 2}),
    "fpdt": ({"recipe": "fpdt", "chunks": 6, "tile": 100}, {"ulysses": 2, "ring": 2}),
    "hybrid": ({"recipe": "hybrid"}, {"ulysses": 2, "ring": 2}),
    "dense": ({"recipe": "dense"}, {"shard": 4}),
}


def real(name: str) -> dict[str, int]:
    """What a rank of four, which are all there, holds when it holds most."""
    plan, axes = SCENES[name]
    scene = Scene(model="tiny", plan=ithaca.Plan(**plan), tokens=2048, layers=2, axes=Axes(**axes))
    return run_scene(scene, ithaca.mesh(**axes))["memory"]


def rehearsed(nursery: Nursery, folder: Path, name: str, *words: str) -> dict[str, Any]:
    plan, axes = SCENES[name]
    options = {f"plan.{key}": value for key, value in plan.items()} | {
        f"mesh.{key}": size for key, size in axes.items()
    }
    sets = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    end = nursery.command(
        "rehearse", "tiny", "--ranks", "4", "--tokens", "2048", "--layers", "2", "--json", *sets, *words, folder=folder
    )
    assert (end.code, end.err) == (0, "")
    return json.loads(end.out)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sweep" else pytest.mark.full) for name in SCENES]
)
def test_memory_is_that_of_a_real_rank(ranks, nursery: Nursery, tmp_path: Path, name: str) -> None:
    found, wanted = rehearsed(nursery, tmp_path, name), ranks(4).run(real, name)[0]
    assert found["peak_bytes"] == sum(found["memory"].values())
    assert found["seconds"] > found["attention_seconds"] > 0
    # gloo's threads let go of a message a moment after it has arrived
    assert found["memory"].pop("exchange", 0) == pytest.approx(wanted.pop("exchange", 0), rel=0.15)
    assert found["memory"] == wanted
    assert found["memory"][GRADIENTS] > 0  # on their way to their owners
    assert not {HOST, KERNELS, ALLOCATOR} & found["memory"].keys()  # of which the last two are a GPU's
    assert found["fits"] is True
    assert found["peak_bytes_predicted"] is found["memory_predicted"] is found["seconds_predicted"] is None


def test_memory_only(nursery: Nursery, tmp_path: Path) -> None:
    """The same, but for attention; and a length whose host tapes this machine could not hold."""
    words = ["--set", "plan.kernel=naive", "--set", "plan.chunk=256"]  # eight chunks: more than a short walk visits
    whole, short = (rehearsed(nursery, tmp_path, "sweep", *words, *more) for more in ((), ("--memory-only",)))
    assert "seconds" not in short
    for owner in ("states", "gradients", "blocks", "K and V", "tapes", "gathered weights"):
        assert short["memory"][owner] == whole["memory"][owner]
    assert short["host_bytes"] == whole["host_bytes"]


def test_layers_that_are_left_out_are_held(nursery: Nursery, tmp_path: Path) -> None:
    """Three of four: all but what AdamW counts the steps of the fourth with."""
    three, four = (rehearsed(nursery, tmp_path, "sweep", "--layers", count)["memory"] for count in ("3", "4"))
    assert three.pop("states") == four.pop("states") - 4 * len(read_spec(PRESETS["tiny"]).block_shapes())
    assert three == four


@pytest.mark.parametrize("last", ["device", "host"])  # the fourth layer alone has slots on the device, or none has
def test_a_plan_that_names_every_layer(nursery: Nursery, tmp_path: Path, last: str) -> None:
    """Three of four run, each with its own x and o. What the fourth holds is held, and the host's bytes are of all."""
    words = ["--set", f"plan.x=rebuild, device, rebuild, {last}", "--set", f"plan.o=device, device*2, {last}"]
    words += ["--set", "plan.lse=device", "--set", "plan.residual=device"]
    three, four = (rehearsed(nursery, tmp_path, "sweep", *words, "--layers", count) for count in ("3", "4"))
    assert (three["layers"], three["plan"], three["host_bytes"]) == (3, four["plan"], four["host_bytes"])
    steps = 4 * len(read_spec(PRESETS["tiny"]).block_shapes())  # AdamW counts the steps of a layer
    assert three["memory"].pop("states") == four["memory"].pop("states") - steps
    assert three["memory"] == four["memory"]


KEEPING_ALL = {
    "dense": ({"recipe": "dense"}, {"shard": 2}),
    "ulysses": ({"recipe": "ulysses"}, {"ulysses": 4}),
    "ring": ({"recipe": "ring"}, {"ring": 2}),
}


def play_keeping_all(name: str, file: Path) -> None:
    """In a process of its own: with everything kept, some layers and all of them."""
    plan, axes = KEEPING_ALL[name]
    grid = rehearse.loopback_mesh(Axes(**axes))
    scene = Scene(model="tiny", plan=Plan(**plan, checkpoint="none"), tokens=1024, axes=grid.axes, memory_only=True)
    file.write_text(json.dumps([run_scene(replace(scene, layers=count), grid)["peak_bytes"] for count in (2, 3, 4)]))


@pytest.mark.parametrize("name", KEEPING_ALL)
def test_everything_that_absent_layers_keep_is_held(nursery: Nursery, tmp_path: Path, name: str) -> None:
    """With checkpoint='none', by the meter's peak. A GPU's norm keeps x alone, as is held; torch's on a CPU more."""
    end = nursery.job(play_keeping_all, name, tmp_path / "found.json")[0]
    assert end.code == 0, end.err
    two, three, four = json.loads((tmp_path / "found.json").read_text())
    spec, axes = read_spec(PRESETS["tiny"]), Axes(**KEEPING_ALL[name][1])
    norms = 2 * (1024 // axes.context) * (spec.hidden + 1) * 4  # the normed x before its weight, and a number a row
    layer = 4 * len(spec.block_shapes()) + norms  # AdamW counts its steps
    assert (two, three) == (four - 2 * layer, four - layer)


def play_some_layers(file: Path) -> None:
    """In a process of its own: scenes one after the other, with and without the memory of layers that do not run."""
    grid = rehearse.loopback_mesh(Axes(ulysses=2))
    scene = Scene(model="tiny", plan=Plan(recipe="sweep", chunk=512), tokens=2048, axes=grid.axes, layers=1)
    some, other = replace(scene, hold_absent=False), replace(scene, layers=2, hold_absent=False)
    file.write_text(json.dumps([run_scene(each, grid) for each in (some, scene, other, some)]))


def test_layers_that_are_left_out_need_not_be_held(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(play_some_layers, tmp_path / "found.json")[0]
    assert end.code == 0, end.err
    one, held, two, again = json.loads((tmp_path / "found.json").read_text())
    assert (one["layers"], one["model_layers"], held["model_layers"]) == (1, 1, 4)
    shards = sum(map(math.prod, read_spec(PRESETS["tiny"]).block_shapes().values())) // 2
    assert held["memory"]["states"] - one["memory"]["states"] == 3 * shards * 12  # fp32: the weights and two moments
    assert two["memory"]["states"] > one["memory"]["states"]
    assert two["host_bytes"] > one["host_bytes"]
    assert again["memory"] == one["memory"]  # a scene leaves nothing behind in the process


def play_documents(file: Path) -> None:
    """In a process of its own: the batch of a scene with documents."""
    seen: dict[str, Any] = {}

    def step(_model: object, _optimizer: object, batch: Any) -> dict[str, float]:
        seen.update(bounds=batch.bounds, attended=batch.attended)
        return dict.fromkeys(("forward", "backward", "optimizer"), 1.0)

    rehearse.run_step = step
    plan = Plan(recipe="sweep", chunk=64)
    scene = Scene(model="tiny", plan=plan, tokens=128, axes=Axes(shard=2, ulysses=2), documents=(0, 32, 128))
    found = rehearse.rehearse(scene)
    file.write_text(json.dumps(seen | {"predicted": found["seconds_predicted"]}))


def test_documents_of_a_scene_are_those_of_its_batch(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(play_documents, tmp_path / "found.json")[0]
    assert end.code == 0, end.err
    seen = json.loads((tmp_path / "found.json").read_text())
    assert seen == {"bounds": [0, 32, 128], "attended": (32**2 + 96**2) / 128, "predicted": None}


def two_steps(file: Path) -> None:
    """In a process of its own: a rehearsal whose steps only say whether somebody watches them."""
    watched: list[int] = []

    def step(*_: Any) -> dict[str, float]:
        watched.append(torch._C._len_torch_dispatch_stack())
        return dict.fromkeys(("forward", "backward", "optimizer"), float(len(watched)))

    rehearse.run_step = step
    plan = Plan(recipe="sweep", chunk=512)
    found = rehearse.rehearse(Scene(model="tiny", plan=plan, tokens=2048, axes=Axes(ring=2, ulysses=2)))
    file.write_text(json.dumps(found | {"watched": watched}))


def test_the_second_step_is_timed_with_nothing_watching(nursery: Nursery, tmp_path: Path) -> None:
    end = nursery.job(two_steps, tmp_path / "found.json")[0]
    assert end.code == 0, end.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["watched"] == [1, 0]
    assert (found["forward_seconds"], found["seconds"]) == (2.0, 6.0)
    assert found["tokens_per_second_per_gpu"] == 2048 / 6 / 4
    assert found["mfu_causal"] is None  # a CPU has no peak that anyone compares with


def test_parts_of_a_step_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 3.0, 6.0))
    monkeypatch.setattr(rehearse, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    done: list[str] = []
    loss = SimpleNamespace(backward=lambda: done.append("backward"))

    class Model:
        mesh = SimpleNamespace(device=torch.device("cpu"))

        def __call__(self, _: object) -> Any:
            done.append("forward")
            return loss

    optimizer: Any = SimpleNamespace(step=lambda: done.append("step"), zero_grad=lambda: done.append("zero"))
    model: Any = Model()
    batch: Any = None
    assert rehearse.run_step(model, optimizer, batch) == {"forward": 1.0, "backward": 2.0, "optimizer": 3.0}
    assert done == ["forward", "backward", "step", "zero"]


def test_what_goes_to_a_disk_is_said(nursery: Nursery, tmp_path: Path) -> None:
    """Without one, where memory alone is rehearsed; of all layers, in whole blocks."""
    words = ["tiny", "--ranks", "2", "--tokens", "2048", "--layers", "2", "--memory-only"]
    words += ["--set", "plan.o=disk", "--set", "plan.disk=/nowhere", "--set", "plan.chunk=512"]
    found, lines = (nursery.command("rehearse", *words, *more, folder=tmp_path) for more in (["--json"], []))
    assert json.loads(found.out)["disk_bytes"] == 4 * (2048 // 2) * 256 * 4
    assert "Disk: 4 MiB of tapes for this rank, all layers" in lines.out


@pytest.mark.parametrize("more", [[], ["--evaluate"]])
def test_a_cpu_has_no_prediction(nursery: Nursery, tmp_path: Path, more: list[str]) -> None:
    """What is predicted is for a GPU, with its libraries and its allocator."""
    words = ["tiny", "--ranks", "2", "--tokens", "256", "--layers", "1", "--memory-only", *more]
    end = nursery.command("rehearse", *words, folder=tmp_path)
    assert end.code == 0, end.err
    assert "Memory at its peak" in end.out
    assert "redicted" not in end.out


def test_a_gpu_that_is_in_no_table_is_rehearsed_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is not predicted, and there is no peak to divide by; on a known GPU it is the GPU's own."""
    scene = Scene(model="tiny", plan=Plan(recipe="sweep"), tokens=2048, axes=Axes(ulysses=2))
    spec, seconds = read_spec(PRESETS["tiny"]), dict.fromkeys(("forward", "backward", "optimizer"), 1.0)
    model: Any = SimpleNamespace(
        mesh=SimpleNamespace(device=torch.device("cuda")), spec=spec, dtype=torch.bfloat16, kernel=CUDNN
    )
    found = {}
    for name in ("Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB"):
        properties = SimpleNamespace(name=name, total_memory=32 * 10**9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        found[name] = rehearse._speed(scene, model, seconds)
    unknown, a100 = found["Tesla V100-SXM2-32GB"], found["NVIDIA A100-SXM4-80GB"]
    assert unknown["seconds_predicted"] is unknown["mfu_causal"] is None
    assert a100["seconds_predicted"] > 0
    assert a100["mfu_causal"] == pytest.approx(2048 / 3 / 2 * spec.flops_per_token(2048) / 312e12)
    documents = rehearse._speed(replace(scene, documents=(0, 1024, 2048)), model, seconds)
    assert documents["mfu_causal"] == pytest.approx(2048 / 3 / 2 * spec.flops_per_token(1024) / 312e12)
    assert documents["seconds_predicted"] == a100["seconds_predicted"]  # the host launches as much


CUDNN = SimpleNamespace(name="cudnn+flash")


def predicted(monkeypatch: pytest.MonkeyPatch, kernel: Any = CUDNN, **options: Any) -> float:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    scene = Scene(model="llama3-8b", tokens=2**20, **options)
    model: Any = SimpleNamespace(spec=read_spec(PRESETS["llama3-8b"]), dtype=torch.bfloat16, kernel=kernel)
    gpu = rehearse.known_gpu(torch.device("cuda"), scene.hardware)
    assert gpu is not None
    return rehearse.predicted_seconds(scene, model, gpu).step


def test_more_ranks_than_a_node_has_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predicted(monkeypatch, plan=Plan(recipe="sweep"), axes=Axes(ring=125, ulysses=8))


def test_the_kernel_that_runs_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `auto` would take another one."""
    plan = Plan(recipe="sweep")
    slow, fast = (predicted(monkeypatch, SimpleNamespace(name=name), plan=plan) for name in ("cudnn+flash", "flash4"))
    assert fast < 0.95 * slow


def test_documents_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, half = (
        predicted(monkeypatch, plan=Plan(recipe="sweep"), documents=bounds) for bounds in (None, (0, 2**19, 2**20))
    )
    assert half == pytest.approx(0.5 * whole, rel=0.1)


def test_a_rehearsal_of_documents(nursery: Nursery, tmp_path: Path) -> None:
    """The pattern is repeated to fill the sequence, and the batch is made of it."""
    found = rehearsed(nursery, tmp_path, "dense", "--documents", "256+2x64")
    assert found["documents"] == 16
    assert found["documents_packed"].startswith("16 in each sequence (256+2x64, 384 tokens, repeated to 2K)")
    assert found["kernel"] == "torch-cpu"


def test_a_disk_is_predicted_as_this_rank_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks are not there: what they would write takes no time."""
    plan = Plan(recipe="sweep", x="disk", o="disk", disk="/scratch")
    beside = [predicted(monkeypatch, plan=plan, axes=Axes(shard=shard, ulysses=8)) for shard in (1, 32)]
    assert beside[0] == pytest.approx(beside[1], rel=0.2)  # the weights are cut finer


# The bare work of a step
T, E, Q, KV, MLP, V = 96, 256, 256, 64, 704, 256  # tokens, and sizes of `tiny`
Sizes = tuple[tuple[int, int], tuple[int, int], bool]


def count_bare(words: dict[str, Any], axes: dict[str, int], layers: int, file: Path) -> None:
    """In a process of its own: what a step asks for, by shape, with every call timed as briefly as can be."""
    kernel_bound.PRODUCT_SECONDS = kernel_bound.ATTENTION_SECONDS = 0.0
    seen: dict[str, list[Any]] = {}
    counted_products, counted_calls = rehearse.product_seconds, rehearse.attention_seconds

    def products(counts: Counter, *more: Any) -> float:
        seen["products"] = [(a[0], b[0], dtype == torch.float32, count) for (a, b, dtype), count in counts.items()]
        return counted_products(counts, *more)

    def calls(counts: Counter, *more: Any) -> dict[str, float]:
        seen["calls"] = [(backward, q, k, count) for (backward, q, k, _), count in counts.items()]
        return counted_calls(counts, *more)

    rehearse.product_seconds, rehearse.attention_seconds = products, calls
    scene = Scene(model="tiny", plan=Plan(**words), tokens=T, layers=layers, bare=True, axes=Axes(**axes))
    found = rehearse.rehearse(scene)
    file.write_text(json.dumps(seen | {"found": found}))


def bare_step(
    nursery: Nursery, folder: Path, words: dict[str, Any], layers: int = 1, **axes: int
) -> tuple[Counter[Sizes], dict[bool, int], dict[str, Any]]:
    """Products by shape, attention calls forward and backward, and the report."""
    end = nursery.job(count_bare, words, axes, layers, folder / "seen.json")[0]
    assert end.code == 0, end.err
    seen = json.loads((folder / "seen.json").read_text())
    counted: Counter[Sizes] = Counter()
    for a, b, adds, count in seen["products"]:
        counted[tuple(a), tuple(b), adds] += count
    calls = {which: sum(call[-1] for call in seen["calls"] if call[0] is which) for which in (False, True)}
    return counted, calls, seen["found"]


def test_products_and_attention_of_a_step(nursery: Nursery, tmp_path: Path) -> None:
    """One block of `dense`: forward, forward again without the last product, and backward; and the loss."""
    widths = [(E, Q), (E, KV), (E, KV), (Q, E), (E, MLP), (E, MLP), (MLP, E)]
    wanted: Counter[Sizes] = Counter()
    for inner, outer in (*widths, *widths[:-1], (E, V)):
        wanted[(T, inner), (inner, outer), False] += 1
    for inner, outer in (*widths, (E, V)):
        wanted[(T, outer), (outer, inner), False] += 1  # gradients of inputs
        wanted[(outer, T), (T, inner), True] += 1  # of weights, added to sums
    products, calls, found = bare_step(nursery, tmp_path, {"recipe": "dense"})
    assert products == wanted
    assert calls == {False: 2, True: 1}
    assert (
        found["bare_seconds"] > found["bare_attention_forward_seconds"] + found["bare_attention_backward_seconds"] > 0
    )
    passes = found["forward_seconds"] + found["backward_seconds"]
    assert found["over_bare"] == pytest.approx(passes / found["bare_seconds"])


SWEEP: dict[str, Any] = {"recipe": "sweep", "chunk": 32}  # three chunks, which see one, two and three
BARE = {
    "selective": ({"recipe": "dense", "checkpoint": "selective"}, {}, 1, (1, 1)),
    "ulysses": ({"recipe": "ulysses"}, {"ulysses": 4}, 1, (2, 1)),
    "untied": ({"recipe": "untied"}, {"ulysses": 2}, 1, (8, 4)),  # two heads at a time, of eight
    "sweep": (SWEEP, {}, 2, (12, 12)),
    "o recomputed": ({**SWEEP, "o": "recompute"}, {}, 2, (24, 12)),
    "x rebuilt": ({**SWEEP, "x": "host, rebuild"}, {}, 2, (12, 12)),
}


@pytest.mark.parametrize("name", BARE)
def test_predicted_flops_are_those_of_a_step(nursery: Nursery, tmp_path: Path, name: str) -> None:
    words, axes, layers, calls = BARE[name]
    products, counted, _ = bare_step(nursery, tmp_path, words, layers, **axes)
    flops = sum(2 * a[0] * a[1] * b[1] * count for (a, b, _), count in products.items())
    spec = read_spec(PRESETS["tiny"]).with_layers(layers)
    job = Job(spec=spec, plan=Plan(**words), tokens=T, axes=Axes(**axes))
    predicted = job.costs.work(job).linear * job.axes.context
    kv = 2 * 2 * E * KV  # K and V of a token
    if words["recipe"] == "sweep":
        predicted -= kv * (T + (layers - 1) * SWEEP["chunk"])  # still there: the last layer's, and each last chunk's
    if words["recipe"] == "untied":
        predicted += kv * T  # projected once more, which is not worth a term
    assert flops == predicted / axes.get("ulysses", 1)
    assert (counted[False], counted[True]) == calls


def command_without_memory(words: list[str]) -> None:
    """`ithaca rehearse` on a device that is full."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    from ithaca.cli import main

    rehearse.run_scene = full  # pyrefly: ignore
    sys.argv = ["ithaca", "rehearse", *words]
    main()


def test_what_does_not_fit(nursery: Nursery) -> None:
    words = ["tiny", "--ranks", "2", "--tokens", "2048", "--json"]
    end = nursery.job(command_without_memory, words)[0]
    assert end.code == 1
    assert_one_sentence(end)
    assert "2K tokens do not fit (CUDA out of memory): the predicted peak is" in end.err
    found = json.loads(end.out)
    assert found["fits"] is False
    spec = read_spec(PRESETS["tiny"])
    predicted = step_memory(Job(spec=spec, plan=Plan(recipe="sweep"), tokens=2048, axes=Axes(ulysses=2)))
    assert found["peak_bytes_predicted"] == predicted.total
    assert found["memory_predicted"] == predicted.parts


def assert_one_sentence(end: Ended) -> None:
    assert end.err.startswith("error: ")
    assert len(end.err.strip().splitlines()) == 1, end.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--recipe", "auto"], "--recipe auto cannot be rehearsed: give the recipe that ithaca plan chooses, as sweep"),
        (["--bare", "--memory-only"], "--bare times the kernels that --memory-only leaves out: give one of the two"),
        (["--layers", "0"], "--layers 0 cannot be rehearsed: the model has 4, so 1 to 4 can"),
        (["--layers", "5"], "--layers 5 cannot be rehearsed: the model has 4, so 1 to 4 can"),
        (["--ranks", "0"], "--ranks 0 cannot be rehearsed: give 1 or more"),
        (["--cap", "80GB"], "--cap 80GB is for a GPU, and there is none here: leave it out"),
        (["--cap", "5MB"], "--cap 5MB is for a GPU, and there is none here: leave it out"),
        (["--cap", "80"], "--cap 80 is less than 1MB: give a size with its unit, e.g. --cap 64GB"),
        (["--tokens", "1MB"], "--tokens: '1MB' is not a number of tokens: write 4096, 64K or 5M"),
        (["--set", "train.steps=3"], "--set train.steps=3 has no effect in a rehearsal: set options of plan or mesh"),
        (
            ["--set", "mesh.ulysses=3", "--ranks", "4"],
            "is 3, but --ranks is 4: leave replicate out and let the product of the others be 4",
        ),
        (["--set", "mesh.ulysses=0"], "mesh.ulysses=0 is not a number of ranks: give 1 or more"),
        (["--recipe", "dense", "--ranks", "2", "--set", "mesh.ulysses=2"], "recipe 'dense' has no context parallelism"),
        (["--recipe", "dense", "--ranks", "4", "--set", "mesh.shard=2"], "is 2, but --ranks is 4"),
        (["--hardware", "missing.toml"], "missing.toml"),
        (
            ["--set", "plan.o=host*5", "--layers", "2"],
            "o names 5 layers, but the model has 4: name 4, or fewer, to be repeated",
        ),
    ],
)
def test_refused(nursery: Nursery, tmp_path: Path, words: list[str], sentence: str) -> None:
    end = nursery.command("rehearse", "tiny", "--tokens", "256", *words, folder=tmp_path)
    assert end.code == 2
    assert end.out == ""
    assert_one_sentence(end)
    assert sentence in end.err
