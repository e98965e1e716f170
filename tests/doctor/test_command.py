"""`ithaca doctor` as a user runs it: text, JSON, the file for `--hardware`, exit codes."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ithaca.base.errors import PlanError
from ithaca.cli import app
from ithaca.doctor import devices, disk, recipes
from ithaca.doctor.command import SECTIONS
from ithaca.planner.hardware import read_gpus
from ithaca.plans.recipes import RECIPES
from tests.doctor.small import doctor
from tests.nursery import Nursery
from tests.train.test_mistakes import assert_one_sentence
from tests.train.test_nodes import free_port, slurm

NAMES = [section.name for section in SECTIONS]


def statuses(out: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+): (\w+) \(", out, re.MULTILINE))


def test_one_rank(nursery: Nursery, tmp_path: Path) -> None:
    (end,) = nursery.job(doctor, tmp_path, "--ranks", "1", "--quick", "--disk", str(tmp_path), "--out", "here.toml")
    assert end.code == 0, end.err
    assert "\nWrote here.toml, for: ithaca plan tiny --gpus 1xCPU --hardware here.toml\n" in end.out
    assert statuses(end.out) == dict.fromkeys(NAMES, "right") | {"links": "skipped"}
    assert end.out.startswith("ithaca doctor: 1 rank on 1 node (CPU, gloo)\n")
    assert end.out.endswith("\nAll checks passed.\n")
    for recipe in RECIPES:
        assert re.search(rf"^  {recipe} +one rank +\S+ +\S+ +1.0e-10  right$", end.out, re.MULTILINE), recipe
    assert re.search(r"^  a step +– +[\d.]+ s +[\d.]+ s$", end.out, re.MULTILINE)


@pytest.fixture(scope="module")
def four(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The object that four ranks print, and the file that they write."""
    folder = tmp_path_factory.mktemp("doctor")
    (end,) = nursery.job(doctor, folder, "--ranks", "4", "--quick", "--json", "--out", "here.toml")
    assert end.code == 0, end.err
    return json.loads(end.out), folder / "here.toml"


def test_the_object_of_four_ranks(four: tuple[dict, Path]) -> None:
    found, _ = four
    assert (found["right"], found["ranks"], found["device"], found["out"]) == (True, 4, "cpu", "here.toml")
    assert list(found["nodes"].values()) == [[0, 1, 2, 3]]
    sections = found["sections"]
    assert list(sections) == NAMES
    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(NAMES, "right") | {
        "disk": "skipped"
    }
    assert all(section["took"] >= 0 for section in sections.values())
    assert {"Python", "torch", "CUDA", "NCCL", "cuDNN", "flash-attn-4", "triton", "transformers"} <= sections[
        "versions"
    ]["versions"].keys()
    devices = sections["devices"]
    assert devices["ranks_on_a_device"] == 4
    assert all(len(rates) == 4 and min(rates) == devices["slowest"][name] for name, rates in devices["by_rank"].items())
    assert {"matmul", "bandwidth", "attention.torch-cpu.forward", "attention.naive.backward_64"} <= {
        *devices["slowest"]
    }
    assert {*devices["not_run"]} == {"flash4", "cudnn+flash", "cudnn", "flash"}
    assert sections["links"]["inside"].keys() == {"4096", "65536"}
    assert "across" not in sections["links"]
    tried = {(entry["recipe"], entry["mesh"]) for entry in sections["recipes"]["recipes"]}
    assert {("sweep", "ring 2 × ulysses 2"), ("dense", "shard 4"), ("ring", "ring 4"), ("alst", "ulysses 4")} <= tried
    assert {recipe for recipe, _ in tried} == {"one rank", *RECIPES}
    step = sections["step"]
    assert (step["model"], step["mesh"], step["seconds_predicted_assumed"]) == ("tiny", "ulysses 4", None)
    assert step["seconds"] > 0
    assert step["seconds_predicted"] > 0
    meaning = sections["meaning"]
    assert meaning["gpus"] == "4xCPU"
    assert meaning["longest"]["measured"] == meaning["tokens"] > 0
    assert meaning["step_seconds"]["measured"] > 0
    measured = {row["name"]: row["measured"] for row in meaning["table"]}
    assert measured["matmul"] == pytest.approx(devices["slowest"]["matmul"], rel=1e-3)  # the file has four digits
    assert measured["inside"] == pytest.approx(sections["links"]["inside"]["65536"]["all_to_all"], rel=1e-3)


