"""Every tape of the sweep on the device, the host or the disk: the same bits, on ranks that share a sequence too.

Slots and staging are NaN when they are free, copies and the disk are late at random. Sums of K's and V's gradients are
read, changed and written many times: a read that overtakes the write before it changes bits.
"""

import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ithaca
from ithaca.base.errors import ConfigError, PlanError
from ithaca.config import read_config
from ithaca.plans.plan import PLACED, Plan
from ithaca.tape import disk as disk_module
from ithaca.tape.spec import BLOCK
from tests.schedule.contexts import context_step, open_model, packed, random_delays, save_models
from tests.schedule.steps import Outcome, Rows, assert_same, model_step, naive_step

DEVICE = dict.fromkeys(PLACED, "device")
WORLDS = {  # Ulysses × ring ranks, and a model with heads for them
    (1, 1): "14/2",
    (2, 1): "8/2",
    (3, 1): "6/3",
    (1, 2): "8/1",
    (2, 2): "14/2",
    (5, 1): "8/8",
    (7, 1): "14/2",
    (2, 3): "8/2",
    (8, 1): "8/8",
    (2, 4): "8/1",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


def placed(folder: Path, **places: str) -> Plan:
    disk = str(folder) if "disk" in " ".join(places.values()) else None
    return Plan(recipe="sweep", chunk=9, tile=4, disk=disk, **DEVICE | places)


def striped(top: Path, **places: str) -> Plan:
    """The same over two folders."""
    folders = [top / "one", top / "two"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return replace(placed(top, **places), disk=", ".join(map(str, folders)))


def batches(seed: int = 3) -> list[Rows]:
    return [packed(53, 3, random.Random(seed)), packed(41, 1, random.Random(seed + 1))]


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == wanted[0]
    for name, gradient in found[1].items():
        assert torch.equal(gradient, wanted[1][name]), name


def late_step(folder: Path, plan: Plan, seed: int) -> Outcome:
    return context_step(folder, plan, {}, batches(), seed)


@pytest.mark.parametrize(
    "places",
    [
        *({name: "disk"} for name in PLACED),
        {"kv": "disk", "o": "recompute"},
        {"kv": "disk", "lse": "host", "residual": "disk", "x": "host, disk", "o": "disk, host"},
        {"residual": "disk", "x": "disk, rebuild*2", "o": "disk"},
        dict.fromkeys(PLACED, "disk"),
    ],
    ids=str,
)
def test_each_tape_on_disk(folders, tmp_path: Path, places: dict[str, str]) -> None:
    wanted = late_step(folders["14/2"], placed(tmp_path, **{k: v for k, v in places.items() if v == "recompute"}), 0)
    assert_same(wanted, naive_step(folders["14/2"], batches()))
    for seed in range(2):
        assert_same_bits(late_step(folders["14/2"], placed(tmp_path, **places), seed), wanted)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("chunk", [53, 100])
def test_a_single_chunk_on_disk(folders, tmp_path: Path, chunk: int) -> None:
    """Its residual stays in its slot, and the disk is written all the same."""
    rows = [packed(100, 4, random.Random(chunk))]
    options = {"recipe": "sweep", "chunk": chunk, "tile": 7}
    wanted = context_step(folders["8/2"], Plan(**options, **DEVICE), {}, rows)
    everywhere = Plan(**options, **dict.fromkeys(PLACED, "disk"), disk=str(tmp_path))
    assert_same_bits(context_step(folders["8/2"], everywhere, {}, rows, 1), wanted)


def worlds() -> Iterator[object]:
    for shape in WORLDS:
        marks = () if shape in ((2, 1), (2, 2)) else (pytest.mark.full,)
        yield pytest.param(shape, id="x".join(map(str, shape)), marks=marks)


@pytest.mark.parametrize("shape", list(worlds()))
def test_ranks_with_every_tape_on_disk(ranks, folders, tmp_path: Path, shape: tuple[int, int]) -> None:
    ulysses, ring = shape
    heads, sizes = WORLDS[shape], {"ulysses": ulysses, "ring": ring}
    job = ranks(ulysses * ring)
    wanted = job.run(context_step, folders[heads], placed(tmp_path), sizes, batches())
    assert_same(wanted[0], naive_step(folders[heads], batches()))
    plan = placed(tmp_path, **dict.fromkeys(PLACED, "disk"))
    for found, same in zip(job.run(context_step, folders[heads], plan, sizes, batches(), 5), wanted, strict=True):
        assert_same_bits(found, same)
    assert os.listdir(tmp_path) == []


def striped_step(folder: Path, plan: Plan, sizes: dict[str, int]) -> Outcome:
    """In stripes of a block, so that most tiles lie in both folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ithaca.tape.file.PART", BLOCK)
        return context_step(folder, plan, sizes, batches(), 5)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_two_folders_give_the_same_bits(ranks, folders, tmp_path: Path, shape: tuple[int, int]) -> None:
    sizes, job = {"ulysses": shape[0], "ring": shape[1]}, ranks(shape[0] * shape[1])
    wanted = job.run(context_step, folders["14/2"], placed(tmp_path), sizes, batches())
    plan = striped(tmp_path, **dict.fromkeys(PLACED, "disk"))
    for found, same in zip(job.run(striped_step, folders["14/2"], plan, sizes), wanted, strict=True):
        assert_same_bits(found, same)
    assert [os.listdir(folder) for folder in plan.folders] == [[], []]


def test_two_folders_are_said(folders, tmp_path: Path, monkeypatch) -> None:
    plan = striped(tmp_path, o="disk")

    def said() -> list[str]:
        model = ithaca.apply(ithaca.load_model(folders["8/8"], "float64"), plan)
        model.allocate(1, 64)
        return model.describe_tapes()

    sentence = f"Tapes on disk are striped over 2 folders, {tmp_path}/one, {tmp_path}/two"
    assert f"{sentence} on 1 device: no faster than that many" in said()
    monkeypatch.setattr("ithaca.schedule.memory_check.count_devices", len)
    monkeypatch.setattr("ithaca.schedule.memory_check.is_memory", lambda folder: folder.endswith("two"))
    lines = said()
    assert sentence in lines
    memory = "is memory (tmpfs): tapes there take host memory; name a folder on a disk"
    assert f"plan.disk='{tmp_path}/two' {memory}" in lines


def refusal(folders, plan: Plan) -> str:
    model = ithaca.apply(ithaca.load_model(folders["8/8"], "float64"), plan)
    with pytest.raises(PlanError) as refused:
        model.check_memory(1, 64)
    return str(refused.value)


def test_free_space_is_counted_once_for_a_file_system(folders, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("ithaca.tape.file.PART", BLOCK)
    free = {"one": 48 * 2**10, "two": 20 * 2**10}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[Path(folder).name]))
    plan = replace(striped(tmp_path, kv="disk"), chunk=32, tile=32)  # 2 × 2 tapes of 64 × 32 × 8 bytes: 64 KiB
    assert refusal(folders, plan).startswith(
        f"tapes for 64 tokens need 64 KiB, and the free space of plan.disk='{tmp_path}/one, {tmp_path}/two' "
        "(one file system) is 48 KiB: 16 KiB are missing; plan.kv=host frees 64 KiB, or 48 tokens would fit"
    )
    monkeypatch.setattr("ithaca.schedule.memory_check.by_file_system", lambda _: [[0], [1]])
    assert refusal(folders, plan).startswith(
        f"tapes for 64 tokens need 32 KiB in '{tmp_path}/two', and the free space of plan.disk='{tmp_path}/two' is "
        "20 KiB: 12 KiB are missing; plan.kv=host frees 64 KiB, or 32 tokens would fit"
    )


def test_one_folder_by_two_names(folders, tmp_path: Path) -> None:
    plan = striped(tmp_path, o="disk")
    (tmp_path / "two").rmdir()
    (tmp_path / "two").symlink_to(tmp_path / "one")
    wanted = f"names one folder as '{tmp_path}/one' and '{tmp_path}/two': name it once, or a folder on another disk"
    assert wanted in refusal(folders, plan)
    (tmp_path / "two").unlink()
    assert f"plan.disk='{tmp_path}/two' is not a folder that a file can be made in" in refusal(folders, plan)


@pytest.mark.parametrize(
    ("disk", "sentence"),
    [
        ("/a, /b, /a/", "disk='/a, /b, /a/' names '/a' twice: name it once, or a folder on another disk"),
        ("/a,", "disk must name a folder, e.g. '/scratch'; it is '/a,'"),
        (",", "disk must name a folder"),
        (["/a"], "disk must name a folder, e.g. '/scratch'"),
    ],
)
def test_folders_that_are_refused(disk, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        Plan(recipe="sweep", o="disk", disk=disk)


def test_folders_in_a_configuration(tmp_path: Path) -> None:
    """As a text or as a list; a run saves the text."""
    for written in ('"/a, /b"', '["/a", "/b"]'):
        file = tmp_path / "config.toml"
        file.write_text(f'[plan]\nrecipe = "sweep"\no = "disk"\ndisk = {written}\n')
        plan = read_config(file, []).plan
        assert plan is not None
        assert (plan.disk, plan.folders) == ("/a, /b", ("/a", "/b"))
    for written in ("[]", "7", '["/a", 7]'):
        file.write_text(f'[plan]\nrecipe = "sweep"\no = "disk"\ndisk = {written}\n')
        with pytest.raises(ConfigError, match=r"plan.disk: .* names no folder: write '/scratch', or several"):
            read_config(file, [])


def test_a_read_that_overtakes_a_write_is_noticed(folders, tmp_path: Path, monkeypatch) -> None:
    """The wait for the last write to a place is needed for the sums of gradients, and this test would see it gone."""
    plan, wanted = placed(tmp_path, kv="disk"), late_step(folders["14/2"], placed(tmp_path), 0)
    read = disk_module._read
    monkeypatch.setattr(disk_module, "_read", lambda *given: read(*given[:-1], None))
    _, gradients = late_step(folders["14/2"], plan, 0)
    assert any(not torch.equal(gradient, wanted[1][name]) for name, gradient in gradients.items())


def test_without_gradients_k_and_v_are_on_disk_too(folders, tmp_path: Path) -> None:
    """A pass that no backward pass follows has its own file, and leaves nothing."""
    rows, losses = batches()[0], []
    for plan in (placed(tmp_path), placed(tmp_path, kv="disk", residual="disk")):
        model = open_model(folders["8/2"], plan, {})
        model.engine.before_disk = random_delays(1)
        with torch.no_grad():
            losses.append(model(model.shard(*rows)).item())
    assert losses[0] == losses[1]
    assert os.listdir(tmp_path) == []


def test_a_second_step_finds_the_disk_as_it_should(folders, tmp_path: Path) -> None:
    """Tiles of the step before are overwritten, not read."""
    model = open_model(folders["8/2"], placed(tmp_path, **dict.fromkeys(PLACED, "disk")), {})
    model.engine.before_copy = model.engine.before_disk = random_delays(2)
    outcomes = []
    for _ in range(2):
        outcomes.append(model_step(model, batches()))
        for parameter in model.decoder.parameters():
            parameter.grad = None
    assert_same_bits(outcomes[1], outcomes[0])


def test_what_is_on_disk_is_said(folders, tmp_path: Path) -> None:
    plan = placed(tmp_path, kv="disk", lse="disk", residual="disk")
    model = ithaca.apply(ithaca.load_model(folders["8/8"], "float64"), plan)
    model.allocate(1, 64)
    said = model.describe_tapes()[1]
    assert "on disk lse " in said
    assert all(name in said.split("on disk")[1] for name in ("lse", "residual", "kv", "kv gradients"))
