"""The files of `examples/cluster/` and the Dockerfile, as far as a machine without their services can check them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import typer
import yaml
from torch.distributed.launcher import api as torch_launcher
from torch.distributed.run import get_args_parser

from ithaca.cli import app
from ithaca.config import read_config

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(CLUSTER.glob("*.sbatch"))
FILES = sorted(CLUSTER.iterdir())


def commands(file: Path) -> list[list[str]]:
    """The commands that train, as words, with 2 for each variable."""
    if file.suffix == ".sbatch":
        text = file.read_text()
    else:
        found = yaml.safe_load(file.read_text())
        text = found["run"] if "run" in found else shlex.join(pod(found)["containers"][0]["command"])
    lines = [line for line in text.replace("\\\n", " ").splitlines() if "ithaca train" in line and line[0] != "#"]
    return [shlex.split(re.sub(r"\$\w+", "2", line.strip().removesuffix("&"))) for line in lines]


def pod(jobset: dict) -> dict:
    (job,) = jobset["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_are_accepted(file: Path) -> None:
    """torchrun takes its words, our command line takes the rest, and the configuration is there."""
    ((*before, ithaca, train), words) = split(file)
    assert (ithaca, train) == ("ithaca", "train")
    if "torchrun" in before:
        options = get_args_parser().parse_args([*before[before.index("torchrun") + 1 :], ithaca, train, *words])
        assert options.rdzv_backend == "c10d"
        assert options.max_restarts == 3
        assert options.module
        assert options.training_script == "ithaca"
    context = typer.main.get_command(app).commands["train"].make_context("train", list(words))
    config = read_config(ROOT / context.params["config"], context.params["set_"])
    assert context.params["run"].is_absolute()
    assert config.mesh.ulysses * config.mesh.ring == 16


def split(file: Path) -> tuple[list[str], list[str]]:
    (words,) = commands(file)
    middle = words.index("train") + 1
    return words[:middle], words[middle:]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_are_bash(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    options = re.findall(r"^#SBATCH (--[\w-]+)", file.read_text(), re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--requeue", "--signal", "--time"} <= {*options}


FAKES = {
    # Ends with the codes that the test wrote down, one a start; "hang" waits until it is told to stop
    "srun": """echo "srun $*" >> "$NOTES"
code=$(head -n 1 "$CODES"); sed -i 1d "$CODES"
if [ "$code" = hang ]; then
    touch "$NOTES.running"
    while [ ! -e "$NOTES.asked" ]; do sleep 0.05; done
    sleep 0.3
    echo saved >> "$NOTES"
    exit 0
