"""The table of GPUs: every number has a source, and more can be added."""

from pathlib import Path

import pytest

from ithaca.base.errors import PlanError
from ithaca.model.config_json import find_config
from ithaca.model.families import read_spec
from ithaca.planner.command import read_cluster
from ithaca.planner.hardware import (
    DIRECTIONS,
    NUMBERS,
    AttentionRates,
    Gpu,
    causal_mfu,
    nearest,
    parse_gpus,
    peak_flops,
    read_gpus,
)

WANTED = ("A100-40GB", "A100-80GB", "H100-80GB", "H200-141GB", "B200-180GB", "GH200-96GB", "RTX4090-24GB", "L40S-48GB")


def test_every_number_has_a_source() -> None:
    known = read_gpus()
    assert set(WANTED) == set(known)
    for name, gpu in known.items():
        assert gpu.name == name
        kernels = [rates.kernel for rates in gpu.attention]
        assert kernels == ["flash4", "cudnn+flash", "flash"]
        rates = {f"attention.{kernel}.{number}" for kernel in kernels for number in DIRECTIONS}
        assert set(gpu.sources) == {*NUMBERS, "capability", *rates}
        assert all(gpu.sources.values())
        nominal = float(name.split("-")[1].removesuffix("GB")) * 1e9
        assert nominal <= gpu.memory < 1.1 * nominal
        assert all(rates.backward < rates.forward < gpu.matmul < gpu.flops for rates in gpu.attention)
        assert all(rates.forward_64 < rates.forward for rates in gpu.attention)
        assert (8, 0) <= gpu.capability <= (12, 0)
        assert gpu.across <= gpu.inside
        assert all(0 < getattr(gpu, number) < 1e17 for number in NUMBERS)
        assert gpu.ram > gpu.memory


def test_what_was_not_measured_is_called_assumed() -> None:
    gpu, measured = read_gpus()["A100-80GB"], read_gpus()["H200-141GB"]
    share = measured.matmul / measured.flops
    assert gpu.sources["matmul"] == f"assumed: {100 * share:.0f} % of the peak, as measured on the H200-141GB"
    assert gpu.matmul == pytest.approx(312e12 * share)
    for there, here in zip(measured.attention, gpu.attention, strict=True):
        assert here.kernel == there.kernel
        for number in DIRECTIONS:
            share = getattr(there, number) / measured.flops
            assert getattr(here, number) == pytest.approx(312e12 * share)
            said = gpu.sources[f"attention.{here.kernel}.{number}"]
            assert said == f"assumed: {100 * share:.0f} % of the peak, as measured on the H200-141GB"


def rates_of(gpu: Gpu, kernel: str) -> AttentionRates:
    found = gpu.rates(kernel)
    assert found is not None
    return found


def test_rates_belong_to_a_kernel_and_a_head_size() -> None:
    gpu = read_gpus()["H200-141GB"]
    assert rates_of(gpu, "flash4").of(128) == rates_of(gpu, "flash4").of(96) == (655e12, 617e12)
    assert rates_of(gpu, "flash4").of(64) == rates_of(gpu, "flash4").of(32) == (518e12, 523e12)
    assert rates_of(gpu, "cudnn+flash").of(128) == (597e12, 541e12)
    assert gpu.rates("naive") is None
    assert (gpu.capability, read_gpus()["L40S-48GB"].capability) == ((9, 0), (8, 9))


def test_a_file_of_an_older_release(tmp_path: Path) -> None:
    """Its two rates are those of `cudnn+flash` at head size 128; all else stays."""
    file, own = tmp_path / "old.toml", read_gpus()["H200-141GB"]
    file.write_text("""["H200-141GB"]
attention_forward = [500e12, "measured by --measure"]
attention_backward = [400e12, "measured by --measure"]
""")
    gpu = read_gpus(file)["H200-141GB"]
    before, now = (rates_of(each, "cudnn+flash") for each in (own, gpu))
    assert (now.forward, now.backward) == (500e12, 400e12)
    assert now.forward_64 == pytest.approx(500e12 * before.forward_64 / before.forward)
    assert now.backward_64 == pytest.approx(400e12 * before.backward_64 / before.backward)
    assert rates_of(gpu, "flash4") == rates_of(own, "flash4")
    said = "measured by --measure; the file names no kernel, so it is that of cudnn+flash"
    assert gpu.sources["attention.cudnn+flash.forward"] == said
    # What is derived for other GPUs follows
    assert rates_of(read_gpus(file)["A100-80GB"], "cudnn+flash").forward == pytest.approx(500e12 * 312 / 989)


