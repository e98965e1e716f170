"""The attention kernel that a prediction is for, and how its rate depends on head size and documents."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ithaca
from ithaca.attention.kernels import facts
from ithaca.base.errors import PlanError
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.answer.assumptions import kernel_text
from ithaca.planner.answer.mesh_table import compare_meshes
from ithaca.planner.attention_rates import BY_LENGTH, by_length, job_kernel, ragged_share
from ithaca.planner.command import read_cluster
from ithaca.planner.hardware import CPU, Machine, read_gpus
from ithaca.planner.search import Answer, search
from ithaca.planner.seconds import Seconds, predict_seconds
from ithaca.plans.plan import Plan
from ithaca.schedule.job import Job
from ithaca.schedule.step_memory import step_memory

K = 2**10
GPUS = read_gpus()
H200 = GPUS["H200-141GB"]


@pytest.fixture(params=[True, False], ids=["installed", "missing"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the package of flash4 is there."""
    monkeypatch.setattr(facts, "_installed", lambda _: request.param)
    return request.param


def job_of(tokens: int = 64 * K, model: str = "llama3-8b", kernel: str = "auto", **more: Any) -> Job:
    plan = Plan(recipe="dense", checkpoint="none", kernel=kernel)
    return Job(spec=read_spec(find_config(model)[0]), plan=plan, tokens=tokens, **more)


def seconds(job: Job) -> Seconds:
    return predict_seconds(job, H200, Machine(nodes=1, gpus=1))


def test_the_kernel_of_a_gpu(installed: bool) -> None:
    assert job_kernel(job_of(), H200).name == ("flash4" if installed else "cudnn+flash")
    assert job_kernel(job_of(), GPUS["B200-180GB"]).name == ("flash4" if installed else "cudnn+flash")
    assert job_kernel(job_of(), GPUS["A100-80GB"]).name == "cudnn+flash"  # flash4 needs Hopper
    assert job_kernel(job_of(kernel="flash"), H200).name == "flash"


def answer_of(gpus: str, model: str = "llama3-8b") -> tuple[Answer, str]:
    spec, cluster = read_spec(find_config(model)[0]), read_cluster(gpus, None, None, "0")
    answer = search(spec, cluster, 128 * K)
    assert answer is not None
    return answer, kernel_text(spec, cluster, answer, None)


def test_the_answer_names_it(installed: bool) -> None:
    """The Plan itself stays `auto`: where it trains, the package may be there or not."""
    answer, text = answer_of("8xH200")
    assert answer.plan.kernel == "auto"
    assert answer.kernel == ("flash4" if installed else "cudnn+flash")
    if installed:
        assert text == "flash4"
    else:
        assert text.startswith("cudnn+flash; with flash4 a step would take ")
        assert text.endswith(": pip install 'ithaca[flash4]'")
    answer, text = answer_of("8xA100-80GB")
    assert answer.kernel == text == "cudnn+flash"


def test_a_kernel_that_is_asked_for(installed: bool) -> None:
    """The Plan names it where `auto` here would take another one, so that a run does not fall back to that."""
    spec, cluster = read_spec(find_config("llama3-8b")[0]), read_cluster("8xH200", None, None, "0", kernel="flash4")
    answer = search(spec, cluster, 128 * K)
    assert answer is not None
    assert (answer.kernel, answer.plan.kernel) == ("flash4", "flash4")
    said = kernel_text(spec, cluster, answer, None)
    if installed:
        assert said == "flash4"
        assert answer.seconds == answer_of("8xH200")[0].seconds
    else:
        assert said == "flash4, which is not installed here; where it trains: pip install 'ithaca[flash4]'"
    slow = search(spec, replace(cluster, kernel="flash"), 128 * K)
    assert slow is not None
    assert slow.plan.kernel == "flash"
    assert slow.seconds.step > 1.5 * answer.seconds.step


