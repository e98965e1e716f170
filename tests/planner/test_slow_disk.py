"""A disk that is slower than a step needs, with made-up speeds: when it is said, and what."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ithaca.cli import app
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.parallel.axes import Axes
from ithaca.planner.answer.slow_disk import SlowDisk, slow_disk, slow_disk_line, slow_disk_warning
from ithaca.planner.hardware import Machine, read_gpus
from ithaca.planner.seconds import predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job

M = 2**20
GPU, NODE = read_gpus()["H100-80GB"], Machine(nodes=1, gpus=8)
SPEC = read_spec(find_config("llama3-8b")[0])
O_BYTES = 32 * M * 4096 * 2  # o of all layers of all 8 ranks


def job(disk: str = "/scratch", **places: str) -> Job:
    plan = Plan(recipe="sweep", disk=disk, **({"o": "disk"} | places))
    return Job(spec=SPEC, plan=plan, tokens=M, axes=Axes(ulysses=8))


def found(rate: float, disks: int = 1, passes: int = 1) -> SlowDisk | None:
    return slow_disk(job(), replace(GPU, disk_read=rate, disk_write=rate), NODE, disks, passes)


def test_a_fast_disk_is_not_spoken_of() -> None:
    assert found(100e9) is None
    no_disk = Job(spec=SPEC, plan=Plan(recipe="sweep"), tokens=M, axes=Axes(ulysses=8))
    assert slow_disk(no_disk, replace(GPU, disk_read=1.0, disk_write=1.0), NODE) is None


def test_both_numbers() -> None:
    """Forward has least time for the bytes of o: it needs most."""
    free = predict_seconds(job(), replace(GPU, disk_read=1e15, disk_write=1e15), NODE)
    slow = found(1e9)
    assert slow is not None
    assert (slow.way, slow.given, slow.without) == ("forward", pytest.approx(1e9), pytest.approx(free.step))
    assert slow.needed == pytest.approx(O_BYTES / free.passes[0].computing)
    assert slow.step == pytest.approx(free.step - sum(each.computing for each in free.passes) + 2 * O_BYTES / 1e9)
    assert found(1.01 * slow.needed) is None
    assert found(1.01 * slow.needed / slow.enough, disks=slow.enough) is None
    assert found(0.9 * slow.needed / slow.enough, disks=slow.enough) is not None


@pytest.mark.parametrize("recipe", ["fpdt", "sweep"])
@pytest.mark.parametrize("o", ["host", "disk"])
def test_as_many_disks_as_are_named_are_enough(recipe: str, o: str) -> None:
    """K and V hide behind attention alone, which is far less than the step computes."""
    said = 0
    for rate, tokens in itertools.product((0.5e9, 3e9, 8e9, 20e9), (M // 4, M // 2 + 1000, 2 * M)):
        gpu = replace(GPU, disk_read=rate, disk_write=0.7 * rate)
        plan = Plan(recipe=recipe, kv="disk", o=o, disk="/scratch")
        asked = Job(spec=SPEC, plan=plan, tokens=tokens, axes=Axes(ulysses=8))
        slow = slow_disk(asked, gpu, NODE)
        if slow is None:
            continue
        said += 1
        assert slow.needed > slow.given
        assert slow_disk(asked, gpu, NODE, slow.enough) is None
    assert said > 3


def test_a_step_of_several_passes() -> None:
    one, two = found(1e9), found(1e9, passes=2)
    assert one is not None
    assert two is not None
    assert two.step == pytest.approx(2 * one.step, rel=0.01)
    assert two.needed == one.needed


def test_the_warning() -> None:
    slow = SlowDisk("forward", 6.2e9, 1.5e9, 1, 41 * 60, 10 * 60)
    assert slow_disk_warning(slow, job(o="disk*8, host*24", kv="disk")) == (
        "plan.disk='/scratch' is too slow for this Plan: the forward pass needs 6.2 GB/s of each node's disk, which "
        "gives 1.5 GB/s, so a step takes about 41 min instead of 10 min; put less on disk (plan.o=disk*8, host*24, "
        "plan.kv=disk), or name folders on 5 such disks (plan.disk='/scratch, …')"
    )
    assert slow_disk_line(slow, GPU) == (
        "The disk sets the pace: the forward pass needs 6.2 GB/s of each node's disk, which gives 1.5 GB/s (assumed); "
        "on 5 such disks a step takes 10 min"
    )


def test_what_ithaca_plan_says(tmp_path: Path) -> None:
    """With the rates of a file, as `ithaca doctor --disk` writes them; and nothing where the disk keeps up."""
    words = ["plan", "tiny", "--gpus", "1xRTX4090-24GB", "--tokens", "12M", "--host", "4GB", "--disk", "1TB"]
    file, said = tmp_path / "here.toml", {}
    for rate in ("1e6", "1e12"):
        file.write_text(f'["RTX4090-24GB"]\ndisk_read = [{rate}, "doctor"]\ndisk_write = [{rate}, "doctor"]\n')
        end = CliRunner().invoke(app, [*words, "--hardware", str(file), "--verbose"])
        assert end.exit_code == 0, end.output
        said[rate] = end.output
    line = r"  The disk sets the pace: the \w+ pass needs \S+ .B/s of each node's disk, which gives 1 MB/s; on \d+ "
    assert re.search(line, said["1e6"])
    assert "disk write 0.001 GB/s: doctor" in said["1e6"]
    assert "The disk sets the pace" not in said["1e12"]
