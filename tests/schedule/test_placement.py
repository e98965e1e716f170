"""x and o of each layer on the device, the host or the disk, rebuilt or recomputed: the same bits wherever they are."""

import errno
import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ithaca
from ithaca.assemble import Substitutes
from ithaca.base.errors import PlanError, RunError
from ithaca.plans.places import KEPT, Placement, spell
from ithaca.plans.plan import PLACED
from ithaca.tape.spec import disk_bytes
from tests.models import make_model, save
from tests.sampling import sampled
from tests.schedule.steps import Outcome, assert_same, compare, model_step, naive_step, random_batch
from tests.schedule.sweep.placements import placements
from tests.tape.disks import open_files

LAYERS = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Deep models; o is wider than x in `wide`, and in `narrow` too narrow for its tapes to take an x."""
    top, deep = tmp_path_factory.mktemp("deep"), {"num_hidden_layers": LAYERS}
    return {
        "untied": save(make_model("llama-bias", **deep), top / "untied"),
        "tied": save(make_model("qwen2", torch.float64, **deep), top / "tied"),
        "wide": save(make_model("qwen3", head_dim=14, **deep), top / "wide"),
        "narrow": save(make_model("qwen3", head_dim=6, **deep), top / "narrow"),
    }


def sweep(folder: Path, **options) -> ithaca.Plan:
    """With a folder for what goes to the disk, where something does."""
    on_disk = any("disk" in options.get(name, "") for name in PLACED)
    return ithaca.Plan(recipe="sweep", disk=str(folder) if on_disk else None, **options)


def step(folder: Path, plan: ithaca.Plan, batches: list) -> Outcome:
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan)
    model.engine.poison = True  # a tile that is read too late or too early is NaN
    return model_step(model, batches)


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == wanted[0]
    for name, gradient in found[1].items():
        assert torch.equal(gradient, wanted[1][name]), name


HARD = [  # x only in passing, on tapes of o here and there, through layers that are not kept; attention again between
    ("host, rebuild*5", "host"),
    ("device, rebuild*5", "device"),
    ("host, rebuild*2, host, rebuild*2", "device, host"),
    ("host, rebuild*5", "host*5, recompute"),
    ("host, rebuild*2, host*2, rebuild", "host*3, recompute, host*2"),
    ("rebuild", "host"),
    ("rebuild", "device"),
    ("rebuild, host*5", "recompute"),
    ("rebuild*2, host, rebuild*3", "host"),
]
ON_DISK = [
    ("untied", "disk, rebuild*5", "disk"),
    ("wide", "device, rebuild*5", "disk*3, host*2, device"),
    ("narrow", "disk*2, rebuild*2, host, rebuild", "host, disk, disk, device*2, disk"),
    ("untied", "rebuild", "disk"),
]


CUT = {"chunk": 4, "tile": 3}
HARD_BATCHES = [random_batch(1, 30, documents=True, ignored=0.2, seed=7)]


@pytest.fixture(scope="module")
def plain_hard(folders) -> Callable[[str], Outcome]:
    """What a kind of model gives with everything where it is by default."""
    return cache(lambda kind: step(folders[kind], ithaca.Plan(recipe="sweep", **CUT), HARD_BATCHES))


@pytest.mark.parametrize(
    ("kind", "x", "o"),
    [
        *(
            pytest.param(kind, *words, marks=() if kind == "narrow" or number == 0 else pytest.mark.full)
            for kind in ("untied", "wide", "narrow")
            for number, words in enumerate(HARD)
        ),
        *ON_DISK,
    ],
)
def test_hard_ones(folders, plain_hard, tmp_path: Path, kind: str, x: str, o: str) -> None:
    assert_same_bits(step(folders[kind], sweep(tmp_path, x=x, o=o, **CUT), HARD_BATCHES), plain_hard(kind))


@settings(max_examples=3, deadline=None)
@given(placement=placements(LAYERS), others=st.data(), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("kind", ["untied", "tied", "wide", "narrow"])
def test_every_mix_gives_the_same_bits(
    folders, tmp_path_factory, kind: str, placement: Placement, others, seed: int
) -> None:
    places = {name: others.draw(st.sampled_from(KEPT)) for name in ("lse", "residual", "kv")}
    chunk = others.draw(st.sampled_from((4, 9, 30)))
    batches = [random_batch(1, 30, documents=True, ignored=0.2, seed=seed), random_batch(1, 23, True, 0.2, seed + 1)]
    cut = {"chunk": min(chunk, 23), "tile": min(chunk, 5)}
    plain = step(folders[kind], ithaca.Plan(recipe="sweep", **cut), batches)
    assert_same(plain, naive_step(folders[kind], batches))
    words = {"x": spell(placement.x), "o": spell(placement.o)}
    plan = sweep(tmp_path_factory.getbasetemp(), **words, **places, **cut)
    assert_same_bits(step(folders[kind], plan, batches), plain)


@pytest.mark.parametrize(
    ("kind", "zero"),
    sampled(
        itertools.product(("untied", "tied", "wide", "narrow"), (1, 2, 3)),
        lambda *case: case in (("untied", 1), ("tied", 2), ("wide", 3), ("narrow", 2)),
    ),
)
def test_two_ranks_with_accumulation(ranks, folders, kind: str, zero: int) -> None:
    """Ranks with different numbers of tokens, which gather the weights of other layers equally often."""
    words = ["host, rebuild*5", "device, rebuild*2, host, rebuild*2", "host*2, rebuild, device, rebuild*2"]
    plan = ithaca.Plan(recipe="sweep", x=words[zero - 1], o="host*2, device", zero=zero, chunk=7, tile=3, loss_tile=7)
    batches = [random_batch(3, 23, True, 0.7, seed=zero), random_batch(4, 31, False, 0.1, seed=zero + 5)]
    compare(ranks(2), folders[kind], plan, batches)


@pytest.mark.parametrize(
    ("kind", "zero", "size"),
    sampled(
        itertools.product(("untied", "tied", "narrow"), (1, 2, 3), (2, 4, 8)),
        lambda *case: case in (("untied", 3, 2), ("tied", 3, 4), ("narrow", 2, 4)),
    ),
)
def test_x_of_the_first_layer_looked_up_on_ranks(ranks, folders, kind: str, zero: int, size: int) -> None:
    """The embedding's table is gathered again in the backward pass, in passing or not, on every rank."""
    words = {"untied": "rebuild*4, host, rebuild", "tied": "rebuild", "narrow": "rebuild*2, host*2, rebuild, device"}
    plan = ithaca.Plan(recipe="sweep", x=words[kind], zero=zero, chunk=7, tile=3, loss_tile=7)
    batches = [random_batch(size + 1, 23, True, 0.7, seed=zero), random_batch(size, 31, False, 0.1, seed=zero + 5)]
    compare(ranks(size), folders[kind], plan, batches)