@pytest.mark.parametrize(
    ("gpus", "kernel", "said"),
    [
        (
            "8xA100-80GB",
            "flash4",
            "--kernel flash4 does not run on A100-80GB (compute capability 8.0) with heads of 128; use cudnn+flash, "
            "cudnn, flash, auto",
        ),
        ("8xH100-80GB", "torch-cpu", "--kernel torch-cpu does not run on H100-80GB (compute capability 9.0) with"),
        (
            "8xH100-80GB",
            "naive",
            "--kernel naive is for comparisons: its time is not predicted; use flash4, ",
        ),
        ("8xH100-80GB", 3, "an int was given, but plan takes the name of a kernel: kernel='flash4'"),
        ("8xH100-80GB", "flsh4", "--kernel flsh4 does not exist: did you mean 'flash4'?"),
    ],
)
def test_kernels_that_are_refused(gpus: str, kernel: Any, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        ithaca.plan(read_spec(find_config("llama3-8b")[0]), gpus, tokens="128K", kernel=kernel)


def test_no_kernel_can_be_chosen() -> None:
    """On a CPU, whose rates a file has under names of kernels for GPUs; and for heads that only `naive` has."""
    spec, cluster = read_spec(find_config("llama3-8b")[0]), read_cluster("4xH100-80GB", None, None, "0", kernel="flash")
    cpu = replace(cluster, gpu=replace(cluster.gpu, name=CPU))
    with pytest.raises(PlanError, match="--kernel flash is for GPUs, and 4xCPU has none: leave it out"):
        search(spec, cpu, 8 * K)
    with pytest.raises(PlanError, match="--kernel flash cannot be chosen: only naive has heads of 512; use auto"):
        search(replace(spec, head_size=512), cluster, 8 * K)


def test_meshes_that_do_not_fit_are_timed_with_the_kernel() -> None:
    spec = read_spec(find_config("llama3-70b")[0])
    cluster = read_cluster("2x8xH100-80GB", None, None, "0")
    slow, fast = (
        {choice.axes: choice.seconds.step for choice, answer in compared if answer is None}
        for kernel in ("flash", "flash4")
        for compared in [compare_meshes(spec, replace(cluster, kernel=kernel), 1024 * K, "sweep")]
    )
    assert fast
    assert all(slow[axes] > 1.5 * fast[axes] for axes in fast)


def test_a_kernel_that_was_measured_where_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as installed, but the Plan names it: here `auto` is another one."""
    monkeypatch.setattr(facts, "_installed", lambda _: False)
    file, spec = tmp_path / "rates.toml", read_spec(find_config("llama3-8b")[0])
    file.write_text("""["H200-141GB".attention.flash4]\nforward = [7e14, "measured"]\n""")
    answer = search(spec, read_cluster("8xH200", file, None, "0"), 128 * K)
    assert answer is not None
    assert (answer.kernel, answer.plan.kernel) == ("flash4", "flash4")
    here = read_cluster("8xH200", file, None, "0")
    assert kernel_text(spec, here, answer, None) == "flash4, whose rates are in the file of --hardware"
    file.write_text("""["H200-141GB".attention.flash4]\n""")  # no rate in it
    assert not read_cluster("8xH200", file, None, "0").gpu.described
    file.write_text("""["H200-141GB".attention.flash4]\nforward = [7e14, "measured"]\n""")
    other = search(spec, read_cluster("8xH100-80GB", file, None, "0"), 128 * K)
    assert other is not None
    assert (other.kernel, other.plan.kernel) == ("cudnn+flash", "auto")


def test_what_installing_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds in that line are those of an answer with it."""
    monkeypatch.setattr(facts, "_installed", lambda _: True)
    with_it, _ = answer_of("8xH200")
    monkeypatch.setattr(facts, "_installed", lambda _: False)
    without, text = answer_of("8xH200")
    assert with_it.seconds.step < 0.95 * without.seconds.step
    assert f"would take {with_it.seconds.step:.3g} s" in text


def test_memory_is_that_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's backward takes more for itself, and that decides what fits."""
    found = {}
    for installed in (True, False):
        monkeypatch.setattr(facts, "_installed", lambda _, installed=installed: installed)
        found[installed] = {gpus: answer_of(gpus)[0].memory.total for gpus in ("1xH200", "1xA100-80GB")}
    assert found[True]["1xH200"] != found[False]["1xH200"]
    assert found[True]["1xA100-80GB"] == found[False]["1xA100-80GB"]


def test_memory_of_a_recipe_that_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for `dense`, on a GPU on which flash4 does not run even if it is installed."""
    monkeypatch.setattr(facts, "_installed", lambda _: True)
    spec, cluster = read_spec(find_config("llama3.2-1b")[0]), read_cluster("1xA100-80GB", None, None, "0")
    answer = search(spec, cluster, 64 * K, "dense")
    assert answer is not None
    job = Job(spec=spec, plan=replace(answer.plan, kernel="cudnn+flash"), tokens=64 * K)
    assert answer.memory == step_memory(job)
    assert answer.memory != step_memory(replace(job, plan=replace(answer.plan, kernel="flash4")))


def test_rates_of_a_kernel_and_head_size() -> None:
    wide, narrow = job_of(), job_of(model="llama3.2-1b")
    for job, (flash4, cudnn) in ((wide, ((655, 617), (597, 541))), (narrow, ((518, 523), (457, 439)))):
        flops = 2 * job.spec.layers * job.spec.heads * job.spec.head_size * (64 * K) ** 2
        for kernel, rates in (("flash4", flash4), ("cudnn+flash", cudnn)):
            found = seconds(replace(job, plan=replace(job.plan, kernel=kernel)))
            assert found.attention_forward == pytest.approx(flops / rates[0] / 1e12)
            assert found.attention_backward == pytest.approx(2.5 * flops / rates[1] / 1e12)


def test_short_documents_are_slower() -> None:
    assert by_length("flash4", 4 * K) == pytest.approx((566 / 662, 487 / 616))
    assert by_length("flash4", 64 * K) == by_length("flash4", 1024 * K) == (1, 1)
    assert by_length("cudnn+flash", 1024 * K) == (1, 1)  # it cuts long calls
    assert by_length("cudnn", 512 * K) == (522 / 589, 1)  # this one does not
    assert by_length("flash", 4 * K) == (1, 1)
    for kernel in BY_LENGTH:
        shares = [by_length(kernel, length) for length in (128, 512, K, 2 * K, 4 * K)]
        for direction in (0, 1):
            assert all(0.25 <= a[direction] <= b[direction] for a, b in pairwise(shares))
    forward, backward = by_length("flash4", 16 * K)
    assert 633 / 662 < forward < 1
    assert 577 / 616 < backward < 1


def test_documents_in_a_step() -> None:
    """Measured on an H200, head size 128: 16 documents of 4K at 566 and 487 TFLOP/s, one of 64K at 662 and 616."""
    one, packed = (seconds(job_of(kernel="flash4", documents=found)) for found in (None, (4 * K,) * 16))
    assert packed.attention_forward == pytest.approx(one.attention_forward / 16 * 662 / 566)
    assert packed.attention_backward == pytest.approx(one.attention_backward / 16 * 616 / 487)


def test_what_cudnn_leaves_to_flash() -> None:
    assert ragged_share((4 * K,) * 16) == 0  # equal ones need no cutting
    assert ragged_share((16 * K, 8 * K)) == 0
    assert ragged_share((16 * K, 4 * K)) == pytest.approx(4**2 / (16**2 + 4**2))
    assert ragged_share((20 * K, 8 * K)) == pytest.approx((20**2 - 16**2) / (20**2 + 8**2))
    odd, even = (
        seconds(job_of(kernel="cudnn+flash", documents=found)).attention_forward
        for found in ((4 * K, 4 * K - 1, 4 * K + 1) * 5 + (4 * K,), (4 * K,) * 16)
    )
    assert odd > 1.5 * even