fi
exit "$code"
""",
    "scancel": 'echo "scancel $*" >> "$NOTES"; touch "$NOTES.asked"\n',
    "scontrol": 'if [ "$1" = show ]; then echo node7; else echo "scontrol $*" >> "$NOTES"; fi\n',
}


def start(script: Path, folder: Path, *codes: str) -> subprocess.Popen:
    """A batch script whose steps end so."""
    for name, text in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "12"}
    environ = {**slurm, "NOTES": str(folder / "notes"), "CODES": str(folder / "codes")}
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.Popen(["bash", str(script)], env={**os.environ, **environ, "PATH": path}, cwd=folder)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_steps_have_the_cores_of_their_tasks(script: Path, tmp_path: Path) -> None:
    """srun does not read --cpus-per-task of sbatch (SLURM 22.05): a task would get one core."""
    assert start(script, tmp_path, "0").wait(timeout=60) == 0
    (line,) = (tmp_path / "notes").read_text().splitlines()
    words = line.split()
    assert "--cpus-per-task=12" in words
    assert words.index("--cpus-per-task=12") < words.index("ithaca")


def notes(folder: Path) -> list[str]:
    return [line.partition(" ")[0] for line in (folder / "notes").read_text().splitlines()]


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [(["0"], 0, 1), (["2", "0"], 2, 1), (["1", "137", "0"], 0, 3), (["1", "1", "1", "137", "0"], 137, 4)],
    ids=["done", "a mistake", "lost ranks", "too many"],
)
def test_a_task_for_each_gpu(tmp_path: Path, codes: list[str], code: int, starts: int) -> None:
    assert start(CLUSTER / "slurm.sbatch", tmp_path, *codes).wait(timeout=60) == code
    assert notes(tmp_path) == ["srun"] * starts


@pytest.mark.parametrize("code", [0, 1])
def test_a_torchrun_for_each_node(tmp_path: Path, code: int) -> None:
    assert start(CLUSTER / "slurm-torchrun.sbatch", tmp_path, str(code), "0").wait(timeout=60) == code
    (said,) = (tmp_path / "notes").read_text().splitlines()
    assert "--nnodes 2 --nproc-per-node 8" in said
    assert "--rdzv-endpoint node7:29500 --rdzv-id 77" in said


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_before_the_time_limit_the_run_saves_and_is_requeued(tmp_path: Path, script: Path) -> None:
    job = start(script, tmp_path, "hang", "0")
    until = time.monotonic() + 60
    while not (tmp_path / "notes.running").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 0
    assert notes(tmp_path) == ["srun", "scancel", "saved", "scontrol"]
    said = (tmp_path / "notes").read_text()
    assert "scancel --signal=TERM 77\n" in said
    assert "scontrol requeue 77\n" in said


def test_the_jobset() -> None:
    found = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    inside, (container,) = job["template"]["spec"], pod(found)["containers"]
    words = dict(word.removeprefix("--").split("=", 1) for word in container["command"] if "=" in word)
    assert inside["completions"] == inside["parallelism"] == int(words["nnodes"])
    assert inside["completionMode"] == "Indexed"
    assert int(words["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = found["metadata"]["name"]
    assert words["rdzv-endpoint"] == f"{name}-{job['name']}-0-0.{name}:29500"
    assert {mount["name"] for mount in container["volumeMounts"]} == {item["name"] for item in pod(found)["volumes"]}
    (variable,) = container["env"]
    assert int(variable["value"]) < pod(found)["terminationGracePeriodSeconds"]


def test_torchrun_reads_the_time_to_save() -> None:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    for file in FILES:
        assert (name in file.read_text()) == (file.name != "slurm.sbatch")
    if tuple(map(int, sys.modules["torch"].__version__.split(".")[:2])) >= (2, 12):
        assert name in Path(torch_launcher.__file__).read_text()


def test_skypilots_file() -> None:
    found = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert found["num_nodes"] == 2
    assert found["resources"]["accelerators"].endswith(":8")
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=found[part], text=True, check=True)
    assert "-c constraints.txt" in found["setup"]
    used = {*re.findall(r"\$(SKYPILOT_\w+)", found["run"])}
    known = {"SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_TASK_ID"}
    assert used == known  # https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html


def dockerfile() -> list[list[str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile_installs_the_pinned_set() -> None:
    steps = dockerfile()
    assert steps[0][0] == "FROM"
    for step in steps:
        if "pip" in step:
            assert step[step.index("-c") + 1] == "constraints.txt"
    extras = {name for step in steps for part in step for name in re.findall(r"\.\[(.*)\]", part)}
    project = (ROOT / "pyproject.toml").read_text()
    for name in ",".join(extras).split(","):
        assert re.search(rf"^{name} = ", project, re.MULTILINE)
    kept = (ROOT / ".dockerignore").read_text().splitlines()
    for path in copied():
        assert (ROOT / path).exists()
        assert f"!{path}" in kept


def copied() -> list[str]:
    return [path for step in dockerfile() if step[0] == "COPY" for path in step[1:-1]]


@pytest.mark.full
def test_what_the_dockerfile_copies_is_enough_to_build(tmp_path: Path) -> None:
    """Its last pip step in a fresh folder, without the packages that a network would bring."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for path in copied():
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, fresh / path)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation", ".", "-w", "out"]
    subprocess.run(build, cwd=fresh, check=True, capture_output=True)
    (wheel,) = (fresh / "out").glob("ithaca-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ithaca/cli.py", "ithaca/py.typed", "ithaca/planner/hardware.toml"} <= {*names}