@pytest.mark.parametrize("zero", [1, 3])
def test_recomputed_on_two_ranks(ranks, folders, zero: int) -> None:
    plan = ithaca.Plan(recipe="sweep", x="host", o="recompute", zero=zero, chunk=7, tile=3)
    compare(ranks(2), folders["untied"], plan, [random_batch(3, 23, documents=True, ignored=0.2, seed=zero)])


def own_file(folder: Path, disk: Path) -> tuple[int, list[str]]:
    """The file of this rank's tapes, and what others see of it."""
    plan = ithaca.Plan(recipe="sweep", o="disk", disk=str(disk))
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh())
    model.allocate(2, 64)
    file = os.fstat(model.reservation._tapes[True]._disk._file._parts[0].file)  # pyrefly: ignore
    assert file.st_size == disk_bytes(model.reservation.specs(True), model.reservation._tapes[True].tiles)
    return file.st_ino, os.listdir(disk)


def test_two_ranks_on_one_disk(ranks, folders, tmp_path: Path) -> None:
    (first, seen), (second, also_seen) = ranks(2).run(own_file, folders["tied"], tmp_path)
    assert first != second
    assert seen == also_seen == []
    plan = sweep(tmp_path, x="disk, rebuild*2, host*3", o="disk*2, host", chunk=7, tile=3)
    compare(ranks(2), folders["wide"], plan, [random_batch(3, 23, documents=True, ignored=0.2, seed=4)])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_late_copies_change_no_bit(folders, tmp_path: Path, kind: str) -> None:
    batches = [random_batch(1, 41, documents=True, ignored=0.1, seed=1)] * 2
    plain = step(folders[kind], ithaca.Plan(recipe="sweep", chunk=9, tile=4), batches)
    some = (
        ("rebuild*4, host, rebuild", "host"),
        ("host*2, rebuild, disk, rebuild*2", "disk"),
        ("device, rebuild*5", "host"),
    )
    for seed, (x, o) in enumerate(some):
        plan = sweep(tmp_path, x=x, o=o, lse="host", kv="host", chunk=9, tile=4)
        model, chance = ithaca.apply(ithaca.load_model(folders[kind], "float64"), plan), random.Random(seed)
        model.engine.poison = True
        model.engine.before_copy = lambda chance=chance: time.sleep(chance.random() * 0.002)
        model.engine.before_disk = lambda chance=chance: time.sleep(chance.choice((0, 0, 0.002)))
        assert_same_bits(model_step(model, batches), plain)