def test_the_file_is_read_by_plan(four: tuple[dict, Path]) -> None:
    found, file = four
    devices = found["sections"]["devices"]["slowest"]
    gpu = read_gpus(file)["CPU"]
    assert gpu.matmul == pytest.approx(devices["matmul"], rel=1e-3)
    assert gpu.inside == pytest.approx(found["sections"]["links"]["inside"]["65536"]["all_to_all"], rel=1e-3)
    rates = gpu.rates("cudnn+flash")
    assert rates is not None
    assert rates.backward_64 == pytest.approx(devices["attention.torch-cpu.backward_64"], rel=1e-3)
    words = ["plan", "tiny", "--gpus", "4xCPU", "--tokens", "64K", "--hardware", str(file), "--verbose"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert "tiny at 64K tokens on 4xCPU: fits" in said.output
    assert "measured by ithaca doctor: all_to_all, CPU" in said.output
    assert tomllib.loads(file.read_text()).keys() == {"CPU"}


def test_the_page_shows_what_is_said(four: tuple[dict, Path]) -> None:
    """Sections, rows and meshes; figures are of their day."""
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\$ ithaca doctor --ranks 4 .*?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert statuses(shown) == dict.fromkeys(NAMES, "right")

    def titles(lines: list[str]) -> list[str]:
        """What stands in the left columns: all before a run of spaces and a figure, or a tensor's name."""
        return [re.split(r" {2,}(?=[\d–]|model\.)", line)[0] for line in lines]

    sections = four[0]["sections"]
    for section in SECTIONS:
        if section.name in ("devices", "recipes"):
            said = titles(section.lines(sections[section.name]))
            (text,) = re.findall(rf"^{section.name}: .*\n((?:  .*\n)+)", shown, re.MULTILINE)
            written = titles([line.removeprefix("  ") for line in text.splitlines()])
            assert written[2:] == said[2:]  # below the memory and the heads of the columns
    for row in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)[: len(NAMES)]:
        assert row in NAMES


def doctor_with_a_mistake(folder: Path, *words: str) -> None:
    """One gradient of one recipe is wrong, and the disk fails."""
    honest = recipes._recipe_step

    def wrong(recipe: str, *rest):
        found = honest(recipe, *rest)
        if recipe == "alst":
            found["model.layers.1.mlp.up_proj.weight"][3, 5] *= 1 + 1e-6
        return found

    def full(*_: object) -> None:
        raise PlanError("no room")

    recipes._recipe_step, disk.TapeFile = wrong, full  # pyrefly: ignore
    doctor(folder, *words)


def test_a_wrong_gradient_and_a_section_that_fails(nursery: Nursery, tmp_path: Path) -> None:
    (end,) = nursery.job(doctor_with_a_mistake, tmp_path, "--ranks", "1", "--disk", str(tmp_path))
    assert end.code == 1
    assert end.err == "error: 2 of 7 checks failed: disk, recipes\n"
    others = dict.fromkeys(NAMES, "right") | {"links": "skipped"}
    assert statuses(end.out) == others | {"disk": "failed", "recipes": "wrong"}
    assert "! recipe 'alst' on one rank: the gradient of model.layers.1.mlp.up_proj.weight is " in end.out
    assert re.findall(r"^  (\w+) .*WRONG$", end.out, re.MULTILINE) == ["alst"]
    assert "! rank 0: PlanError: no room\n" in end.out
    assert "All checks passed" not in end.out


def doctor_without_devices(folder: Path, *words: str) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("the driver does not answer")

    devices.matmul_rate = lost  # pyrefly: ignore
    doctor(folder, *words)


def test_a_device_that_was_not_measured(nursery: Nursery, tmp_path: Path) -> None:
    """The step is measured all the same; nothing is predicted or written."""
    (end,) = nursery.job(doctor_without_devices, tmp_path, "--ranks", "1", "--out", "here.toml")
    assert end.code == 1
    assert "  ! rank 0: matmul: RuntimeError: the driver does not answer\n" in end.out
    assert re.search(r"^  a step +– +– +[\d.]+ s$", end.out, re.MULTILINE)
    assert "meaning: skipped" in end.out
    assert end.out.endswith("\nNothing was written to here.toml: the device was not measured\n")
    assert not list(tmp_path.iterdir())


MISTAKES = {
    "--ranks is 0: 1 or more is needed": ["--ranks", "0"],
    "--disk nowhere is not a folder where a file can be made: name one": ["--disk", "nowhere"],
    "--out nowhere/here.toml cannot be written: name a file": ["--out", "nowhere/here.toml"],
    "'llama3-8c'": ["--model", "llama3-8c"],
    "--device gpu is not known: cpu and cuda are": ["--device", "gpu"],
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_mistakes(nursery: Nursery, tmp_path: Path, sentence: str) -> None:
    end = nursery.command("doctor", *MISTAKES[sentence], folder=tmp_path)
    assert end.code == 2, end.err
    assert_one_sentence(end)
    assert sentence in end.err
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_under_torchrun(nursery: Nursery, tmp_path: Path) -> None:
    line = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "--", "ithaca", "doctor", "--device", "cpu"]
    end = nursery.command(*line, "--quick", folder=tmp_path)
    assert end.code == 0, end.err
    assert end.out.startswith("ithaca doctor: 2 ranks on 1 node (CPU, gloo)\n")
    assert end.out.endswith("\nAll checks passed.\n")


@pytest.mark.full
def test_under_srun(nursery: Nursery, tmp_path: Path) -> None:
    port = free_port()
    tasks = [(["doctor", "--device", "cpu", "--quick"], slurm("1,1", node, 0, port)) for node in range(2)]
    first, second = nursery.commands(*tasks, folder=tmp_path, disturb=len)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.startswith("ithaca doctor: 2 ranks on 1 node (CPU, gloo)\n")
    assert second.out == ""


@pytest.mark.gpu
def test_on_the_gpus_here(tmp_path: Path) -> None:
    words = ["doctor", "--quick", "--json", "--out", str(tmp_path / "here.toml"), "--disk", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "ithaca", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert found["device"] == "cuda"
    assert read_gpus(tmp_path / "here.toml")