def test_a_file_of_today(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    file.write_text("""["A100-80GB"]
capability = [9.0, "a made-up one"]
["A100-80GB".attention."flash4"]
forward = [1e14, "mine"]
backward = [2e14, "mine"]
forward_64 = [3e14, "mine"]
""")
    gpu, like = read_gpus(file)["A100-80GB"], rates_of(read_gpus()["H200-141GB"], "flash4")
    found = rates_of(gpu, "flash4")
    assert (found.forward, found.backward, found.forward_64) == (1e14, 2e14, 3e14)
    assert found.backward_64 == pytest.approx(2e14 * like.backward_64 / like.backward)
    assert gpu.sources["attention.flash4.backward_64"].startswith("assumed: 85 % of head size 128")
    assert gpu.capability == (9, 0)
    assert rates_of(gpu, "cudnn+flash") == rates_of(read_gpus()["A100-80GB"], "cudnn+flash")


def test_counts_and_names() -> None:
    known = read_gpus()
    for text in ("8xH100-80GB", "8 x h100-80gb", "8×H100-80GB"):
        count, gpu = parse_gpus(text, known)
        assert (count, gpu.name) == (8, "H100-80GB")
    assert parse_gpus("L40S-48GB", known)[0] == 1
    assert parse_gpus("16xh200", known)[1].name == "H200-141GB"
    with pytest.raises(PlanError, match="GPU 'A100' could be A100-40GB or A100-80GB: name one of them"):
        parse_gpus("A100", known)
    with pytest.raises(PlanError, match=r"GPU 'H100-80G' is not known: did you mean 'H100-80GB'\?"):
        parse_gpus("8xH100-80G", known)
    with pytest.raises(PlanError, match="--gpus 0xH100-80GB has 0 GPUs: give 1 or more, as 8xH100-80GB"):
        parse_gpus("0xH100-80GB", known)
    assert parse_gpus(5000 * "9" + "xH200", known)[0] > 2**60


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H100-80G", "H100-80GB"),
        ("h2000", "H200-141GB"),
        ("A100-60GB", "A100-80GB"),  # 'A100' alone would not do
        ("A100-42GB", "A100-40GB"),
        ("4090", "RTX4090-24GB"),
    ],
)
def test_the_nearest_name_is_one_that_works(name: str, near: str) -> None:
    known = read_gpus()
    with pytest.raises(PlanError, match=rf"GPU '{name}' is not known: did you mean '{near}'\?"):
        parse_gpus(f"8x{name}", known)
    assert parse_gpus(f"8x{near}", known)[1].name == near


def test_a_name_like_no_other() -> None:
    with pytest.raises(PlanError, match="GPU 'Abacus' is not known: known are A100-40GB, A100-80GB"):
        parse_gpus("Abacus", read_gpus())


@pytest.mark.parametrize(
    ("driver", "gigabytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 85, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 85, "H100-80GB"),
        ("NVIDIA H100 NVL", 100, "H100-80GB"),
        ("NVIDIA H200", 150, "H200-141GB"),
        ("NVIDIA GH200 480GB", 102, "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", 150, "GH200-96GB"),  # not the H200, whose memory is nearer
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090-24GB"),
        ("NVIDIA L40S", 48, "L40S-48GB"),
    ],
)
def test_what_a_driver_calls_it(driver: str, gigabytes: int, name: str) -> None:
    assert nearest(driver, gigabytes * 10**9, read_gpus()).name == name


def test_mfu_is_of_the_gpu_s_own_peak() -> None:
    """One basis for plan, rehearsal and training: an A100 that does half as much as an H100 is the better used."""
    assert peak_flops("NVIDIA A100-SXM4-80GB", 85 * 10**9) == 312e12
    assert peak_flops("NVIDIA H200", 150 * 10**9) == 989e12
    assert peak_flops("Tesla V100-SXM2-32GB", 34 * 10**9) is None
    spec = read_spec(find_config("tiny")[0])
    assert causal_mfu(spec, 2048, 1e6, 312e12) == pytest.approx(1e6 * spec.flops_per_token(2048) / 312e12)