@pytest.mark.parametrize("recipe", ["alst", "dense"])
def test_whole_blocks_with_x_of_some_layers_on_the_host(ranks, folders, recipe: str) -> None:
    plan = ithaca.Plan(recipe=recipe, x="device, host*2", tile=7)
    compare(ranks(2), folders["tied"], plan, [random_batch(3, 23, documents=True, ignored=0.2, seed=2)])
    model = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), plan)
    model.allocate(1, 64)
    assert (
        model.describe_tapes()[1] == f"Saved activations: in host memory x of 4 layers {4 * 64 * 48 * 8 / 1024:.3g} KiB"
    )


def test_whole_blocks_with_x_on_the_disk(folders, tmp_path: Path) -> None:
    batches, cut = [random_batch(1, 30, documents=True, ignored=0.2, seed=7)], {"recipe": "alst", "tile": 7}
    plain = step(folders["tied"], ithaca.Plan(**cut), batches)
    plan = ithaca.Plan(x="device, disk*2", disk=str(tmp_path), **cut)
    model, moved = ithaca.apply(ithaca.load_model(folders["tied"], "float64"), plan), []
    model.engine.before_disk = lambda: moved.append(1)
    assert_same_bits(model_step(model, batches), plain)
    assert len(moved) == 2 * 4 * 5  # there and back, of four layers, five tiles


def test_a_disk_that_fails_ends_the_pass_and_not_the_model(folders, tmp_path: Path, monkeypatch) -> None:
    batch = random_batch(1, 30, documents=True, ignored=0.2, seed=7)
    plan = sweep(tmp_path, x="disk", o="disk", chunk=4, tile=3)
    model = ithaca.apply(ithaca.load_model(folders["wide"], "float64"), plan)
    model.engine.poison = True
    model.allocate(1, 30)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(
            RunError, match=r"of a tape could not be written to plan.disk='.*' \(No space left on device\): "
        ):
            model(model.shard(*batch))
    plain = step(folders["wide"], ithaca.Plan(recipe="sweep", chunk=4, tile=3), [batch])
    assert_same_bits(model_step(model, [batch]), plain)
    assert os.listdir(tmp_path) == []


def test_another_length_has_the_disk_to_itself(folders, tmp_path: Path) -> None:
    """Whoever still holds a loss of the one before."""
    model = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), sweep(tmp_path, x="disk", chunk=8))
    loss = model(model.shard(*random_batch(1, 30, documents=False, ignored=0.0, seed=7)))
    loss.backward()
    model.allocate(1, 40)
    assert len(open_files(tmp_path)) == 1


def test_what_is_said_to_fit_the_host_fits_beside_the_staging(folders, tmp_path: Path) -> None:
    def check(tokens: int) -> None:
        plan = sweep(tmp_path, o="disk", chunk=16, host_memory=400 * 2**10)
        ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan).check_memory(1, tokens)

    with pytest.raises(PlanError, match="tokens would fit") as refused:
        check(1600)
    (fitting,) = re.findall(r"(\d+) tokens would fit", str(refused.value))
    check(int(fitting))
    with pytest.raises(PlanError):
        check(int(fitting) + 16)


def test_what_is_on_the_disk_is_said_and_counted(folders, tmp_path: Path) -> None:
    plan = sweep(tmp_path, x="host*2, disk*4", o="disk", chunk=32)
    model = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan)
    model.allocate(1, 64)
    said, row = model.describe_tapes()[1], 64 * 48 * 8 / 1024
    assert f"on disk x of 4 layers {4 * row:.3g} KiB, o {6 * row:.3g} KiB" in said
    on_host = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), ithaca.Plan(recipe="sweep", chunk=32))
    staging = 6 * 32 * 48 * 8
    assert on_host.host_bytes(1, 64) - model.host_bytes(1, 64) == 10 * row * 1024 - staging


@pytest.mark.parametrize("direct", [True, False])
def test_a_way_through_the_page_cache_is_said(folders, tmp_path: Path, monkeypatch, direct: bool) -> None:
    monkeypatch.setattr("ithaca.tape.file._set_direct", lambda _: direct)
    said: list[str] = []
    model = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), sweep(tmp_path, o="disk", chunk=32))
    model.allocate(1, 64, said.append)
    wanted = f"plan.disk='{tmp_path}' is on a file system that reads and writes through the page cache only: slower"
    assert said == ([] if direct else [wanted])


def test_a_rehearsal_needs_no_disk(folders) -> None:
    plan = ithaca.Plan(recipe="sweep", x="disk, rebuild*5", o="disk", disk="/nowhere", chunk=4, tile=4)
    source, held = ithaca.load_model(folders["wide"], "float64"), Substitutes(tiles_held=2)
    model = ithaca.apply(source, plan, substitutes=held)
    loss = model(model.shard(*random_batch(1, 30, documents=False, ignored=0.0, seed=7)))
    loss.backward()
    assert loss.isfinite()


def test_what_is_made_again_is_said(folders) -> None:
    plan = ithaca.Plan(recipe="sweep", x="host*2, rebuild*4", o="recompute, host*5", chunk=32)
    model = ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan)
    model.allocate(1, 64)
    lines = model.describe_tapes()
    assert "x of 2 layers" in lines[1]
    assert "o of 5 layers" in lines[1]
    assert lines[2] == "Backward recomputes x of 4 layers from attention outputs: 6 passes of output projection and MLP"
    assert lines[3] == "Backward recomputes the attention of 1 of 6 layers"


REFUSED = [
    ({"x": "host, rebuild*0"}, "has no number of layers in 'rebuild\\*0': write rebuild\\*7"),
    ({"x": "host, rebild*3"}, "x=host, rebild\\*3 does not exist: did you mean 'rebuild'?"),
    ({"o": "rebuild"}, "o=rebuild does not exist: known are device, host, disk, recompute"),
    (
        {"o": "disk"},
        "o='disk' needs a folder on a disk: name it, as --set plan.disk=/scratch .in Python disk=",
    ),
    ({"x": "host, disk"}, "x='host, disk' needs a folder on a disk"),
    (
        {"disk": "/tmp"},
        "without x='disk' or o='disk' or lse='disk' or residual='disk' or kv='disk': use one, or leave it out",
    ),
    ({"recipe": "alst", "disk": "/tmp"}, "disk='/tmp' does nothing without x='disk': use one, or leave it out"),
    ({"o": "disk", "disk": ""}, "disk must name a folder, e.g. '/scratch'; it is ''"),
    ({"o": "disk", "disk": "/nowhere"}, "plan.disk='/nowhere' is not a folder that a file can be made in .No such"),
    (
        {"lse": "disk"},
        "lse='disk' needs a folder on a disk: name it, as --set plan.disk=/scratch .in Python disk=",
    ),
    ({"kv": "disc", "disk": "/tmp"}, "kv=disc does not exist: did you mean 'disk'?"),
    ({"optimizer": "disk", "disk": "/tmp"}, "optimizer=disk does not exist: known are device, host"),
    (
        {"recipe": "dense", "x": "disk", "disk": "/tmp", "checkpoint": "none"},
        "x='disk' of recipe 'dense' has no effect with checkpoint",
    ),
    ({"o": "host*7"}, "o names 7 layers, but the model has 6: name 6, or fewer, to be repeated"),
    ({"x": "host, rebuild", "o": "recompute"}, "x of layer 1 is to be rebuilt from o of layer 0, which is not kept"),
    ({"recipe": "alst", "x": "host, rebuild"}, "x=host, rebuild has no effect under recipe 'alst'"),
    ({"recipe": "dense", "x": "host, device", "checkpoint": "none"}, "x='host' .* has no effect with checkpoint"),
    ({"x": "host*" + "9" * 5000}, "has no number of layers in 'host"),
    ({"host_memory": 1000}, "plan.x='rebuild\\*4, host' frees 120 KiB"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_refused(folders, options: dict, sentence: str) -> None:
    def run() -> None:
        plan = ithaca.Plan(**({"recipe": "sweep"} | options))
        ithaca.apply(ithaca.load_model(folders["untied"], "float64"), plan).allocate(1, 64)

    with pytest.raises(PlanError, match=sentence):
        run()


def with_little_disk(folder: Path, disk: Path, rows: int) -> str:
    plan = ithaca.Plan(recipe="sweep", o="disk", disk=str(disk), chunk=32)
    model = ithaca.apply(ithaca.load_model(folder, "float64"), plan, ithaca.mesh())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=200 * 2**10))
        try:
            model.check_memory(rows, 64)
        except PlanError as error:
            return str(error)
    return "fits"


def test_ranks_of_a_node_share_its_disk(ranks, folders, tmp_path: Path) -> None:
    assert ranks(1).run(with_little_disk, folders["untied"], tmp_path, 1) == ["fits"]
    text, _ = ranks(2).run(with_little_disk, folders["untied"], tmp_path, 2)
    assert text == (
        f"tapes for 64 tokens need 288 KiB for the 2 ranks of this node, and the free space of plan.disk='{tmp_path}' "
        "is 200 KiB: 88 KiB are missing; plan.o=host frees 288 KiB, or 42 tokens would fit"
    )