def test_a_gpu_of_another_file_is_found_by_its_driver(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('["v100-32GB"]\n' + made_up())
    known = read_gpus(file)
    assert nearest("Tesla V100-SXM2-32GB", 34 * 10**9, known).name == "v100-32GB"
    with pytest.raises(PlanError, match="'Tesla V100-SXM2-32GB' is not a known GPU: describe it in a file"):
        nearest("Tesla V100-SXM2-32GB", 34 * 10**9, read_gpus())


def made_up() -> str:
    """Numbers of a GPU, without those that can be derived."""
    return "\n".join(f'{name} = [1e9, "made up"]' for name in NUMBERS if name != "matmul")


def test_another_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('["H100-80GB"]\nacross = [100e9, "two cards"]\n["New-1GB"]\n' + made_up())
    known = read_gpus(file)
    assert (known["H100-80GB"].across, known["H100-80GB"].sources["across"]) == (100e9, "two cards")
    assert known["H100-80GB"].memory == 80e9
    assert known["New-1GB"].matmul == pytest.approx(1e9 * known["H200-141GB"].matmul / known["H200-141GB"].flops)
    assert len(read_gpus()) == len(WANTED)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('["X"]\nmemory = 5', "memory of GPU 'X' is 5: write a number and its source"),
        ('["X"]\nmemory = [-5, "no"]', "memory of GPU 'X' is"),
        ('["X"]\nmemory = [inf, "no"]', "memory of GPU 'X' is too large: give at most 1e\\+24"),
        (f'["X"]\nmemory = [1{400 * "0"}, "no"]', "memory of GPU 'X' is too large: give at most 1e"),
        ('["X"]\nmemory = [nan, "no"]', "memory of GPU 'X' is .*nan, 'no'.: write a number and its source"),
        ('["X"]\nmemory = [true, "no"]', "memory of GPU 'X' is .*True, 'no'.: write a number and its source"),
        ('["X"]\nmemory = [1e-300, "no"]', "memory of GPU 'X' is .*1e-300, 'no'.: write a number and its source"),
        ('["X"]\nmemory = [5]', "memory of GPU 'X' is"),
        ('["H200-141GB"]\nmatmul = 5', "matmul of GPU 'H200-141GB' is 5: write a number and its source"),
        ('["X"]\n' + made_up().replace("ram =", "# ="), "GPU 'X' has no ram: write a number and its source"),
        ('["X"]\nmemory = [5, "s"]', "GPU 'X' has no flops: write a number and its source"),
        (
            '["H100-80GB"]\nmemroy = [5, "s"]',
            "GPU 'H100-80GB' has an unknown number 'memroy': did you mean 'memory'",
        ),
        ('["H200-141GB"]\nattention = 5', "attention of GPU 'H200-141GB' is 5: write a table for each kernel, as"),
        (
            '["H200-141GB".attention]\nflash4 = 5',
            "attention.flash4 of GPU 'H200-141GB' is 5: write a table, as .*H200-141GB.*.attention.flash4",
        ),
        ('["H200-141GB".attention.flash5]', "has rates of an unknown kernel 'flash5': did you mean 'flash"),
        ('["H200-141GB".attention.naive]', "an unknown kernel 'naive': known are flash4, cudnn.flash, flash"),
        (
            '["H200-141GB".attention.flash4]\nforwards = [5, "s"]',
            "attention.flash4 of GPU 'H200-141GB' has an unknown rate 'forwards': did you mean 'forward'",
        ),
        (
            '["H200-141GB".attention.flash4]\nforward = 5',
            "attention.flash4.forward of GPU 'H200-141GB' is 5: write a number and its source",
        ),
        ('["H200-141GB"]\nattention_forward = 5', "attention_forward of GPU 'H200-141GB' is 5: write a number"),
        ("x = 1", "'x' in '.*' is not a GPU: write a table of numbers"),
        ("[", "cannot be read as TOML"),
        (f"x = {20_000 * '['}", "cannot be read as TOML"),
    ],
)
def test_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(PlanError, match=sentence):
        read_gpus(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read \\(No such file"):
        read_gpus(tmp_path / "none.toml")


def test_fewer_gpus_of_a_node() -> None:
    """Memory that was given stays that of a node; the usual memory is that of the GPUs used."""
    given, usual = (read_cluster("8xH100-80GB", None, host, "28TB") for host in ("1.9TB", None))
    assert (given.resized(4).host, given.resized(4).disk) == (1.9e12, 28e12)
    assert usual.resized(4).host == usual.host / 2
    assert usual.resized(16).host == usual.host
    assert usual.resized(4).host == read_cluster("4xH100-80GB", None, None, "0").host


@pytest.mark.parametrize("gpus", ["4xH100-80GB", "16xH100-80GB", "7x2xH100-80GB", "2x16xH100-80GB", "1x16xH100-80GB"])
def test_gpus_as_the_option_takes_them(gpus: str) -> None:
    assert read_cluster(gpus, None, None, "0").gpus == gpus


@pytest.mark.parametrize(
    ("gpus", "count", "wanted"),
    [
        ("2x2xH100-80GB", 8, "4x2xH100-80GB"),
        ("2x2xH100-80GB", 2, "2xH100-80GB"),
        ("2x16xH100-80GB", 16, "1x16xH100-80GB"),
        ("2x8xH100-80GB", 8, "8xH100-80GB"),
    ],
)
def test_advice_of_other_gpus_can_be_asked_for(gpus: str, count: int, wanted: str) -> None:
    """With the same options, `ithaca plan` means the same cluster."""
    other = read_cluster(gpus, None, "300GB", "0").resized(count)
    assert other.gpus == wanted
    asked = read_cluster(wanted, None, "300GB", "0")
    assert (asked.machine, asked.host, asked.budget) == (other.machine, other.host, other.budget)
